"""The joules of one member: measured if the board has a sensor, otherwise estimated.

A sensor measures the machine it is built into. It is read only for a member whose device is this
machine ("host", or the board's own name). A member that emulates another board is charged an
estimate for that board.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from edgetrain.fleet.devices.profile import HOST, Device, here, load
from edgetrain.fleet.devices.sensors import Sensor, find_sensor

READ_EVERY_S = 0.2
"""Seconds between readings. Reading a sensor on I2C takes about a millisecond: too long for every
step."""

MEASURED, ESTIMATED = "measured", "estimated"


def joules_source(device: str, root: Path = Path("/")) -> str | None:
    """Source of this device's joules: "measured", "estimated"; None: unknown."""
    return Energy(load(device, root), root=root).source


class Energy:
    """The energy of one member since the creation of this object.

    A sensor measures the whole machine. This process is charged a share: its CPU time divided by
    the CPU time of all processes, so the members of one machine add up to the whole.
    Estimated energy is idle_watts all the time and load_watts while the member computes.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float] = time.monotonic,
        root: Path | None = Path("/"),
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        """`root`: root folder of the machine's files; None: it has no sensor."""
        self._device, self._clock = device, clock
        self._began = clock()
        self._busy_s = 0.0
        self._share = None
        if root is not None and device.name in (HOST, here(root)):
            sensor = find_sensor(root, self._began)
            self._share = _Share(sensor, self._began, root, cpu_seconds) if sensor else None
        self._estimates = device.idle_watts is not None and device.load_watts is not None

    @property
    def source(self) -> str | None:
        if self._share:
            return MEASURED
        return ESTIMATED if self._estimates else None

    def joules(self, busy_s: float) -> float | None:
        """Add `busy_s` seconds of computing; return the joules so far, which never decrease."""
        self._busy_s += busy_s
        now = self._clock()
        if self._share:
            return self._share.joules(now)
        seconds = now - self._began
        idle, loaded = self._device.idle_watts, self._device.load_watts
        if idle is None or loaded is None:
            return None
        return idle * seconds + (loaded - idle) * min(self._busy_s, seconds)


class _Share:
    """This process's share of the energy that a sensor measures."""

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
        except OSError:  # the I2C bus is busy; the next reading covers this time too
            return self._joules
        spent = all_busy - self._last[2]
        share = min((own - self._last[1]) / spent, 1.0) if spent > 0 else 0.0
        self._joules += (whole - self._last[0]) * share
        self._last = whole, own, all_busy
        return self._joules

    def _counters(self, now: float) -> tuple[float, float, float]:
        return self._sensor.joules(now), self._cpu_seconds(), _busy_seconds(self._root)


def _busy_seconds(root: Path) -> float:
    first = (root / "proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
