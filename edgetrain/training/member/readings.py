"""What a member's machine says of itself, for the hub: memory, heat, energy, versions.

A member that passes for another device says nothing of the heat of this one.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from edgetrain.exchange.member.telemetry import Readings, SlowReadings
from edgetrain.fleet.devices import HOST, here
from edgetrain.fleet.devices.health import Health
from edgetrain.runs.environment import Meter, version

if TYPE_CHECKING:
    from edgetrain.fleet.devices.energy import Energy


def versions() -> str:
    """Versions of edgetrain, Python and torch, at most 40 characters."""
    return f"{version()} {platform.python_version()} {torch.__version__}"[:40]


SLOW_S = 60.0
"""Seconds between two readings of what changes slowly."""


def readings_of(
    device: str = HOST,
    energy: Energy | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], Readings]:
    """Reader of this machine, for a member with this device; its `energy`, if any."""
    meter = Meter()
    health = Health() if device == HOST or device == here() else None
    slow_at = -math.inf

    def read_slow() -> SlowReadings:
        nonlocal slow_at
        if health is None or clock() - slow_at < SLOW_S:
            return SlowReadings()
        slow_at = clock()
        return SlowReadings(
            health.disk_bytes,
            health.swap_bytes,
            health.megahertz,
            health.under_voltage,
            health.wifi_dbm,
            time.time(),
        )

    def read() -> Readings:
        return Readings(
            meter.peak_bytes,
            health.celsius if health else None,
            health.throttled if health else None,
            energy.joules(0.0) if energy else None,
            read_slow(),
        )

    return read
