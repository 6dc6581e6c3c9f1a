"""What a member says of itself every few seconds: where it is, where its time went, its machine.

Of itself a member says numbers only, the same ones with and without privacy. The member that
evaluates adds the newest figure, unless that is nobody else's business. `Telemeter` decides when,
and turns sums into a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from edgetrain.exchange.messages import UNKNOWN_CELSIUS, Figure, Telemetry
from edgetrain.exchange.transport import Traffic


@dataclass(frozen=True)
class Sums:
    """Where a member is, and where its time went since its process began to train, in seconds.

    What is left of the time is computing. `at`: the reading of the clock up to which they count.
    """

    step: int
    round: int
    at: float
    wait_s: float
    overhead_s: float
    eval_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True)
class SlowReadings:
    """Slowly changing readings of a machine; None: not available."""

    disk_bytes: int | None = None
    """Free."""
    swap_bytes: int | None = None
    """Used."""
    megahertz: int | None = None
    under_voltage: bool | None = None
    wifi_dbm: int | None = None
    unix_s: float | None = None
    """Its clock, in seconds since 1970."""


@dataclass(frozen=True)
class Readings:
    """Readings of a machine; None: not available."""

    memory_bytes: int | None = None
    celsius: float | None = None
    throttled: bool | None = None
    joules: float | None = None
    slow: SlowReadings = SlowReadings()
    """Empty but once a minute."""


class Telemeter:
    """Says every `period_s` seconds (0: never) how a member is doing.

    `sums`, `traffic` and `read` are asked when it is time; `say` gets each message. Training began
    at `began` of the clock. `sums` and `read` may be replaced.
    """

    def __init__(
        self,
        period_s: float,
        began: float,
        clock: Callable[[], float],
        sums: Callable[[], Sums],
        traffic: Callable[[], Traffic],
        say: Callable[[Telemetry | Figure], None],
    ) -> None:
        self.sums = sums
        self.read: Callable[[], Readings] = Readings
        self.versions = ""
        """Said once, with the first message."""
        self.figure: Figure | None = None
        """Said once, behind the next message; a newer one replaces it."""
        self.began = began
        self._period_s, self._clock, self._traffic, self._say = period_s, clock, traffic, say
        self._next = -math.inf
        self._before = traffic()

    def poll(self) -> None:
        """Say it if it is time. Call it as often as you like: that costs a look at the clock."""
        if self._period_s and self._clock() >= self._next:
            self.say()

    def say(self) -> None:
        """Say it now, unless it is never wanted."""
        if not self._period_s:
            return
        self._next = self._clock() + self._period_s
        self._say(self._message())
        self.versions = ""
        if self.figure is not None:
            self._say(self.figure)
            self.figure = None

    def _message(self) -> Telemetry:
        sums, readings, traffic = self.sums(), self.read(), self._traffic()
        heat, joules, slow = readings.celsius, readings.joules, readings.slow
        return Telemetry(
            step=sums.step,
            round=sums.round,
            t_ms=_thousandths(sums.at - self.began),
            wait_ms=_thousandths(sums.wait_s),
            overhead_ms=_thousandths(sums.overhead_s),
            eval_ms=_thousandths(sums.eval_s),
            end_ms=_thousandths(sums.end_s),
            round_trip_us100=_thousandths(10 * traffic.round_trip_s),
            sent_bytes=max(0, traffic.sent_bytes - self._before.sent_bytes),
            received_bytes=max(0, traffic.received_bytes - self._before.received_bytes),
            memory_mb=(readings.memory_bytes or 0) >> 20,
            celsius=UNKNOWN_CELSIUS if heat is None else min(1000, max(-273, round(heat))),
            throttled=-1 if readings.throttled is None else int(readings.throttled),
            joules=-1 if joules is None else max(0, round(joules)),
            versions=self.versions,
            disk_mb=-1 if slow.disk_bytes is None else slow.disk_bytes >> 20,
            swap_mb=-1 if slow.swap_bytes is None else slow.swap_bytes >> 20,
            mhz=min(1 << 20, max(0, slow.megahertz or 0)),
            under_voltage=-1 if slow.under_voltage is None else int(slow.under_voltage),
            wifi_dbm=min(0, max(-200, slow.wifi_dbm or 0)),
            unix_ms=min(1 << 50, _thousandths(slow.unix_s or 0.0)),
        )


def _thousandths(value: float) -> int:
    return max(0, round(1000 * value))
