"""Steps that last as long as they would on the device that is emulated."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Makes a step last as long as it would on the device that is emulated.

    `seconds(step)` is what that takes (0: no pace). What a step took longer than its pace, in the
    optimizer after `hold`, comes off the next one. `overruns` counts the steps that were slower by
    themselves.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.overruns = 0
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._step = 0
        self._owed = 0.0
        self._lasts = seconds(0)

    @property
    def is_set(self) -> bool:
        """Whether this device is paced at all."""
        return self._lasts > 0

    @property
    def seconds(self) -> float:
        """What the step under way takes."""
        return self._lasts

    def hold(self, began: float, steps: int = 1) -> None:
        """Sleep until the step (or so many in a row) that began then has lasted long enough."""
        if not self.is_set:
            return
        for _ in range(steps - 1):
            self._step += 1
            self._lasts += self._seconds(self._step)
        spent = self._clock() - began
        if spent > self._lasts:
            self.overruns += 1
        elif (left := self._lasts - self._owed - spent) > 0:
            self._sleep(left)

    def hold_share(self, began: float, share: float) -> None:
        """Sleep until this share of the next step, which began then, has lasted long enough."""
        if self.is_set and (left := share * self._lasts - (self._clock() - began)) > 0:
            self._sleep(left)
        self._step += 1
        self._lasts = self._seconds(self._step)

    def end_step(self, computed_s: float) -> None:
        """The step is over, and took so long without waiting and exchanging."""
        if self.is_set:
            self._owed = min(max(self._owed + computed_s - self._lasts, 0.0), self._lasts)
            self._step += 1
            self._lasts = self._seconds(self._step)
