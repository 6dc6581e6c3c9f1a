"""Turns: vote, run, commit, as the hub sees them; nothing is averaged here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.further_messages import Ran, RunRound
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.places import Reach
from edgetrain.exchange.hub.turns import MOST_DIFFERENT, Turns

NAMES = ("a", "b", "c")
ALL = dict.fromkeys(NAMES, 1.0)


class Room:
    """Three members, the pairs that cannot connect, and the turns of a ring."""

    def __init__(self, *lost, names=NAMES):
        self.members = Members(10)
        for index, name in enumerate(names):
            member = MemberRecord(name, name.encode(), index, 1.0, 0, index + 1)
            self.members.add(member)
            member.start(0, 0)
        pairs = {(a, b): 0.1 for a in names for b in names if (a, b) not in lost}
        self.turns = Turns("ring", self.members, lambda: Reach(names, pairs))
        self.turns.start(0)

    def runs(self, round=0, weights=ALL, **other):
        """What members are told now: the run, or None."""
        effects, _ = self.turns.advance(round, weights, **other)
        found = [effect.message for effect in effects if isinstance(effect.message, RunRound)]
        assert len(set(found)) <= 1
        assert not found or len(found) == len(found[0].places)
        return found[0] if found else None

    def say(self, name, run, checksum=7, lost="", silent=0):
        """Who is to be expelled for it, or ""."""
        ran = Ran(run.round, run.attempt, checksum, lost, silent)
        found = self.turns.accept(self.members.named(name), ran)
        return "" if found is None else found.name

    def is_agreed(self, round=0, weights=ALL):
        return self.turns.advance(round, weights) == ([], True)


def test_a_round_counts_once_all_have_the_same_mean():
    room = Room()
    run = room.runs()
    assert [name for name, _ in run.places] == ["a", "b", "c"]
    for name in NAMES:
        assert not room.is_agreed()
        assert room.say(name, run) == ""
    assert room.is_agreed()
    assert room.runs(1).attempt > run.attempt


@given(st.permutations([("b", 2, "a"), ("c", 3, "b"), ("d", 4, "c"), ("a", 5, "d")]))
def test_of_all_that_wait_only_who_came_least_far_has_lost_somebody(said):
    """Of a ring in which nothing comes from a to b: c waits for b then, and so on around."""
    room, weights = Room(names=tuple("abcd")), dict.fromkeys("abcd", 1.0)
    run = room.runs(weights=weights)
    for name, came, lost in said:
        assert room.runs(weights=weights) is None
        assert room.say(name, run, 0, lost, came) == ""
    around = [name for name, _ in room.runs(weights=weights).places]
    assert around in (["a", "c", "b", "d"], ["a", "d", "b", "c"])


def test_without_a_member_that_has_gone_the_others_run_again():
    room = Room()
    run = room.runs()
    for name in NAMES[:2]:
        room.say(name, run)
    left = {"a": 1.0, "b": 1.0}
    again = room.runs(weights=left)
    assert again.attempt > run.attempt
    room.say("a", run)
    room.say("b", run)
    assert not room.is_agreed(weights=left), "answers to an earlier attempt count for nothing"
    room.say("a", again)
    room.say("b", again)
    assert room.is_agreed(weights=left)


def test_a_member_that_came_back_hears_of_another_attempt():
    room = Room()
    run = room.runs()
    room.say("a", run)
    room.turns.renew()
    assert room.runs().attempt > run.attempt


def test_the_second_time_that_others_lose_a_member_it_is_named():
    room = Room()
    run = room.runs()
    assert room.say("a", run, 0, "c") == ""
    assert room.say("b", run, 0, "c") == "", "of the same attempt"
    again = room.runs()
    assert room.say("a", again, 0, "c") == "c"


def test_different_means_are_tried_again_and_then_end_the_job():
    room = Room()
    for _ in range(MOST_DIFFERENT):
        assert not room.turns.why_not
        run = room.runs()
        for number, name in enumerate(NAMES):
            room.say(name, run, 5 + number)
    assert "different means of round 0: a 0000000000000005" in room.turns.why_not


def test_the_others_go_on_while_a_member_may_come_back_and_that_counts_if_it_does_not():
    room = Room()
    run = room.runs()
    room.members.named("b").mark_unreachable(0.0)
    without = room.runs()
    assert without.attempt > run.attempt
    assert [name for name, _ in without.places] == ["a", "c"]
    room.say("a", without)
    room.say("c", without)
    assert not room.is_agreed(), "it may come back"
    assert room.runs() is None
    assert room.is_agreed(weights={"a": 1.0, "c": 1.0}), "at once: that turn is over"
    room.members.named("b").mark_heard()
    assert len(room.runs().places) == 3, "it has come back"


def test_nothing_begins_while_half_of_the_members_or_one_of_a_restored_hub_may_come_back():
    room = Room()
    for name in "ab":
        room.members.named(name).mark_unreachable(0.0)
    assert room.runs() is None
    assert room.runs(weights={"c": 1.0}) is not None
    room = Room()
    room.members.named("b").standing = "returning"
    assert room.runs() is None


def test_a_member_that_came_late_and_does_not_get_the_base_is_expelled_and_no_other():
    for checksum, lost in ((8, ""), (0, "b")):
        room = Room()
        room.members.add(MemberRecord("n", b"n", 3, 1.0, 0, 4))
        pair = {"b": 1.0, "n": 1e-9}
        expelled = ""
        while not expelled:
            run = room.runs(weights=pair, is_base=True)
            room.say("b", run)
            expelled = room.say("n", run, checksum, lost)
            assert run.attempt <= 2
        assert expelled == "n"
        assert not room.turns.why_not
        assert room.runs() is not None


@pytest.mark.parametrize("lost", [[("a", "b")], [("a", "b"), ("a", "c")]])
def test_the_ring_goes_around_pairs_that_cannot_connect_or_the_reason_is_said(lost):
    room = Room(*lost)
    effects, agreed = room.turns.advance(0, ALL)
    assert not agreed
    if len(lost) == 1:
        assert [name for name, _ in effects[0].message.places] == ["a", "c", "b"]
    else:
        assert "cannot connect" in room.turns.why_not


def test_a_restored_hub_counts_attempts_from_higher_numbers():
    room = Room()
    run = room.runs()
    room.turns.start(1)
    room.turns.renew()
    assert room.runs().attempt > run.attempt + 1000


def test_the_next_ring_goes_around_two_of_which_one_has_lost_the_other():
    room, weights = Room(names=tuple("abcd")), dict.fromkeys("abcd", 1.0)
    run = room.runs(weights=weights)
    room.say("b", run, 0, "a")
    around = [name for name, _ in room.runs(weights=weights).places]
    neighbours = {frozenset(pair) for pair in zip(around, around[1:] + around[:1], strict=True)}
    assert frozenset("ab") not in neighbours
    assert room.turns.count == 2
