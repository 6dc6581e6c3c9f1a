"""The joules of one member: measured where the board has a sensor, else estimated, and which.

A sensor tells of the machine it sits in. It is asked only when a member runs as what it is ("host",
or the board's own name); a member that passes for another board is charged what that would use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from edgetrain.fleet.devices.profile import HOST, Device, here, load
from edgetrain.fleet.devices.sensors import Sensor, find_sensor

READ_EVERY_S = 0.2
"""A sensor behind I2C takes about a millisecond to read: not in every step."""

MEASURED, ESTIMATED = "measured", "estimated"


def joules_source(device: str, root: Path = Path("/")) -> str | None:
    """How the joules of a member on this device come about: "measured", "estimated" or None.

    None where nothing is known: a host without a sensor that is no board of the catalog.
    """
    return Energy(load(device, root), root=root).source


class Energy:
    """Adds up the energy that one member uses from the moment it is made.

    Measured energy is the machine's: of it, this process is charged the share that its CPU time has
    in all CPU time that the machine spent meanwhile, so that members side by side add up to the
    whole. Estimated energy is idle_watts all the time and load_watts while the member computes.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._device, self._clock = device, clock
        self._began = clock()
        self._busy_s = 0.0
        real = device.name in (HOST, here(root))
        sensor = find_sensor(root, self._began) if real else None
        self._share = _Share(sensor, self._began, root, cpu_seconds) if sensor else None
        self._estimates = device.idle_watts is not None and device.load_watts is not None

    @property
    def source(self) -> str | None:
        """ "measured", "estimated", or None where no figure can be given."""
        if self._share:
            return MEASURED
        return ESTIMATED if self._estimates else None

    def joules(self, busy_s: float) -> float | None:
        """Energy so far, never less than before, after `busy_s` more seconds of computing."""
        self._busy_s += busy_s
        now = self._clock()
        if self._share:
            return self._share.joules(now)
        return self._estimate(now - self._began)

    def _estimate(self, seconds: float) -> float | None:
        idle, loaded = self._device.idle_watts, self._device.load_watts
        if idle is None or loaded is None:
            return None
        return idle * seconds + (loaded - idle) * min(self._busy_s, seconds)


class _Share:
    """The part of a sensor's energy that this process is charged."""

    def __init__(
        self, sensor: Sensor, now: float, root: Path, cpu_seconds: Callable[[], float]
    ) -> None:
        self._sensor, self._root, self._cpu_seconds = sensor, root, cpu_seconds
        self._read_at = now
        self._last = self._counters(now)
        self._joules = 0.0

    def joules(self, now: float) -> float:
        if now - self._read_at < READ_EVERY_S:
            return self._joules
        self._read_at = now
        try:
            whole, own, all_busy = self._counters(now)
        except OSError:  # an I2C bus that is busy; the next reading covers this time too
            return self._joules
        spent = all_busy - self._last[2]
        share = min((own - self._last[1]) / spent, 1.0) if spent > 0 else 0.0
        self._joules += (whole - self._last[0]) * share
        self._last = whole, own, all_busy
        return self._joules

    def _counters(self, now: float) -> tuple[float, float, float]:
        """The machine's joules, this process's CPU seconds, all processes' CPU seconds."""
        return self._sensor.joules(now), self._cpu_seconds(), _busy_seconds(self._root)


def _busy_seconds(root: Path) -> float:
    """CPU seconds that all cores have spent on anything but idling (proc(5), /proc/stat)."""
    first = (root / "proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
