"""The time of each step of a device: jitter, slow steps, heat. Pure and seeded."""

from __future__ import annotations

import functools
import math
import random

from edgetrain.fleet.devices.profile import Device


class StepTimes:
    """Seconds of steps 0, 1, 2 … of one member. Call it once per step, in this order.

    `seconds` is the time of a step on the cool, undisturbed device. The profile may add:
    `step_jitter`, the relative standard deviation of a step (lognormal with mean 1: never negative,
    with a long upper tail, as run times are); `slow_chance` and `slow_factor`, steps delayed by
    something else on the board; `throttle_after_s` and `throttle_factor`, the heat of a board
    without a fan. The draws depend on (seed, member) only, so that an emulated member and a
    simulated one take the same times.
    """

    def __init__(self, device: Device, seconds: float, seed: int, member: int) -> None:
        self._device, self._seconds = device, seconds
        self._drawn_from = f"{seed} {member} step times"
        self._computed_s = 0.0
        spread = device.step_jitter or 0.0
        self._sigma = math.sqrt(math.log(1 + spread * spread))

    @functools.cached_property
    def _random(self) -> random.Random:
        """Made where something is drawn: it takes 2.5 kB, of each of a million members."""
        return random.Random(self._drawn_from)

    def __call__(self, step: int) -> float:
        """Return the seconds of the next step."""
        device, seconds = self._device, self._seconds
        if self._sigma:
            seconds *= self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
        if device.slow_chance and self._random.random() < device.slow_chance:
            seconds *= device.slow_factor or 1.0
        if device.throttle_after_s is not None and self._computed_s >= device.throttle_after_s:
            seconds *= device.throttle_factor or 1.0
        self._computed_s += seconds
        return seconds
