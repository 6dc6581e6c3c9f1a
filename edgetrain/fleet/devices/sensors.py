"""Power sensors of a board: read from files of the kernel and added up to joules.

`energy` decides which member is charged. `root` is the folder that contains /sys and /proc, so that
tests can replace a board by a made-up tree.
"""

from __future__ import annotations

import fcntl
import math
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from edgetrain.fleet.devices.health import FirmwareMailbox, Ioctl

TOTAL_RAILS = ("VDD_IN", "POM_5V_IN")
"""NVIDIA's names for the rail that feeds the whole module (Jetson Linux developer guide)."""


class Sensor(Protocol):
    """Measures the energy used since it was opened."""

    name: str

    def joules(self, now: float) -> float:
        """Return the energy so far, which never decreases; `now` is in seconds of any clock."""


def find_sensor(root: Path, now: float) -> Sensor | None:
    """Open the board's sensor; None if it has none that this user may read."""
    for kind in (Rapl, Ina3221, Pmic):
        try:
            return kind(root, now)
        except (OSError, ValueError):
            continue
    return None


class Rapl:
    """The energy counters of x86 processor packages, in microjoules (kernel: power/powercap).

    They do not include memory, board and power supply. Since CVE-2020-8694 only root may read them.
    """

    name = "RAPL"

    def __init__(self, root: Path, now: float) -> None:
        """Raises FileNotFoundError without such a counter, PermissionError if it is unreadable."""
        zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._packages = [zone for zone in zones if _read(zone / "name").startswith("package")]
        if not self._packages:
            raise FileNotFoundError("no RAPL package")
        self._spans = [int(_read(zone / "max_energy_range_uj")) for zone in self._packages]
        self._last = self._counters()
        self._microjoules = 0

    def joules(self, now: float) -> float:
        counters = self._counters()
        for last, counter, span in zip(self._last, counters, self._spans, strict=True):
            self._microjoules += counter - last + (span if counter < last else 0)  # wrapped round
        self._last = counters
        return self._microjoules / 1e6

    def _counters(self) -> list[int]:
        return [_whole(zone / "energy_uj") for zone in self._packages]


class PowerSensor(ABC):
    """A sensor of power, summed over time. Between two readings it changes linearly."""

    def __init__(self, now: float) -> None:
        self._at, self._watts = now, self._power()
        self._sum = 0.0

    def joules(self, now: float) -> float:
        watts = self._power()
        self._sum += (now - self._at) * (self._watts + watts) / 2
        self._at, self._watts = now, watts
        return self._sum

    @abstractmethod
    def _power(self) -> float:
        """Watts now. Raises OSError."""


class Ina3221(PowerSensor):
    """The current monitor of Jetson boards: power at the module's input.

    Newer kernels show it as a hwmon device (mV and mA), the kernel of the Jetson Nano as an IIO
    device (mW).
    """

    name = "INA3221"

    def __init__(self, root: Path, now: float) -> None:
        """Raises FileNotFoundError if there is no such rail."""
        self._files = _hwmon_rail(root) or _iio_rail(root)
        if not self._files:
            raise FileNotFoundError("no INA3221 rail of the whole board")
        super().__init__(now)

    def _power(self) -> float:
        return math.prod(_whole(file) / 1e3 for file in self._files)


class Pmic(PowerSensor):
    """The power chip of a Raspberry Pi 5: voltage times current of its twelve rails, and what the
    board takes beside them, by the line that J. Fikar fitted to a USB meter (jfikar/RPi5-power):
    watts = 1.1451 * rails + 0.5879. What hangs on the board's 5 V, USB and NVMe, is not seen.
    """

    name = "PMIC"
    SLOPE, REST = 1.1451, 0.5879
    _RAIL = re.compile(r"(\w+)_[AV] (?:current|volt)\(\d+\)=([\d.]+)([AV])")

    def __init__(self, root: Path, now: float, ioctl: Ioctl = fcntl.ioctl) -> None:
        """Raises OSError if the firmware has no such chip, or does not let this user ask."""
        self._mailbox = FirmwareMailbox(root / "dev/vcio", ioctl)
        super().__init__(now)

    def _power(self) -> float:
        said = self._mailbox.command("pmic_read_adc") or ""
        found = {(rail, unit): float(value) for rail, value, unit in self._RAIL.findall(said)}
        volts = {rail: value for (rail, unit), value in found.items() if unit == "V"}
        currents = {rail: value for (rail, unit), value in found.items() if unit == "A"}
        if not currents or not currents.keys() <= volts.keys():
            raise OSError("the firmware reports no rails")
        return self.SLOPE * sum(volts[rail] * amps for rail, amps in currents.items()) + self.REST


def _hwmon_rail(root: Path) -> tuple[Path, ...]:
    for label in sorted((root / "sys/class/hwmon").glob("hwmon*/in*_label")):
        chip = label.parent
        if _read(chip / "name") == "ina3221" and _read(label) in TOTAL_RAILS:
            number = label.name.removeprefix("in").removesuffix("_label")
            return chip / f"in{number}_input", chip / f"curr{number}_input"
    return ()


def _iio_rail(root: Path) -> tuple[Path, ...]:
    chips = root / "sys/bus/i2c/drivers/ina3221x"
    for label in sorted(chips.glob("*/iio:device*/rail_name_*")):
        if _read(label) in TOTAL_RAILS:
            number = label.name.removeprefix("rail_name_")
            return (label.parent / f"in_power{number}_input",)
    return ()


def _whole(path: Path) -> int:
    """The number in a file. Raises OSError where it has none, as where it cannot be read."""
    try:
        return int(_read(path))
    except ValueError:
        raise OSError(f"{path} has no number") from None


def _read(path: Path) -> str:
    return path.read_text().strip()
