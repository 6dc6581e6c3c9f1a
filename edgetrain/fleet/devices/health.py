"""How warm a board is, and whether it slows itself down: read from files of the kernel.

`root` is the folder that contains /sys, so that tests can replace a board by a made-up tree.
"""

from __future__ import annotations

from pathlib import Path

_THROTTLED = "sys/devices/platform/soc/soc:firmware/get_throttled"
"""Of Raspberry Pi's firmware, hexadecimal; the low bits say what is the case now."""

_NOW = 0b1111
"""Under-voltage, capped frequency, throttled, soft temperature limit."""


class Health:
    """A board's temperature and throttling. Which files it has is looked up once."""

    def __init__(self, root: Path = Path("/")) -> None:
        zones = sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))
        there = [zone for zone in zones if _number(zone) is not None]
        # A Jetson's PMIC always says 100 degrees.
        self._zones = [zone for zone in there if _is_processor(zone)] or there
        throttled = root / _THROTTLED
        self._throttled = throttled if _number(throttled, 16) is not None else None

    @property
    def celsius(self) -> float | None:
        """Of the hottest zone; None: the board does not say."""
        found = [each for zone in self._zones if (each := _number(zone)) is not None]
        return max(found) / 1000 if found else None

    @property
    def throttled(self) -> bool | None:
        """Whether heat or a weak supply slows the board down now; None: it does not say."""
        flags = None if self._throttled is None else _number(self._throttled, 16)
        return None if flags is None else bool(flags & _NOW)


def _is_processor(zone: Path) -> bool:
    try:
        kind = zone.with_name("type").read_text().lower()
    except OSError:
        return False
    return any(word in kind for word in ("cpu", "soc", "x86_pkg"))


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(path.read_text().strip(), base)
    except (OSError, ValueError):
        return None
