"""How long each step of a device takes: its jitter, its slow moments, its heat. Pure and seeded."""

from __future__ import annotations

import math
import random

from edgetrain.fleet.devices.profile import Device


class StepTimes:
    """Seconds of step 0, 1, 2 … of one member, to be asked for in that order.

    `seconds` is what a step takes on the cool, undisturbed device. On top, as far as the profile
    gives figures: `step_jitter`, the relative standard deviation of a step (lognormal, mean 1, as
    run times are: never negative, a tail to the right); `slow_chance` and `slow_factor`, steps that
    something else on the board delays; `throttle_after_s` and `throttle_factor`, what computing
    without a pause does to a board without a fan. The draws depend on (seed, member) only, so that
    an emulated member and a simulated one take the same.
    """

    def __init__(self, device: Device, seconds: float, seed: int, member: int) -> None:
        self._device, self._seconds = device, seconds
        self._random = random.Random(f"{seed} {member} step times")
        self._computed_s = 0.0
        spread = device.step_jitter or 0.0
        self._sigma = math.sqrt(math.log(1 + spread * spread))

    def __call__(self, step: int) -> float:
        """Seconds of the next step."""
        device, seconds = self._device, self._seconds
        if self._sigma:
            seconds *= self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
        if device.slow_chance and self._random.random() < device.slow_chance:
            seconds *= device.slow_factor or 1.0
        if device.throttle_after_s is not None and self._computed_s >= device.throttle_after_s:
            seconds *= device.throttle_factor or 1.0
        self._computed_s += seconds
        return seconds
