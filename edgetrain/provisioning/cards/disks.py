"""The disks of this machine that are cards: a policy over what `lsblk --json` prints.

Reads nothing of a disk and opens none; the kernel has the last word (O_EXCL, in `medium`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean

COLUMNS = "NAME,KNAME,PATH,TYPE,SIZE,RO,RM,HOTPLUG,TRAN,SUBSYSTEMS,MODEL,SERIAL,MOUNTPOINTS,FSTYPE"
LARGEST = 256 << 30
"""Bytes: a larger disk is more likely somebody's data than a card."""

_CLAIMED = {
    "LVM2_member": "LVM",
    "linux_raid_member": "RAID",
    "isw_raid_member": "RAID",
    "ddf_raid_member": "RAID",
    "crypto_LUKS": "LUKS",
    "zfs_member": "ZFS",
    "bcache": "bcache",
    "swap": "swap",
}
"""File system types that belong to something larger than one partition."""
_LAYERS = {"lvm": "LVM", "crypt": "LUKS", "mpath": "multipath", "dm": "device mapper"}


@dataclass(frozen=True)
class Disk:
    """One whole disk, and everything that lies on it."""

    path: str
    size: int
    """Bytes."""
    model: str
    serial: str
    entry: Mapping[str, Any] = field(repr=False, compare=False)
    soldered: bool = False
    """Whether it is an eMMC: it has boot areas of its own."""

    def describe(self) -> str:
        """Path, size, model and serial number, for a person who compares them with the card."""
        serial = f", serial {self.serial}" if self.serial else ""
        return f"{self.path}  {self.size / 1e9:.1f} GB  {self.model or 'no name'}{serial}"


def listing() -> str:
    """The output of lsblk. Raises ConfigError if it is not there, or not Linux."""
    if sys.platform != "linux":
        raise ConfigError(f"cards are written on Linux, not on {sys.platform}")
    if not shutil.which("lsblk"):
        raise ConfigError("lsblk is not installed", "apt install util-linux")
    words = ["lsblk", "--json", "--bytes", "--tree", "-o", COLUMNS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise ConfigError(f"lsblk failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def disks(text: str) -> list[Disk]:
    """The whole disks in a listing, card or not. Raises ConfigError if it is not lsblk's JSON."""
    try:
        entries = json.loads(text)["blockdevices"]
        names = {entry["kname"] for entry in entries}
        return [
            Disk(
                entry["path"],
                int(entry["size"] or 0),
                (entry.get("model") or "").strip(),
                (entry.get("serial") or "").strip(),
                entry,
                f"{entry['kname']}boot0" in names,
            )
            for entry in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lsblk printed something unexpected: {error!r}") from None


def why_not(disk: Disk, need: int = 0, *, larger: bool = False, loops: bool = False) -> str:
    """Why a disk must not be written, in words that follow its name; "" if it may be.

    need: bytes that it must hold. `larger` allows more than LARGEST, `loops` allows loop devices.
    """
    entry = disk.entry
    kind, kernel_name = entry["type"], entry["kname"]
    if kind not in ("disk", "loop"):
        return f"is a {kind}, not a whole disk"
    if kind == "loop" and not loops:
        return "is a loop device, not a card"
    if kernel_name.startswith(("zram", "ram", "sr", "fd", "nbd")) or disk.soldered or (
        kernel_name.startswith("mmcblk") and not kernel_name[6:].isdigit()
    ):  # fmt: skip
        return "is not a medium that can be taken out"
    if not disk.size:
        return "has no card in it"
    if claimed := _claimed(entry):
        return claimed
    buses = {entry.get("tran") or "", *(entry.get("subsystems") or "").split(":")}
    leaves = _true(entry.get("rm")) or _true(entry.get("hotplug")) or buses & {"usb", "mmc"}
    if kind == "disk" and not leaves:
        return "is not removable"
    if _true(entry.get("ro")):
        return "is read-only: look at the card's lock switch"
    if disk.size > LARGEST and not larger:
        return (
            f"has {disk.size / 1e9:.0f} GB, more than a card of {LARGEST >> 30} GiB "
            "(--larger allows it)"
        )
    if disk.size < need:
        return f"has {disk.size} bytes, and {need} are needed"
    return ""


def cards(disks: list[Disk], need: int = 0, *, larger: bool = False) -> list[Disk]:
    """The disks of a listing that may be written."""
    return [disk for disk in disks if not why_not(disk, need, larger=larger)]


def disk_at(path: str, disks: list[Disk]) -> Disk:
    """The disk with this path. Raises ConfigError for a partition and for a path that is not there.

    Links such as /dev/disk/by-id/… have to be resolved before.
    """
    for disk in disks:
        if disk.path == path:
            return disk
        if path in [part["path"] for part in _below(disk.entry)]:
            raise ConfigError(f"{path} is a part of {disk.path}", "a card is written whole")
    # Only what may be written is named: the nearest name may be the disk of this system.
    writable = [disk.path for disk in cards(disks, larger=True)]
    raise ConfigError(f"no disk {path}", did_you_mean(path, writable))


def _claimed(entry: Mapping[str, Any]) -> str:
    """The user of the disk or of something on it, in words; "": it is free."""
    for part in (entry, *_below(entry)):
        mounts = [m for m in part.get("mountpoints") or [part.get("mountpoint")] if m]
        name = part.get("name") or part["kname"]
        if "[SWAP]" in mounts:
            return f"is in use: {name} is swap"
        if mounts:
            return f"is in use: {name} is mounted at {', '.join(mounts)}"
        holds = _CLAIMED.get(part.get("fstype") or "") or _LAYERS.get(part["type"])
        if holds or part["type"].startswith("raid"):
            return (
                f"is part of something larger: {name} holds {holds or 'RAID'} (wipefs removes it)"
            )
    return ""


def _below(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for child in entry.get("children") or ():
        yield child
        yield from _below(child)


def _true(value: Any) -> bool:
    return value in (True, 1, "1")
