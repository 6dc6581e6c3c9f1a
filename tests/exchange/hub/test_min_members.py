"""A job that begins with fewer members than it has places; the others join when they come."""

from __future__ import annotations

import random

import pytest
from fleet import FakeMember, Fleet
from hub_desk import ZEROS, Desk, lost, raw, the
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.messages import Base, Evaluate, Leave, Start


def desk(few=2, after_s=10.0):
    found = Desk(4, min_members=few, start_after_s=after_s)
    found.join("a")
    found.tell("a", Base(0, 1, raw(ZEROS)))
    return found


def test_it_begins_once_enough_have_been_here_for_long_enough():
    found = desk()
    found.tick(100.0)
    assert not found.hub.started, "one is not enough, however long it waits"
    found.join("b")
    found.tick(9.9)
    assert not found.hub.started
    said = found.tick(0.2)
    assert found.hub.started
    assert the(Start, said["a"]).round == the(Start, said["b"]).round == 0
    assert ("started", "hub") in found.events()
    assert found.notes[-1].reason == "2 of 4 members"
    late = found.join("c")
    assert the(Start, late["c"]).round == 0, "nobody has contributed yet"


def test_it_begins_at_once_when_all_are_here():
    found = desk()
    for name in "bcd":
        assert not found.hub.started
        found.join(name)
    assert found.hub.started
    assert found.notes[-1].reason == "4 members"


def test_the_wait_begins_again_if_one_of_them_goes():
    found = desk()
    found.join("b")
    found.tick(9.0)
    found.tell("b", Leave("done"))
    found.tick(5.0)
    found.join("b")
    found.tick(9.0)
    assert not found.hub.started
    found.tick(1.1)
    assert found.hub.started


def test_it_does_not_begin_without_the_base():
    found = Desk(4, min_members=2, start_after_s=1.0)
    found.join("a")
    found.join("b")
    found.tick(100.0)
    assert not found.hub.started
    found.tell("a", Base(0, 1, raw(ZEROS)))
    assert found.hub.started


def test_one_of_those_that_are_here_is_to_evaluate():
    found = desk()
    found.join("b")
    found.tick(10.1)
    assert the(Evaluate, found.tick(5.0)["a"])


def test_without_start_with_it_waits_for_all():
    found = desk(few=0, after_s=0.0)
    found.join("b")
    found.join("c")
    found.tick(1e6)
    assert not found.hub.started


def test_a_member_lost_before_the_start_is_not_counted():
    found = desk()
    found.join("b")
    lost(found, "b")
    found.tick(100.0)
    assert not found.hub.started


class Late(FakeMember):
    """Members from the third on come once training has begun."""

    def choices(self):
        if self.index >= 2 and not self.fleet.hub.started:
            return []
        return super().choices()


class LateFleet(Fleet):
    member = Late


@settings(max_examples=30)
@given(
    strategy=st.sampled_from(["dga(paper)", "dga(decay)", "fedavg", "local-sgd", "diloco"]),
    seed=st.integers(0, 1 << 30),
)
def test_late_ones_take_part_and_all_end_with_one_base(strategy, seed):
    policy = Policy(4, min_members=2, start_after_s=10.0, lost_after_s=1e9)
    fleet = LateFleet(strategy, 4, 2, 2, 12, rng=random.Random(seed), policy=policy).run()
    assert [member.state for member in fleet.members] == ["done"] * 4
    checksums = {}
    for member in fleet.members:
        for applied, checksum in member.checksums.items():
            assert checksums.setdefault(applied, checksum) == checksum
    assert any(member.submitted for member in fleet.members[2:])


@pytest.mark.parametrize("after_s", [0.0, 5.0])
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30))
def test_to_start_with_all_of_them_changes_nothing(after_s, seed):
    """The same messages in the same order, so the same bits at the same time."""
    plain, named = (
        Fleet("dga", 3, 2, 2, 10, rng=random.Random(seed), policy=policy).run()
        for policy in (Policy(3), Policy(3, min_members=3, start_after_s=after_s))
    )
    assert plain.closed == named.closed
    assert plain.notes == named.notes
    assert plain.now == named.now
    assert plain.hub.base.tobytes() == named.hub.base.tobytes()
