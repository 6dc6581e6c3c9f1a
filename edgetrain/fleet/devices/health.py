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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_THROTTLED = ("*firmware/get_throttled", "*/*firmware/get_throttled")
"""Below sys/devices/platform, hexadecimal: of Raspberry Pi's firmware. Its node has the address of
its bus in its name, which is not the same on all boards: soc/soc:firmware up to the 4."""

LEAST_CAP, HEAT_CAPS = 40.0, (0.0, 110.0, "C")
"""Temperatures that a device can be told to keep below."""
_NOW = 0b1111
"""Under-voltage, capped frequency, throttled, soft temperature limit. Higher bits say what has been
since the start."""

Ioctl = Callable[[int, int, bytearray], object]
"""fcntl.ioctl, which writes the answer over the question."""


def hottest(zones: Sequence[tuple[str, int | None]]) -> float | None:
    """Temperature of the hottest zone of the processor; of all, if none is called so. zones: the
    kind of each, and thousandths of a degree (or, of some drivers, degrees), None if it does not
    answer now. What no processor lives through, below -40 or above 150 degrees, is unknown."""
    words = ("cpu", "soc", "x86_pkg")  # a Jetson's PMIC always says 100 degrees
    chosen = [z for z in zones if any(word in z[0].lower() for word in words)] or zones
    readings = [v if abs(v) <= 150 else v / 1000 for _, v in chosen if v is not None]
    return max((float(value) for value in readings if -40 <= value <= 150), default=None)


def throttled(flags: int | None) -> bool | None:
    """Whether the firmware's flags say that heat or a weak supply slows the board down now."""
    return None if flags is None else bool(flags & _NOW)


def under_voltage(flags: int | None) -> bool | None:
    """Whether they say that the supply is too weak now."""
    return None if flags is None else bool(flags & 1)


class FirmwareMailbox:
    """Raspberry Pi's firmware, asked through /dev/vcio as `vcgencmd` does. Users of the group
    `video` may."""

    PROPERTY = 3 << 30 | struct.calcsize("P") << 16 | 100 << 8
    """The device's one request, _IOWR(100, 0, char *)."""

    GET_THROTTLED, GET_GENCMD_RESULT = 0x00030046, 0x00030080
    """Tags of properties (raspberrypi-firmware.h, and raspberrypi/utils, vcgencmd.c)."""

    _HEAD = struct.Struct("=5I")
    """Bytes in all, code, tag, bytes of the value, code of the tag; the value and an end follow."""

    _ANSWERED = 1 << 31
    """Set in both codes of an answer."""

    _TEXT = 4096
    """Bytes for a command, and for its answer."""

    def __init__(self, device: Path, ioctl: Ioctl = fcntl.ioctl) -> None:
        self._device, self._ioctl = device, ioctl

    def throttled(self) -> int | None:
        """The bits that the file get_throttled has elsewhere; None: there is no answer."""
        answer = self._property(self.GET_THROTTLED, bytes(4), 4)  # the bits to forget: none
        if answer is None or answer[0] != self._ANSWERED | 4:
            return None
        return int.from_bytes(answer[1], sys.byteorder)

    def command(self, words: str) -> str | None:
        """Output of `vcgencmd WORDS`; None: no answer, or refused by the firmware."""
        value = bytes(4) + words.encode().ljust(self._TEXT, b"\0")  # a word for an error
        answer = self._property(self.GET_GENCMD_RESULT, value, self._TEXT)
        if answer is None or not answer[0] & self._ANSWERED or any(answer[1][:4]):
            return None
        return answer[1][4:].partition(b"\0")[0].decode(errors="replace")

    def _property(self, tag: int, value: bytes, room: int) -> tuple[int, bytes] | None:
        """The tag's code and the value after asking; None: nobody answered."""
        size = self._HEAD.size + len(value) + 4
        message = bytearray(self._HEAD.pack(size, 0, tag, room, 0) + value + bytes(4))
        try:
            file = os.open(self._device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._ioctl(file, self.PROPERTY, message)
            finally:
                os.close(file)
        except OSError:
            return None
        _, code, answered, _, done = self._HEAD.unpack_from(message)
        if code != self._ANSWERED or answered != tag:
            return None
        return done, bytes(message[self._HEAD.size : -4])


class Health:
    """A board's temperature and throttling. What it has is looked up once."""

    def __init__(self, root: Path = Path("/"), ioctl: Ioctl = fcntl.ioctl) -> None:
        zones = sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))
        self._zones = [(_kind(zone), zone) for zone in zones if _number(zone) is not None]
        self._root = root
        self._flags = _flags_of(root, FirmwareMailbox(root / "dev/vcio", ioctl))

    @property
    def celsius(self) -> float | None:
        """Temperature of the hottest zone; None: the board does not report one."""
        return hottest([(kind, _number(zone)) for kind, zone in self._zones])

    @property
    def throttled(self) -> bool | None:
        """Whether heat or a weak supply slows the board down now; None: it does not say."""
        return throttled(self._flags())

    @property
    def under_voltage(self) -> bool | None:
        """Whether the supply is too weak now; None: the board does not say."""
        return under_voltage(self._flags())

    @property
    def megahertz(self) -> int | None:
        """The first core's frequency now; None: it is not known."""
        kilohertz = _number(self._root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
        return None if kilohertz is None else kilohertz // 1000

    @property
    def swap_bytes(self) -> int | None:
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
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _flags_of(root: Path, mailbox: FirmwareMailbox) -> Callable[[], int | None]:
    platform = root / "sys/devices/platform"
    for pattern in _THROTTLED:
        for file in sorted(platform.glob(pattern)):
            if _number(file, 16) is not None:
                return lambda: _number(file, 16)
    return mailbox.throttled if mailbox.throttled() is not None else lambda: None


def _kind(zone: Path) -> str:
    return next(iter(_lines(zone.with_name("type"))), "")


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(path.read_text().strip(), base)
    except (OSError, ValueError):
        return None
