"""A board's temperature, and whether it slows itself down: from files of the kernel, or from the
firmware.

`root` is the folder that contains /sys and /dev, so that tests can replace a board by a made-up
tree.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

_THROTTLED = ("*firmware/get_throttled", "*/*firmware/get_throttled")
"""Below sys/devices/platform, hexadecimal: of Raspberry Pi's firmware. Its node has the address of
its bus in its name, which is not the same on all boards: soc/soc:firmware up to the 4."""

_NOW = 0b1111
"""Under-voltage, capped frequency, throttled, soft temperature limit. Higher bits say what has been
since the start."""

Ioctl = Callable[[int, int, bytearray], object]
"""fcntl.ioctl, which writes the answer over the question."""


class FirmwareMailbox:
    """Raspberry Pi's firmware, asked through /dev/vcio as `vcgencmd get_throttled` does. Users of
    the group `video` may."""

    PROPERTY = 3 << 30 | struct.calcsize("P") << 16 | 100 << 8
    """The device's one request, _IOWR(100, 0, char *)."""

    GET_THROTTLED = 0x00030046
    """The property's tag (raspberrypi-firmware.h); its value are the bits to forget: 0, none."""

    _MESSAGE = struct.Struct("=7I")
    """Bytes in all, code, tag, bytes of the value, code of the tag, value, and an end."""

    _ANSWERED = 1 << 31
    """Set in both codes of an answer."""

    def __init__(self, device: Path, ioctl: Ioctl = fcntl.ioctl) -> None:
        self._device, self._ioctl = device, ioctl

    def throttled(self) -> int | None:
        """The bits that the file get_throttled has elsewhere; None: there is no answer."""
        message = bytearray(self._MESSAGE.pack(28, 0, self.GET_THROTTLED, 4, 0, 0, 0))
        try:
            file = os.open(self._device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._ioctl(file, self.PROPERTY, message)
            finally:
                os.close(file)
        except OSError:
            return None
        _, code, tag, _, done, value, _ = self._MESSAGE.unpack(message)
        whole = code == self._ANSWERED and done == self._ANSWERED | 4
        return value if whole and tag == self.GET_THROTTLED else None


class Health:
    """A board's temperature and throttling. What it has is looked up once."""

    def __init__(self, root: Path = Path("/"), ioctl: Ioctl = fcntl.ioctl) -> None:
        zones = sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))
        there = [zone for zone in zones if _number(zone) is not None]
        # A Jetson's PMIC always says 100 degrees.
        self._zones = [zone for zone in there if _is_processor(zone)] or there
        self._root = root
        self._flags = _flags_of(root, FirmwareMailbox(root / "dev/vcio", ioctl))

    @property
    def celsius(self) -> float | None:
        """Temperature of the hottest zone; None: the board does not report one."""
        readings = [each for zone in self._zones if (each := _number(zone)) is not None]
        return max(readings) / 1000 if readings else None

    @property
    def throttled(self) -> bool | None:
        """Whether heat or a weak supply slows the board down now; None: it does not say."""
        flags = self._flags()
        return None if flags is None else bool(flags & _NOW)

    @property
    def under_voltage(self) -> bool | None:
        """Whether the supply is too weak now; None: the board does not say."""
        flags = self._flags()
        return None if flags is None else bool(flags & 1)

    @property
    def megahertz(self) -> int | None:
        """The first core's frequency now; None: it is not known."""
        kilohertz = _number(self._root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
        return None if kilohertz is None else kilohertz // 1000

    @property
    def swap_bytes(self) -> int | None:
        """Swap that is used (proc(5), /proc/meminfo)."""
        lines = _lines(self._root / "proc/meminfo")
        found = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
        total, free = found.get("SwapTotal:", ""), found.get("SwapFree:", "")
        is_known = total.isdigit() and free.isdigit()
        return (int(total) - int(free)) << 10 if is_known else None

    @property
    def wifi_dbm(self) -> int | None:
        """Level of the strongest wireless signal (/proc/net/wireless: two lines of heading, then
        one an interface: name, status, link, level, …); None: there is no wireless network."""
        levels = []
        for line in _lines(self._root / "proc/net/wireless")[2:]:
            words = line.split()
            level = words[3].rstrip(".") if len(words) > 3 else ""
            if level.lstrip("-").isdigit():
                levels.append(int(level))
        return max(levels, default=None)

    @property
    def disk_bytes(self) -> int | None:
        """Free bytes of the disk that this process works on."""
        try:
            return shutil.disk_usage(Path.cwd()).free
        except OSError:
            return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _flags_of(root: Path, mailbox: FirmwareMailbox) -> Callable[[], int | None]:
    """The reader of the firmware's flags on this board."""
    platform = root / "sys/devices/platform"
    for pattern in _THROTTLED:
        for file in sorted(platform.glob(pattern)):
            if _number(file, 16) is not None:
                return lambda: _number(file, 16)
    return mailbox.throttled if mailbox.throttled() is not None else lambda: None


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
