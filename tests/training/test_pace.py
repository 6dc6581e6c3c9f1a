"""A paced step lasts as long as the emulated device's: law over drawn computing times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.training.member.pacing import HeatCap, Pace

LASTS = 1.0


class Time:
    """A clock that sleeping and computing move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@given(
    st.lists(
        st.tuples(st.floats(0, 0.99 * LASTS), st.floats(0, LASTS / 4)), min_size=1, max_size=20
    )
)
def test_steps_that_compute_less_than_their_pace_last_as_long_on_average(steps) -> None:
    time = Time()
    pace = Pace(lambda step: LASTS, time, time.pass_by)
    for forward, optimizer in steps:
        began = time.now
        time.pass_by(forward)
        pace.hold(began)
        time.pass_by(optimizer)
        pace.end_step(time.now - began)
    # Only what the last optimizer step took is still owed, and what no sleep was left to take off.
    late = time.now - LASTS * len(steps)
    assert late > -1e-9
    if all(forward < 0.7 * LASTS for forward, _ in steps):
        assert late == pytest.approx(steps[-1][1])
    assert not pace.overruns


def test_a_step_that_is_slower_by_itself_is_an_overrun() -> None:
    time = Time()
    pace = Pace(lambda step: LASTS, time, time.pass_by)
    time.pass_by(2 * LASTS)
    pace.hold(0.0)
    assert (pace.overruns, time.now) == (1, 2 * LASTS)


class Board:
    """A board that warms towards `busy` while it computes, and cools towards the room's 25 C."""

    def __init__(self, busy: float, inertia_s: float) -> None:
        self.now, self.celsius, self.hottest = 0.0, 40.0, 0.0
        self._busy, self._inertia_s = busy, inertia_s

    def _move(self, seconds: float, towards: float) -> None:
        self.now += seconds
        self.celsius += (towards - self.celsius) * -math.expm1(-seconds / self._inertia_s)
        self.hottest = max(self.hottest, self.celsius)

    def compute(self, seconds: float) -> None:
        self._move(seconds, self._busy)

    def sleep(self, seconds: float) -> None:
        self._move(seconds, 25.0)


@given(
    st.floats(50, 110), st.floats(60, 300), st.floats(0.01, 1.0), st.sampled_from([45.0, 60, 75])
)
def test_a_capped_member_stays_below_its_cap_and_rests_no_more_than_it_has_to(
    busy, inertia_s, step_s, most
) -> None:
    board = Board(busy, inertia_s)
    pace = Pace(lambda step: 0.0, lambda: board.now, board.sleep)
    pace.cap = HeatCap(most, lambda: board.celsius, lambda: board.now)
    while board.now < 10 * inertia_s:
        began = board.now
        board.compute(step_s)
        pace.hold(began)
        pace.end_step(step_s)
    assert board.hottest < max(most + 2.5, 40.0)
    if busy < most - HeatCap.BAND:
        assert (pace.cap.factor, board.hottest) == (1, pytest.approx(busy, abs=1))
    else:
        assert board.celsius > most - HeatCap.BAND - 1


def test_a_thermometer_that_does_not_answer_caps_nothing_meanwhile() -> None:
    found = iter([90.0, None, 90.0])
    now = Time()
    cap = HeatCap(70.0, lambda: next(found), now)
    for factor in (HeatCap.MOST, 1, HeatCap.MOST):
        assert cap.rest_s(1.0) == factor - 1
        assert cap.is_blind is (factor == 1)
        now.pass_by(HeatCap.READ_S)


def test_a_slice_of_work_is_capped_as_well() -> None:
    time = Time()
    pace = Pace(lambda step: 0.0, time, time.pass_by)
    pace.cap = HeatCap(70.0, lambda: 70.0, time)
    time.pass_by(2.0)
    pace.hold_share(0.0, 0.5)
    assert time.now == pytest.approx(2.0 * 4.75)
