"""What a member's machine says of itself, for the hub: memory, heat, energy, versions.

A member that passes for another device says nothing of the heat of this one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from edgetrain.exchange.member.telemetry import Readings
from edgetrain.fleet.devices import HOST, Energy, here
from edgetrain.fleet.devices.health import Health
from edgetrain.runs.environment import Meter, version


def versions() -> str:
    """Of edgetrain, Python and torch, at most 40 characters."""
    return f"{version()} {platform.python_version()} {torch.__version__}"[:40]


def readings_of(device: str = HOST, energy: Energy | None = None) -> Callable[[], Readings]:
    """What reads this machine, for a member that trains as this device; its `energy`, if that is
    counted."""
    meter = Meter()
    health = Health() if device == HOST or device == here() else None

    def read() -> Readings:
        return Readings(
            meter.peak_bytes,
            health.celsius if health else None,
            health.throttled if health else None,
            energy.joules(0.0) if energy else None,
        )

    return read
