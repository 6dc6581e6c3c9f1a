"""Steps that last as long as they would on the device that is emulated, or longer than they have to
so that a device keeps cool."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class HeatCap:
    """Makes steps longer while a device is nearly as hot as it may be.

    A step lasts 1 + (2^x - 1) / 4 times as long, x degrees above `BAND` below the cap: nothing
    below that, 4.75 times at the cap, at most `MOST`. The device settles where as much heat leaves
    as comes; since the factor depends on the last reading alone, nothing swings.
    """

    BAND, MOST, READ_S = 4.0, 30.0, 2.0

    def __init__(
        self,
        celsius: float,
        read: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """celsius: the cap. read: the temperature now; None: it cannot be read at the moment."""
        self.celsius = celsius
        self.factor = 1.0
        """How many times longer steps last now."""
        self.is_blind = False
        """Whether the temperature could not be read last time: then steps are not made longer."""
        self._read, self._clock = read, clock
        self._read_at = -math.inf

    def rest_s(self, computed_s: float) -> float:
        """Seconds to rest after computing for so long."""
        now = self._clock()
        if now - self._read_at >= self.READ_S:
            self._read_at = now
            celsius = self._read()
            self.is_blind = celsius is None
            above = (celsius or 0.0) - self.celsius + self.BAND
            self.factor = min(self.MOST, 1 + (2.0 ** min(above, 64.0) - 1) / 4) if above > 0 else 1
        return computed_s * (self.factor - 1)


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
        self.cap: HeatCap | None = None
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._step = 0
        self._owed = 0.0
        self._lasts = seconds(0)

    @property
    def is_set(self) -> bool:
        return self._lasts > 0

    @property
    def seconds(self) -> float:
        return self._lasts

    def hold(self, began: float, steps: int = 1) -> None:
        """Sleep until the step (or so many in a row) that began then has lasted long enough, and
        until the device is cool enough."""
        self._cool_down(began)
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
        """The same of this share of the next step, which began then."""
        self._cool_down(began)
        if self.is_set and (left := share * self._lasts - (self._clock() - began)) > 0:
            self._sleep(left)
        self._step += 1
        self._lasts = self._seconds(self._step)

    def _cool_down(self, began: float) -> None:
        if self.cap is not None and (rest_s := self.cap.rest_s(self._clock() - began)) > 0:
            self._sleep(rest_s)

    def end_step(self, computed_s: float) -> None:
        """The step is over, and took so long without waiting and exchanging."""
        if self.is_set:
            self._owed = min(max(self._owed + computed_s - self._lasts, 0.0), self._lasts)
            self._step += 1
            self._lasts = self._seconds(self._step)
