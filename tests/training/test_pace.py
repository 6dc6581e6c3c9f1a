"""A paced step lasts as long as the emulated device's: law over drawn computing times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.training.member.pacing import Pace

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
