"""Members that host reducers get the bits of a star, whoever can be reached."""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import Diverged, Refused
from edgetrain.exchange.hub.direct import share_out
from edgetrain.exchange.hub.effects import Send
from edgetrain.exchange.hub.places import LEAD, Reach
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.messages import Reply
from tests.fakes.direct_room import Died, DirectRoom, NotedReducer

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
    reducers = sorted(place for place in room.lead.part.places.stretches if place != LEAD)
    assert reducers == [f"m{i}" for i in range(4) if i not in clients]
    assert threading.active_count() == before


def test_where_nobody_can_be_reached_it_is_a_star_and_says_so_in_one_line():
    star = DirectRoom("dga", 3, 8, star=True, delay=2).run()
    room = DirectRoom("dga", 3, 8, clients=(0, 1, 2), delay=2)
    assert np.array_equal(room.run(), star)
    (line,) = [note.reason for note in room.notes if note.event == "reducers"]
    assert line.startswith("star: the hub reduces")


class Deaths(DirectRoom):
    """Members die before these steps: {member: step}."""

    def __init__(self, deaths, *args, **other):
        members = args[1]
        policy = Policy(members, heartbeat_s=0.1, lost_after_s=0.3, rejoin_s=5.0, deadline_s=30.0)
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
            end = 10**9 if following is None else following.part.began_at
            counted += [each for number, each in hub.part.counted if number < end]
        assert len(counted) == len(set(counted)), span
        for member in alive:
            rounds = sorted(meant_for for name, meant_for in counted if name == member.name_)
            assert rounds == list(range(member.driver.half.round)), (span, member.name_, rounds)


class EarlyDeath(Deaths):
    """A member dies once training has begun at the hub, or is about to, and it enters nowhere."""

    def __init__(self, victim, *args, **other):
        super().__init__({}, *args, **other)
        self.victim = victim

    def before_dial(self, member, neighbours):
        if member.name_ == self.victim and not neighbours.map.trying:
            raise Died


@pytest.mark.parametrize("clients", [(), (3,)])
@pytest.mark.parametrize("victim", ["m0", "m2", "m3"])
def test_a_member_that_dies_before_all_have_entered_is_told_in_one_line_or_costs_nothing(
    monkeypatch, victim, clients
):
    monkeypatch.setattr("tests.fakes.direct_room.PATIENCE_S", 20.0)
    room = EarlyDeath(victim, "fedavg", 4, 8, clients=clients)
    with contextlib.suppress(Refused):
        room.run()
    for member in room.members:
        member.join(20.0)
        assert not member.is_alive()
    others = [m for m in room.members if not isinstance(m.error, Died)]
    refused = [m for m in others if isinstance(m.error, Refused)]
    assert len(others) == 3
    assert all("was lost before training began" in str(member.error) for member in refused)
    assert all(member.error is None for member in others if member not in refused)
    assert len({m.params.tobytes() for m in others if m not in refused}) <= 1


@pytest.mark.real
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
    told = [note.reason for note in room.notes if note.event in ("map", "reducers")]
    assert any("is lost" in line for line in told)
    assert any("now" in line for line in told)
    counted_once(room)


class Crashes(DirectRoom):
    """The hub that all join is killed, and started again, before these steps of member 0."""

    crashes = (5, 6, 11)

    def before_step(self, member, step):
        if member.index == 0 and step in self.crashes:
            self.crash_lead()


@pytest.mark.parametrize(
    ("strategy", "clients", "other"),
    [
        ("fedavg", (), {}),
        ("dga", (1,), {"delay": 4, "codec": "topk(0.05) | q2"}),
        ("dga", (0, 1, 2, 3), {"delay": 4, "codec": "int8"}),
    ],
)
def test_a_hub_that_is_started_again_goes_on_with_the_same_map_and_bits(
    strategy, clients, other, tmp_path
):
    star = DirectRoom(strategy, 4, 16, star=True, **other).run()
    policy = Policy(4, heartbeat_s=0.1, rejoin_s=30.0)
    room = Crashes(strategy, 4, 16, clients=clients, policy=policy, **other)
    room.keep_journal(tmp_path / "journal")
    params = room.run()
    assert np.array_equal(params, star)
    assert room.lead.epoch == len(room.crashes)
    assert len(room.reducers) == 4 - len(clients)


class CrashAfterDeath(Deaths):
    """And the hub is killed once another member reduces in the place of one that died."""

    crashed = False

    def before_step(self, member, step):
        moved = any("now" in note.reason for note in self.notes if note.event == "reducers")
        if moved and not self.crashed and member.index == 0:
            self.crashed = True
            self.crash_lead()
        super().before_step(member, step)


@pytest.mark.real
def test_a_hub_that_is_started_again_knows_who_took_over(tmp_path):
    room = CrashAfterDeath({1: 5, 2: 40}, "fedavg", 4, 60)
    room.keep_journal(tmp_path / "journal")
    room.run()
    alive = [member for member in room.members if member.index not in room.deaths]
    assert all(np.array_equal(member.params, alive[0].params) for member in alive)
    assert room.crashed
    assert room.lead.epoch == 1
    counted_once(room)


class Liar(NotedReducer):
    """Sends one member another reply than it has added to its base."""

    def handle(self, *what):
        return [self._spoilt(effect) for effect in super().handle(*what)]

    def _spoilt(self, effect):
        match effect:
            case Send(message=Reply(round=3, part=0) as reply):
                other = np.frombuffer(reply.payload, np.float32) * np.float32(2)
                return Send(effect.to, replace(reply, payload=other.tobytes()))
        return effect


class LyingRoom(DirectRoom):
    def reducer(self, first, end):
        made = super().reducer(first, end)
        if first:
            return made
        stretch = replace(self.terms.stretch, first=first, end=end)
        return self.hub(replace(self.terms, stretch=stretch), Liar())


def test_a_reducer_that_sends_a_wrong_sum_is_named():
    with pytest.raises(
        Diverged, match=r"after round 3 the base is not that of m\d, which has element"
    ):
        LyingRoom("fedavg", 3, 16).run()


def peak_of(*words, **asked):
    """The median of three: it also depends on when garbage is collected."""
    found = []
    for _ in range(3):
        room = DirectRoom(*words, **asked)
        gc.collect()
        tracemalloc.start()
        try:
            room.run()
            found.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return statistics.median(found)


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.real), 4])
def test_members_that_reduce_keep_what_a_hub_does_and_two_vectors_each(delay):
    asked = {"elements": 200_000, "local_steps": 2, "delay": delay}
    star = peak_of("dga(paper)", 4, 12, star=True, **asked)
    direct = peak_of("dga(paper)", 4, 12, **asked)
    assert direct <= star + 4 * 2 * 4 * 200_000
