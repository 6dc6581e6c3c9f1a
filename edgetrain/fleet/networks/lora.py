"""Time on air of a LoRa radio, which shows why it cannot carry training. Formulas only.

Source: Semtech, SX1276/77/78/79 data sheet, section 4.1.1.7 "Time on air".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.checks import Limits, number


@dataclass(frozen=True, slots=True)
class Radio:
    """One LoRa channel, with explicit header and CRC, as in LoRaWAN."""

    spreading_factor: int = 7
    bandwidth_khz: float = 125.0
    coding_rate: int = 1  # 1 to 4, for 4/5 to 4/8
    preamble_symbols: int = 8
    payload_bytes: int = 222
    duty_cycle_percent: float = 1.0

    def time_on_air_seconds(self, payload_bytes: int) -> float:
        """Return how long one frame with this payload takes."""
        symbol: float = 2**self.spreading_factor / (self.bandwidth_khz * 1000)
        # The data sheet requires the low-data-rate optimisation for symbols longer than 16 ms.
        low_rate = 1 if symbol > 0.016 else 0
        bits = 8 * payload_bytes - 4 * self.spreading_factor + 28 + 16
        groups = math.ceil(bits / (4 * (self.spreading_factor - 2 * low_rate)))
        symbols = 8 + max(groups * (self.coding_rate + 4), 0)
        return (self.preamble_symbols + 4.25 + symbols) * symbol

    def transfer_seconds(self, total_bytes: int) -> float:
        """Return how long `total_bytes` take in full frames, within the duty cycle."""
        frames = math.ceil(total_bytes / self.payload_bytes)
        on_air = frames * self.time_on_air_seconds(self.payload_bytes)
        return on_air * 100 / self.duty_cycle_percent


_RANGES: dict[str, Limits] = {
    "spreading_factor": (7, 12, ""),
    "bandwidth_khz": (125, 500, "kHz"),
    "coding_rate": (1, 4, ""),
    "preamble_symbols": (6, 65_535, ""),
    "payload_bytes": (1, 255, "bytes"),
    "duty_cycle_percent": (0.1, 100, "%"),
}
_FRACTIONS = ("bandwidth_khz", "duty_cycle_percent")


def parse(table: Mapping[str, Any], path: Path) -> Radio:
    """Read a radio from a profile's [lora] table. ConfigError names file, key and range."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _RANGES:
            raise ConfigError(f"{path}: unknown key 'lora.{key}'", did_you_mean(key, _RANGES))
        whole = key not in _FRACTIONS
        found = number(value, _RANGES[key], f"{path}: lora.{key}", whole)
        values[key] = int(found) if whole else value
    return Radio(**values)
