"""When a group of servers steps in for devices, and out again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.exchange.hub.fallback import Fallback, StepIn, StepOut, lacks_memory

TICK_S = 0.25


def rule(members=6, quorum=3, after_s=30.0, back_s=60.0):
    return Fallback(members, quorum, after_s, back_s)


def names(*indexes):
    return [f"m{index}" for index in indexes]


def test_a_group_steps_in_for_the_missing_and_out_when_enough_are_back():
    fallback = rule()
    assert fallback.look(names(*range(6)), 0.0) is None
    assert fallback.look(names(0, 5), 10.0) is None
    assert fallback.look(names(0, 5), 39.9) is None
    assert fallback.look(names(0, 5), 40.0) == StepIn(
        (1, 2, 3, 4), "2 of 6 members are here for 30 s, fewer than hub.quorum = 3"
    )
    assert fallback.look(names(0, 5), 41.0) is None, "a decision is made once"
    assert fallback.look(["servers", *names(0, 1, 5)], 50.0) is None
    assert fallback.look(["servers", *names(0, 5)], 100.0) is None, "not back for long enough"
    assert fallback.look(["servers", *names(0, 1, 5)], 101.0) is None
    out = fallback.look(["servers", *names(0, 1, 5)], 161.0)
    assert out == StepOut("3 of 6 members are here for 60 s, hub.quorum is 3")


def test_a_fleet_that_is_nearly_complete_needs_no_group():
    fallback = rule()
    assert all(fallback.look(names(1, 2, 3), float(now)) is None for now in range(1000))


def test_members_that_have_finished_are_not_missing():
    fallback = rule()
    for name in names(0, 1, 2, 3, 4):
        fallback.note_left(name, "done")
    assert all(fallback.look(names(5), float(now)) is None for now in range(1000))


@pytest.mark.parametrize("reason", [
    "memory: 120 MB, and 30 MB are free", "OutOfMemoryError: CUDA out of memory",
    "MemoryError: Unable to allocate 7.45 GiB", "RuntimeError: can't allocate memory: 12 bytes",
])  # fmt: skip
def test_a_member_without_memory_is_replaced_at_once_until_it_is_back(reason):
    fallback = rule()
    assert lacks_memory(reason)
    fallback.look(names(*range(6)), 0.0)
    fallback.note_left("m4", reason)
    step = fallback.look(names(0, 1, 2, 3, 5), 1.0)
    assert step == StepIn((4,), f"m4 left: {reason}")
    for now in range(2, 500):
        assert fallback.look(names(0, 1, 2, 3, 5), float(now)) is None
    assert fallback.look(names(*range(6)), 500.0) is None
    assert isinstance(fallback.look(names(*range(6)), 560.0), StepOut)


def test_a_member_that_is_stopped_lacks_no_memory():
    assert not lacks_memory("Stopped: 15")


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.floats(0.1, 40.0),
    st.floats(0.1, 40.0),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 7), st.booleans()), max_size=40),
)
def test_two_changes_are_never_less_than_back_s_apart(members, quorum, after_s, back_s, comings):
    """Drawn fleets: devices go and come at any time, and leave for want of memory."""
    fallback = Fallback(members, min(quorum, members), after_s, back_s)
    here, now, changes = set(range(members)), 0.0, []
    for pause_s, index, hungry in [*comings, (200.0, 0, False)]:
        until = now + pause_s
        while now < until:
            was = fallback.is_in
            step = fallback.look(names(*here), now)
            assert (step is not None) == (fallback.is_in is not was)
            if isinstance(step, StepIn):
                assert set(step.missing) == set(range(members)) - here
                assert step.missing
            if step is not None:
                changes.append(now)
            now += TICK_S
        if index >= members:
            continue
        here ^= {index}
        if hungry and index not in here:
            fallback.note_left(f"m{index}", "MemoryError: 12 MB")
    apart = [later - earlier for earlier, later in itertools.pairwise(changes)]
    assert all(each >= back_s for each in apart)
