"""Whatever comes in whatever order: a hub stands, keeps its books, and remembers no more than it
needs."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from fleet import Fleet
from hub_desk import ZEROS, Desk, back, raw
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub import rounds as exchange
from edgetrain.exchange.messages import Base, Beat, Contribute, Fixed, Leave
from edgetrain.vectors.vector import checksum


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_does_not_grow_with_rounds_or_members(monkeypatch, gradient):
    monkeypatch.setattr(exchange, "REMEMBERED", 16)
    desk = Desk(2, gradient=gradient, deadline_s=1.0).started("ab")
    sums = {}

    def rounds(first, last):
        for round in range(first, last):
            sums[round] = desk.hub.checksum(round, round + 1)
            desk.give("a", round, applied=round, checksum=sums[round])
            if round % 2:
                desk.tick(1.0)
            desk.give("b", round, applied=max(0, round - 3), checksum=sums[max(0, round - 3)])
            sums.pop(round - 3, None)
            desk.notes.clear()
            desk.closed.clear()

    tracemalloc.start()  # from the start: what is remembered stands on both sides
    held = []
    for first, last in ((0, 250), (250, 1050)):
        rounds(first, last)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert desk.hub.round >= 200
    assert len(desk.hub.rounds.checksums) <= 17
    assert len(desk.hub.rounds.open_rounds.sizes()) <= 1
    assert held[1] - held[0] < 20_000  # less than a number a round


def test_members_that_name_old_checksums_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(exchange, "REMEMBERED", 8)
    desk = Desk(2, gradient=True, deadline_s=1.0).started("ab")
    for round in range(60):
        desk.give("a", round, applied=round, checksum=round or checksum(ZEROS))
        desk.tick(1.0)
    for round in range(60):
        desk.give("b", round, applied=round, checksum=round or checksum(ZEROS))
    assert desk.hub.present == ["a", "b"]
    assert len(desk.hub.rounds.checksums) <= 9


def test_members_that_come_and_go_leave_nothing_behind():
    desk = Desk(2).started("ab")
    for i in range(100):
        desk.tell("b", Leave(""))
        desk.join("b")
        assert desk.hub.present == ["a", "b"]
        desk.give("a", i, applied=i, checksum=desk.hub.checksum(i))
        desk.give("b", i, applied=i, checksum=desk.hub.checksum(i))
    assert len(desk.hub.members) == 2
    assert desk.hub.round == 100


FIELDS = {"round": st.integers(0, 3), "part": st.integers(0, 1), "applied": st.integers(0, 3)}


ACTIONS = st.one_of(
    st.tuples(st.just("join"), st.sampled_from("abc"), st.sampled_from(["a", "b", ""])),
    st.tuples(st.just("base"), st.sampled_from("abc"), st.sampled_from([raw(ZEROS), b"", b"x"])),
    st.tuples(st.just("fixed"), st.sampled_from("abc"), st.sampled_from([bytes(7), b"", b"x"])),
    st.tuples(st.just("back"), st.sampled_from("abc"), st.sampled_from(["", "other"])),
    st.tuples(st.just("give"), st.sampled_from("abc"), st.sampled_from([raw(ZEROS), b"x" * 19])),
    st.tuples(st.just("wild"), st.sampled_from("abcz"), st.fixed_dictionaries(FIELDS)),
    st.tuples(st.just("leave"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("beat"), st.sampled_from("abcz"), st.none()),
    st.tuples(st.just("lost"), st.sampled_from("abcz"), st.none()),
    st.tuples(st.just("tick"), st.none(), st.floats(0, 4)),
)


@given(
    st.lists(ACTIONS, max_size=40), st.booleans(), st.integers(1, 3), st.sampled_from([0, 7])
)  # fmt: skip
def test_whatever_arrives_the_hub_stands_and_keeps_its_books(actions, gradient, quorum, fixed):
    desk = Desk(2, gradient=gradient, quorum=quorum, deadline_s=3.0, lost_after_s=2.0)
    for what, who, extra in actions:
        before = desk.hub.round
        closed = len(desk.closed)
        match what:
            case "join":
                desk.join(who, name=extra, fixed_bytes=fixed, session=ord(who))
            case "base":
                desk.tell(who, Base(0, 1, extra))
            case "fixed":
                desk.tell(who, Fixed(0, 1, extra))
            case "back":
                peer = desk.hub.members.get(who.encode())
                name = peer.name if peer else who
                back(desk, who, name=name, session=ord(who), fixed=extra)
            case "give":
                peer = desk.hub.members.get(who.encode())
                due = peer.next_round if peer else 0
                known = desk.hub.checksum(desk.hub.round, 5)
                desk.give(who, due, payload=extra, applied=desk.hub.round, checksum=known)
            case "wild":
                desk.give(who, **extra)
            case "leave":
                desk.tell(who, Leave("done"))
            case "beat":
                desk.tell(who, Beat())
            case "lost":
                desk.take(desk.hub.unreachable(who.encode(), desk.now))
            case "tick":
                desk.tick(extra)
        assert desk.hub.round - before == len(desk.closed) - closed
        assert [c.round for c in desk.closed] == list(range(desk.hub.round))
        assert len(desk.hub.present) == len(desk.hub.members) <= 2
        kept = desk.hub.rounds.open_rounds.sizes()
        assert all(round >= desk.hub.round for round in kept)
        assert all(kept.values())


@given(
    st.integers(2, 5), st.integers(0, 6), st.integers(0, 200), st.integers(0, 2**32),
)  # fmt: skip
def test_one_bad_payload_at_any_time_costs_one_member(members, delay, when, seed):
    fleet = Fleet("dga", members, 1, delay, 12, rng=random.Random(seed))
    spoilt = []

    def maybe_spoil():
        member = fleet.members[-1]
        for frames in member.wire.to_hub:
            if frames[0] == Contribute.kind and len(member.history) * members > when and not spoilt:
                frames[2] = b"x"
                spoilt.append(frames)

    fleet.run(maybe_spoil)
    good = fleet.members[:-1] if spoilt else fleet.members
    assert [m.state for m in good] == ["done"] * len(good)
    assert len({m.params.tobytes() for m in good}) == 1
    assert not fleet.hub.rounds.open_rounds.sizes()
    if spoilt:
        expelled = [note for note in fleet.notes if note.event == "refused"]
        assert expelled[0].member == f"m{members - 1}"
        assert expelled[0].reason.startswith("payload: ")
