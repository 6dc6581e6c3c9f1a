"""Members that host reducers get the bits of a star, whoever can be reached."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.direct import share_out
from edgetrain.exchange.hub.places import LEAD, Reach
from edgetrain.exchange.hub.terms import Policy
from tests.fakes.direct_room import Died, DirectRoom

NAMES = tuple("abcdefgh")


def reach_of(pairs, names=NAMES):
    return Reach(names, dict.fromkeys(pairs, 0.01))


def all_to(names, among=NAMES):
    return [(one, name) for one in among for name in names if one != name]


@given(st.sets(st.sampled_from(NAMES)), st.integers(1, 40))
def test_each_range_has_one_reducer_whom_all_reach(reached, ranges):
    found = share_out(reach_of(all_to(reached)), ranges)
    owners = [n for first, end in sorted(found.values()) for n in range(first, end)]
    assert owners == list(range(ranges))
    if len(reached) < 2 or ranges < 2:
        assert set(found) == {LEAD}
    else:
        assert set(found) <= reached
        sizes = [end - first for first, end in found.values()]
        assert max(sizes) - min(sizes) <= 1
        assert len(found) == min(len(reached), ranges)


def test_who_is_faster_reduces_more():
    reach = reach_of(all_to("abc"))
    found = share_out(reach, 16, {"a": 1.0, "b": 2.0, "c": 5.0})
    assert found == {"a": (0, 2), "b": (2, 6), "c": (6, 16)}
    assert share_out(reach, 4, {"a": 1e-9, "b": 1.0, "c": 1.0}) == {"b": (0, 2), "c": (2, 4)}


def test_one_pair_that_cannot_connect_takes_a_member_out_of_the_reducers():
    pairs = [pair for pair in all_to("abcd") if pair != ("e", "b")]
    assert set(share_out(reach_of(pairs), 16)) == {"a", "c", "d"}


CASES = [
    ("fedavg", "fp32", "", ()),
    ("fedavg", "int8", "", (1,)),
    ("dga", "topk(0.05) | q2", "fp32", (0, 2)),
    ("dga", "topk(0.05) | q2", "", ()),
    ("diloco", "int8", "fp32", (3,)),
    ("diloco", "topk(0.05) | q2", "int8", (0, 1)),
    ("sync-sgd", "fp32", "", (2,)),
]


@pytest.mark.parametrize(("strategy", "codec", "reply", "clients"), CASES)
def test_the_bits_are_those_of_a_star(strategy, codec, reply, clients):
    before = threading.active_count()
    asked = {"codec": codec, "reply_codec": reply, "delay": 4}
    star = DirectRoom(strategy, 4, 12, star=True, **asked).run()
    room = DirectRoom(strategy, 4, 12, clients=clients, **asked)
    params = room.run()
    assert np.array_equal(params, star)
    assert all(np.array_equal(member.params, star) for member in room.members)
    reducers = sorted(place for place in room.lead.places.stretches if place != LEAD)
    assert reducers == [f"m{i}" for i in range(4) if i not in clients]
    assert threading.active_count() == before


def test_where_nobody_can_be_reached_it_is_a_star_and_says_so_in_one_line():
    star = DirectRoom("dga", 3, 8, star=True, delay=2).run()
    room = DirectRoom("dga", 3, 8, clients=(0, 1, 2), delay=2)
    assert np.array_equal(room.run(), star)
    (line,) = [note.reason for note in room.notes if note.event == "map"]
    assert line.startswith("star: the hub reduces")


class Deaths(DirectRoom):
    """Members die before these steps: {member: step}."""

    def __init__(self, deaths, *args, **other):
        members = args[1]
        policy = Policy(members, beat_s=0.1, gone_s=0.3, return_s=5.0, deadline_s=30.0)
        super().__init__(*args, policy=policy, **other)
        self.deaths = deaths

    def before_step(self, member, step):
        if self.deaths.get(member.index) == step:
            raise Died


def counted_once(room):
    """In the rounds of each stretch that members have replies of, each contribution is counted
    once, and none of a member that lives is missing."""
    alive = [m for m in room.members if m.index not in room.deaths]
    for span, hubs in room.histories().items():
        counted = []
        for hub, following in zip(hubs, [*hubs[1:], None], strict=True):
            end = 10**9 if following is None else following.began_at
            counted += [each for number, each in hub.counted if number < end]
        assert len(counted) == len(set(counted)), span
        for member in alive:
            rounds = sorted(meant_for for name, meant_for in counted if name == member.name_)
            assert rounds == list(range(member.driver.half.round)), (span, member.name_, rounds)


@pytest.mark.parametrize(
    ("strategy", "deaths", "other"),
    [
        ("fedavg", {1: 5}, {}),
        ("dga", {2: 7}, {"delay": 4, "codec": "int8"}),
        ("dga", {1: 5, 3: 11}, {"delay": 6, "codec": "topk(0.05) | q2"}),
        ("dga", {1: 5, 0: 4}, {"delay": 6}),
        ("fedavg", {1: 10, 0: 1}, {"codec": "topk(0.05) | q2"}),
        ("diloco", {0: 6}, {"clients": (3,), "reply_codec": "int8"}),
    ],
)
def test_a_reducer_that_dies_costs_no_contribution(strategy, deaths, other):
    room = Deaths(deaths, strategy, 4, 16, **other)
    room.run()
    alive = [member for member in room.members if member.index not in deaths]
    assert all(np.array_equal(member.params, alive[0].params) for member in alive)
    assert len({member.driver.half.checksum for member in alive}) == 1
    told = [note.reason for note in room.notes if note.event == "map"]
    assert any("is lost" in line for line in told)
    assert any("now" in line for line in told)
    counted_once(room)
