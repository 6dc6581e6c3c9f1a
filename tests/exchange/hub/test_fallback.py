"""When a group of servers steps in for devices, and out again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import lacks_memory
from edgetrain.exchange.hub.fallback import Fallback, FleetPace, StepIn, StepOut

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


def changes_at(fallback, speed, seconds=400, local_steps=5, rate=10.0):
    """(time, decision) of a fleet that is complete and takes `speed(now)` steps a second."""
    found, taken = [], 0.0
    for tick in range(int(seconds / TICK_S)):
        now = tick * TICK_S
        taken += speed(now) * TICK_S
        pace = FleetPace(int(taken) // local_steps * local_steps, local_steps, rate)
        if step := fallback.look(names(*range(6)), now, pace):
            found.append((now, step))
    return found


def test_a_group_steps_in_for_a_fleet_that_is_slower_and_out_when_it_is_as_fast():
    found = changes_at(rule(), lambda now: 2.0 if 90 <= now < 210 else 9.5)
    (in_at, step), (out_at, out) = found
    assert in_at == 90 + 30, "for after_s"
    assert step.missing == tuple(range(6)), "it has the shares of all: nobody is missing"
    assert step.reason == (
        "6 of 6 members took 2 steps a second for 30 s, servers would take 10"
    ), "both numbers"
    assert out_at == 210 + 30 + 60, "measured over after_s, and so for back_s"
    assert out.reason.startswith("6 of 6 members are here for 60 s, hub.quorum is 3, and took 9.")


def test_a_fleet_a_little_slower_than_servers_needs_none():
    assert changes_at(rule(), lambda now: 8.5) == []


def test_rounds_that_take_longer_than_after_s_are_not_slow_between_their_ends():
    assert changes_at(rule(), lambda now: 10.0, local_steps=1000, seconds=4000) == []


def test_a_pause_and_an_end_are_not_slow():
    fallback = rule()
    fallback.note_left("m1", "done")
    assert changes_at(fallback, lambda now: 1.0) == []
    fallback = rule()
    for now in range(1000):  # a paused job has no pace
        assert (
            fallback.look(names(*range(6)), float(now), FleetPace(50, 5, 9.0) if now < 20 else None)
            is None
        )


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.floats(0.1, 40.0),
    st.floats(0.1, 40.0),
    st.lists(
        st.tuples(
            st.floats(0.0, 30.0), st.integers(0, 7), st.booleans(),
            st.sampled_from([0.0, 1.0, 7.0, 8.5, 20.0]),
        ),
        max_size=40,
    ),
    st.sampled_from([None, 1, 5, 100]),
)  # fmt: skip
def test_two_changes_are_never_less_than_back_s_apart(
    members, quorum, after_s, back_s, comings, local_steps
):
    """Drawn fleets: devices go and come at any time, leave for want of memory, and are slower or
    faster than servers, which take 10 steps a second."""
    fallback = Fallback(members, min(quorum, members), after_s, back_s)
    here, now, changes, taken = set(range(members)), 0.0, [], 0.0
    for pause_s, index, hungry, speed in [*comings, (200.0, 0, False, 1.0)]:
        until = now + pause_s
        while now < until:
            was = fallback.is_in
            taken += speed * TICK_S
            pace = (
                FleetPace(int(taken) // local_steps * local_steps, local_steps, 10.0)
                if local_steps
                else None
            )
            step = fallback.look(names(*here), now, pace)
            assert (step is not None) == (fallback.is_in is not was)
            if isinstance(step, StepIn):
                gone = set(range(members)) - here
                assert set(step.missing) == gone or not gone
                assert step.missing
                assert gone or local_steps, "all are here, and nobody asks how fast they are"
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
