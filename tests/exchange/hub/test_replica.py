"""A hub with a replica: what leaves only behind the replica, who goes on, and never both."""

from __future__ import annotations

import random

import pytest
from fakes.fleet import Fleet
from fakes.town import REPLICA, Town, town
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import BadMessage, EdgetrainError
from edgetrain.exchange.further_messages import Copy, Follow
from edgetrain.exchange.hub.replica import Replica
from edgetrain.exchange.messages import PROTOCOL, Agree, Resume

JOBS = [
    (strategy, codec)
    for strategy in ("fedavg", "dga", "diloco")
    for codec in (("fp32", ""), ("int8", ""), ("topk(0.5)", "q2"))
]
ELEMENTS = 300
"""More than a block of the codecs."""


def ends_of(found: Fleet):
    """Where its members ended, and on the way there."""
    assert [member.state for member in found.members] == ["done"] * len(found.members)
    assert len({tuple(sorted(member.checksums.items())) for member in found.members}) == 1
    return [(member.params.tobytes(), member.checksums) for member in found.members]


def all_know(found: Town) -> bool:
    """Whether every member has heard that the replica is in."""
    return not any(member.way.ballot.is_out for member in found.members)


def when(found: Town, round: int, act) -> Town:
    """Run it to its end; `act` once, at this round of the first hub."""
    waiting = [act]

    def each():
        if waiting and found.first.hub is not None and found.first.hub.round >= round:
            waiting.pop()()

    return found.run(each)


@pytest.mark.parametrize(("strategy", "codecs"), JOBS)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_a_replica_that_took_over_is_one_undisturbed_hub_bit_for_bit(strategy, codecs, seed, kill):
    delay = 2 if strategy == "dga" else 0
    same = {"codec": codecs[0], "reply_codec": codecs[1], "elements": ELEMENTS}
    alone = Fleet(strategy, 3, 2, delay, 16, rng=random.Random(1), **same).run()
    found = town(strategy, steps=16, seed=seed, delay=delay, **same)
    when(found, kill, found.kill_hub)
    found.judge()
    assert found.took_over_at is not None
    assert found.took_over_at - found.killed_at <= 3.0
    assert ends_of(found) == ends_of(alone)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_with_a_replica_nothing_else_changes(seed):
    alone = Fleet("dga", 3, 2, 2, 16, rng=random.Random(1), elements=ELEMENTS).run()
    found = town(steps=16, seed=seed, elements=ELEMENTS).run()
    found.judge()
    assert found.took_over_at is None
    assert ends_of(found) == ends_of(alone)
    while not found.hub.finished:  # then it is closed, whatever the replica has not answered yet
        assert found.advance()
    left = [note.member for note in found.notes if note.event == "left"]
    assert len(left) == len(set(left)) == len(found.members)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_a_dead_replica_does_not_stop_training(seed, round):
    found = town(steps=16, seed=seed)
    when(found, round, found.kill_replica)
    found.judge()
    assert found.first.hub.part.replica == "out"
    assert found.now < 20
    ends_of(found)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_replica_that_was_out_comes_back_in_and_may_take_over(seed, round):
    found = town(steps=60, seed=seed)
    stage = ["kill", "start", "hub"]

    def each():
        hub = found.first.hub
        if stage == ["kill", "start", "hub"] and hub.round >= round:
            found.kill_replica()
            stage.pop(0)
        elif stage == ["start", "hub"] and hub.part.replica == "out":
            found.start_replica()
            stage.pop(0)
        elif stage == ["hub"] and hub.part.replica == "in" and all_know(found):
            found.kill_hub()
            stage.pop(0)

    found.run(each)
    found.judge()
    assert not stage
    assert found.took_over_at is not None
    ends_of(found)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_hub_and_replica_never_close_the_same_round(data):
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    members = data.draw(st.integers(2, 5))
    strategy = data.draw(st.sampled_from(["fedavg", "dga", "local-sgd", "sync-sgd"]))
    found = town(strategy, members, steps=12, seed=rng.random(), delay=0)

    def act():
        hubs = [(index, name) for index in range(members) for name in ("hub", "replica")]
        chance = rng.random()
        if chance < 0.15 and found.first.hub is not None:
            found.kill_hub()
        elif chance < 0.4 and found.first.hub is None:
            found.resume_hub()
        elif chance < 0.6:
            found.parted = rng.random() < 0.5
            if not found.parted:
                found.reconnect_replica()
        elif chance < 0.7 and found.replica is not None:
            found.kill_replica()
        elif chance < 0.8 and found.took_over_at is None and found.replica is None:
            found.start_replica()
        elif chance < 0.95:
            found.apart ^= {rng.choice(hubs)}
        else:
            found.apart.clear()

    def each():
        if rng.random() < 0.02:
            act()

    def later():
        if rng.random() < 0.1:
            act()

    found.run(each, most_s=150.0, later=later)
    found.judge()


def test_only_the_enrolled_replica_is_sent_the_journal_and_only_of_its_own_job():
    found = town()
    hub = found.first.hub
    (refused, _) = hub.handle(b"m0", Follow(PROTOCOL, hub.state().agreed, 0), 0.0)
    assert refused.message.code == "name"
    (refused, _) = hub.handle(REPLICA, Follow(PROTOCOL, "another job", 0), 0.0)
    assert refused.message.code == "job"
    with pytest.raises(EdgetrainError, match="has taken over"):
        hub.handle(REPLICA, Follow(PROTOCOL, hub.state().agreed, 0, epoch=1 << 16), 0.0)


def test_a_stranger_has_no_vote_at_the_replica():
    found = town(steps=60)

    def kill():
        if found.first.hub is not None and found.first.hub.round > 2:
            found.kill_hub()

    while found.first.hub is not None:
        found.advance() or found.let_time_pass()
        kill()
    replica, later = found.replica, found.now + 10.0
    for number, name in enumerate(("m0", "m1", "m2")):
        asked = Resume(PROTOCOL, "model", 7, name, 12345, 0, 0, 1, 0, 1)
        assert replica.handle_member(b"x%d" % number, asked, later) == []
        replica.handle_member(b"x%d" % number, Agree(replica.position, True), later)
    assert not replica.taken


def test_a_record_larger_than_memory_and_a_gap_are_refused():
    replica = Replica("job", 1.0, 100, 0.0)
    with pytest.raises(BadMessage, match="more than 100 bytes"):
        replica.handle_hub(Copy(1, 0, 2, True, True, 4, bytes(101)), 0.0)
    replica = Replica("job", 1.0, 100, 0.0)
    with pytest.raises(BadMessage, match="part 1 came when 0 was due"):
        replica.handle_hub(Copy(1, 1, 2, True, True, 4, b"x"), 0.0)
    with pytest.raises(BadMessage):
        replica.handle_hub(Copy(1, 0, 1, True, True, 4, b"xxxxxxxx"), 0.0)
