"""How long steps take: jitter, slow steps, heat."""

from __future__ import annotations

import statistics

import pytest
from made_up_devices import BOARD, UNSTEADY, unsteady

from edgetrain.fleet import devices
from edgetrain.fleet.devices import Device
from edgetrain.fleet.devices.speed import StepTimes


def times(device: Device, count: int, seconds: float = 0.1, seed: int = 0, member: int = 0):
    """The first steps of one member."""
    step_times = StepTimes(device, seconds, seed, member)
    return [step_times(step) for step in range(count)]


def test_a_steady_device_takes_the_same_for_every_step():
    assert times(BOARD, 5) == [0.1] * 5
    assert times(devices.load("host"), 2) == [0.1] * 2


def test_jitter_has_the_mean_and_the_spread_that_are_asked_for():
    found = times(unsteady("step_jitter"), 20_000)
    assert statistics.fmean(found) == pytest.approx(0.1, rel=0.01)
    assert statistics.pstdev(found) == pytest.approx(0.2 * 0.1, rel=0.05)
    assert min(found) > 0
    assert statistics.median(found) < statistics.fmean(found), "the tail is to the right"


def test_slow_steps_are_as_many_and_as_slow_as_said():
    found = times(unsteady("slow_chance", "slow_factor"), 10_000)
    assert {round(seconds, 9) for seconds in found} == {0.1, 0.5}
    assert found.count(0.1) / 10_000 == pytest.approx(0.9, abs=0.01)


def test_a_hot_board_slows_down_after_so_many_seconds_of_computing():
    found = times(unsteady("throttle_after_s", "throttle_factor"), 400)
    hot = found.index(0.2)
    assert sum(found[:hot]) == pytest.approx(30, abs=0.11)
    assert set(found[hot:]) == {0.2}, "and stays slow"


def test_step_times_are_the_members_own_and_come_again():
    device = unsteady(*UNSTEADY)
    found = times(device, 50, seed=3, member=1)
    assert found == times(device, 50, seed=3, member=1)
    assert found != times(device, 50, seed=3, member=2)
    assert found != times(device, 50, seed=4, member=1)
    assert times(device, 20, seed=3, member=1) == found[:20]
