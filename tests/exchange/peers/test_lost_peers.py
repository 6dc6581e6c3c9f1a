"""Members of a ring, butterfly or tree are lost: the others run again from what they kept."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import Refused
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.peers.schedules import SHAPES
from tests.fakes.collective_room import CollectiveMember, CollectiveRoom
from tests.fakes.direct_room import Died, DirectRoom

pytestmark = pytest.mark.real

STEPS, EVERY = 8, 2


def policy(members):
    return Policy(members, heartbeat_s=0.1, lost_after_s=0.4)


def left_of(room):
    left = [member for member in room.members if not isinstance(member.error, Died)]
    assert not any(member.error for member in left)
    return left


def check(room, killed=0):
    """Those that are left are equal, and what they have is the mean of what was counted."""
    left = left_of(room)
    assert len(left) == len(room.members) - killed
    assert len({member.params.tobytes() for member in left}) == 1
    assert np.allclose(left[0].params, room.by_hand(), rtol=0, atol=1e-5)
    counted = room.counted
    assert sorted(counted) == list(range(STEPS // EVERY))
    for round in counted.values():
        names = [name for name, _ in round]
        assert len({*names}) == len(names)
        assert {member.name_ for member in left} <= {*names}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(2, 5), st.data())
def test_a_member_that_dies_costs_one_attempt(topology, members, data):
    dies = {data.draw(st.integers(0, members - 1)): data.draw(st.integers(1, 40))}
    room = CollectiveRoom(topology, "local-sgd", members, STEPS, policy=policy(members), dies=dies)
    with contextlib.suppress(Refused):
        room.run()
    if not room.lead.started:  # nothing is lost by it, and all have to join anew
        assert not room.counted
        return
    killed = len(room.members) - len(left_of(room))
    check(room, killed)
    # What it had said may come after its connection is lost, as if it stood again: one turn more.
    turns = room.lead.part.turns.count
    assert turns <= 1 + STEPS // EVERY + 2 * killed, "the base, the rounds, more"


def test_one_that_comes_anew_before_all_have_the_base_has_all_join_again():
    """Nobody would say any more that training starts from its parameters."""
    room = CollectiveRoom(
        "butterfly", "dga(paper)", 5, STEPS, policy=policy(5), dies={0: 10}, reborn=True
    )
    with pytest.raises(Refused, match="m0, which the others need, was lost before training began"):
        room.run()
    assert not room.counted


@settings(max_examples=16, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(3, 5), st.sampled_from([0, 4]), st.data())
def test_a_member_that_joins_anew_gets_the_base_from_another_one(topology, members, delay, data):
    dies = {data.draw(st.integers(0, members - 1)): data.draw(st.integers(2 * members, 40))}
    room = CollectiveRoom(
        topology, "dga(paper)", members, 2 * STEPS, policy=policy(members), dies=dies, reborn=True,
        delay=delay,
    )  # fmt: skip
    with contextlib.suppress(Refused):
        room.run()
    if not room.lead.started:  # it died as the base was handed around
        return
    assert len({member.params.tobytes() for member in room.members}) == 1
    entries = [member.entry for member in room.members if member.entry is not None]
    assert len(entries) == len([m for m in room.members if m.sent >= dies.get(m.index, 10**9)])
    assert sorted(room.counted) == list(range(2 * STEPS // EVERY))
    for index, member in enumerate(room.members):
        began = 0 if member.entry is None else member.entry.round
        for round, counted in room.counted.items():
            assert [name for name, _ in counted].count(f"m{index}") == 1 or round < began


def test_who_cannot_come_after_the_start_is_told_why():
    for strategy, words, client in (
        ("diloco", "what the outer rule remembers is only in the members of the ring", False),
        ("sync-sgd", "use a displacement strategy", False),
        ("local-sgd", "takes in nobody that others cannot connect to: let it listen", True),
    ):
        local_steps = 1 if strategy == "sync-sgd" else EVERY
        room = CollectiveRoom("ring", strategy, 3, STEPS, policy=policy(4), local_steps=local_steps)
        late, told = CollectiveMember(room, 3, client), []

        def before_step(member, step, late=late, told=told):
            if member.index == step == 0:
                with pytest.raises(Refused) as refused:
                    late.enter()
                told.append(refused.value.message)

        room.before_step = before_step
        room.lead.policy = policy(3)
        room.run()
        assert words in told[0]


def test_two_that_lose_each_other_are_gone_around():
    room = CollectiveRoom("ring", "local-sgd", 4, STEPS, policy=policy(4), cuts={(0, 1): 7})
    room.run()
    check(room)
    assert room.lead.part.turns.count <= 3 + STEPS // EVERY


@pytest.mark.parametrize("topology", SHAPES)
def test_with_a_delay_members_average_beside_their_steps(topology):
    words = {"local_steps": 2, "delay": 4, "policy": policy(3)}
    star = DirectRoom("dga(paper)", 3, 12, star=True, ranges=1, **words).run()
    room = CollectiveRoom(topology, "dga(paper)", 3, 12, **words)
    assert np.allclose(room.run(), star, rtol=0, atol=1e-5)
    assert len({member.params.tobytes() for member in room.members}) == 1
    assert room.lead.part.turns.count == 1 + 12 // 2


@pytest.mark.parametrize("strategy", ["diloco", "fedadam", "fedavgm", "eager"])
def test_an_outer_rule_makes_the_same_step_on_every_member(strategy):
    words = {"local_steps": 2, "delay": 2, "policy": policy(3)}
    star = DirectRoom(strategy, 3, 12, star=True, ranges=1, **words).run()
    room = CollectiveRoom("ring", strategy, 3, 12, **words)
    assert np.linalg.norm(room.run() - star) <= 1e-6 * np.linalg.norm(star)
    assert len({member.params.tobytes() for member in room.members}) == 1


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(2, 4), st.sampled_from([0, 4]), st.data())
def test_a_hub_that_is_started_again_goes_on_with_the_same_bits(topology, members, delay, data):
    crashes = data.draw(st.sets(st.tuples(st.just(0), st.integers(2, 40)), min_size=1, max_size=3))
    strategy = data.draw(st.sampled_from(["local-sgd", "diloco", "dga(paper)", "sync-sgd"]))
    words = {"policy": policy(members), "delay": delay}
    words["local_steps"] = 1 if strategy == "sync-sgd" else EVERY
    calm = CollectiveRoom(topology, strategy, members, STEPS, **words)
    calm.run()
    room = CollectiveRoom(topology, strategy, members, STEPS, crashes=crashes, **words)
    with tempfile.TemporaryDirectory() as folder:
        room.keep_journal(Path(folder))
        room.run()
    assert {m.params.tobytes() for m in room.members} == {calm.members[0].params.tobytes()}
    assert room.counted == calm.counted
    assert room.attempts == sorted(room.attempts), "or members take them for earlier ones"


def test_a_hub_that_adds_up_itself_is_started_again_too(tmp_path):
    star = DirectRoom("fedavg", 3, STEPS, star=True, ranges=1).run()
    room = CollectiveRoom("ring", "fedavg", 3, STEPS, clients=(0, 1), policy=policy(3))
    room.before_step = lambda member, step: member.index == step == 0 and room.crash_lead()
    room.keep_journal(tmp_path)
    assert np.array_equal(room.run(), star)
    assert room.lead.part.is_star
