"""The content of an image: partitions, operating system, Python, and its kind of first boot.

Asks partx, blkid and debugfs, which every Debian has; mounts nothing and needs no root for files.
"""

from __future__ import annotations

import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.provisioning.cards.first_boot import release_in
from edgetrain.provisioning.cards.source import SECTOR, SECTORS_OF_4096

TOOLS = {
    "partx": "util-linux",
    "blkid": "util-linux",
    "debugfs": "e2fsprogs",
    "mcopy": "mtools",
}
"""Programs, and Debian's packages that have them."""

CLOUD_INIT, FIRSTRUN, PRESEED = "cloud-init", "firstrun.sh", "rpi-preseed"
MACHINES = {0xB7: "aarch64", 0x3E: "x86_64", 0x28: "armv7l", 0x03: "i686"}
"""Machine numbers in ELF files."""
OLDEST_PYTHON = (3, 11)
RELEASES = {
    "raspberry-pi-os-13": "Raspberry Pi OS 13 (trixie)",
    "raspberry-pi-os-12": "Raspberry Pi OS 12 (bookworm)",
    "ubuntu-24.04": "Ubuntu Server 24.04",
    "debian-13": "Debian 13 with cloud-init",
    "debian-12": "Debian 12 with cloud-init",
}
"""Operating systems that cards are made for."""
OS_RELEASE = ("/usr/lib/os-release", "/etc/os-release")
_CLOUD_INIT_SINCE = "2025-10-02"
"""Images of Raspberry Pi OS before this have cloud-init and do not use it."""


@dataclass(frozen=True)
class Partition:
    """A partition: where it is, in bytes, and the file system on it ("" is none that is known)."""

    number: int
    start: int
    size: int
    filesystem: str = ""
    label: str = ""


@dataclass(frozen=True)
class ImageDescription:
    release: str
    """Operating system, as in RELEASES, or another name of the same kind."""
    python: tuple[int, int]
    machine: str
    """Machine, as uname has it: "aarch64"."""
    first_boot: str
    """CLOUD_INIT, FIRSTRUN or PRESEED."""
    boot: Partition
    root: Partition

    def describe(self) -> str:
        name = RELEASES.get(self.release, self.release)
        return f"{name}, Python {self.python[0]}.{self.python[1]}, {self.machine}"


def missing_tools(names: Sequence[str] = tuple(TOOLS)) -> list[str]:
    """The programs that are not installed."""
    return [name for name in names if not find_program(name)]


def check_tools() -> None:
    """Raises ConfigError, which names the packages to install, or says that this is not Linux."""
    if sys.platform != "linux":
        raise ConfigError(f"cards are written on Linux, not on {sys.platform}")
    if missing := missing_tools():
        packages = sorted({TOOLS[name] for name in missing})
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            f"apt install {' '.join(packages)}",
        )


def look(path: str, head: memoryview | bytes, size: int) -> ImageDescription:
    """Look into an image or a card whose first bytes may be blank: `head` is what they will be.

    path: the card; size: bytes of the image. Raises ConfigError, which says what was looked for, if
    the worker cannot run there.
    """
    check_tools()
    parts = partitions(path, head, size)
    for part in parts:
        if part.start + part.size > size:
            raise ConfigError(
                f"the image is cut short: its partition {part.number} ends at byte "
                f"{part.start + part.size}, and it has {size}",
                "download it again",
            )
    boot = next((p for p in parts if p.filesystem == "vfat"), None)
    roots = [p for p in parts if p.filesystem in ("ext4", "ext3", "ext2")]
    listed = ", ".join(f"{p.number}: {p.filesystem or 'unknown'}" for p in parts) or "none"
    if boot is None and any(_probe(path, 8 * p.start, 8 * p.size).get("TYPE") for p in parts):
        raise ConfigError(f"the image {SECTORS_OF_4096}")
    if boot is None or boot.number != parts[0].number:
        raise ConfigError(
            f"the image's first partition is not FAT (partitions: {listed})",
            "a Raspberry Pi boots from one; for a Jetson use NVIDIA's SDK Manager",
        )
    if not roots:
        raise ConfigError(f"the image has no ext4 partition to look into (partitions: {listed})")
    systems = [p for p in roots if any(map(Files(path, p).exists, OS_RELEASE))]
    if len(systems) > 1:
        raise ConfigError(
            f"the image has systems on partitions {' and '.join(str(p.number) for p in systems)}, "
            "and which one boots is not known here",
            "an image with one system",
        )
    root = (systems or roots)[0]
    files = Files(path, root)
    # The operating system, "raspberry-pi-os-13". Raises ConfigError if nothing says what it is.
    for name in OS_RELEASE:
        content = files.read(name)
        if content:
            break
    else:
        raise ConfigError("the image has no /usr/lib/os-release: its system is not known")
    text = content.decode(errors="replace")
    release = release_in(text, is_pi=files.exists("/etc/rpi-issue"))
    link = files.link("/usr/bin/python3")
    version = re.fullmatch(r"python(\d+)\.(\d+)", link.rpartition("/")[2])
    if not version:
        raise ConfigError(
            f"the image ({release}) has no Python 3 at /usr/bin/python3", "another image"
        )
    python = (int(version[1]), int(version[2]))
    machine = _machine(files.read(f"/usr/bin/{version[0]}") or b"")
    own, needed = (".".join(map(str, each)) for each in (python, OLDEST_PYTHON))
    refuse_first(
        (machine not in ("aarch64", "x86_64"),
         f"the image ({release}) is for {machine}: torch is made for 64-bit systems",
         "take the arm64 image of the same release"),
        (python < OLDEST_PYTHON,
         f"the image ({release}) has Python {own}, and edgetrain needs {needed}",
         "a newer release of the operating system"),
        (release not in RELEASES,
         f"the image is {release}, which this version has no first boot for",
         f"known: {', '.join(sorted(RELEASES))}"),
    )  # fmt: skip
    return ImageDescription(release, python, machine, _first_boot(files, release), boot, root)


def partitions(path: str, head: memoryview | bytes, size: int) -> list[Partition]:
    """The partitions of a card in the order in which they lie there, from the first bytes that it
    will have. Raises ConfigError."""
    with tempfile.NamedTemporaryFile(prefix="edgetrain-head-") as file:
        file.write(head)
        file.truncate(max(size, len(head)))
        file.flush()
        words = ["--bytes", "--pairs", "--output", "NR,START,SECTORS", file.name]
        done = _run("partx", *words)
    if done.returncode:
        raise ConfigError("the image has no partition table that partx can read")
    entries = []
    for line in done.stdout.decode().splitlines():
        row = dict(word.split("=", 1) for word in shlex.split(line))
        start, length = SECTOR * int(row["START"]), SECTOR * int(row["SECTORS"])
        about = _probe(path, start, length)
        kind, label = about.get("TYPE", ""), about.get("LABEL", "")
        entries.append(Partition(int(row["NR"]), start, length, kind, label))
    return sorted(entries, key=lambda part: part.start)


class Files:
    """The files of an ext4 partition, read without mounting it."""

    def __init__(self, path: str, partition: Partition) -> None:
        self._device = f"{path}?offset={partition.start}"

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if it is not there. Links are not followed."""
        if not self.exists(name):
            return None
        return self._ask(f"cat {name}").stdout

    def exists(self, name: str) -> bool:
        """Whether there is a file, folder or link of this name."""
        return b"Inode:" in self._ask(f"stat {name}").stdout

    def link(self, name: str) -> str:
        """The target of a symbolic link; "" if it is not one."""
        match = re.search(rb'Fast link dest: "(.*?)"', self._ask(f"stat {name}").stdout)
        return match[1].decode(errors="replace") if match else ""

    def _ask(self, request: str) -> subprocess.CompletedProcess[bytes]:
        return _run("debugfs", "-R", request, self._device)


def _first_boot(files: Files, release: str) -> str:
    has_cloud_init = files.exists("/usr/bin/cloud-init")
    if not release.startswith("raspberry-pi-os"):
        if not has_cloud_init:
            raise ConfigError(
                f"the image ({release}) has no /usr/bin/cloud-init: nothing would set it up"
            )
        return CLOUD_INIT
    issue = (files.read("/etc/rpi-issue") or b"").decode(errors="replace")
    date = re.search(r"\d{4}-\d\d-\d\d", issue)
    if has_cloud_init and not (date and date[0] < _CLOUD_INIT_SINCE):
        return CLOUD_INIT
    return PRESEED if files.exists("/usr/bin/rpi-preseed") else FIRSTRUN


def _machine(program: bytes) -> str:
    if program[:4] != b"\x7fELF" or len(program) < 20:
        return "an unknown machine"
    order = "<" if program[5] == 1 else ">"
    number = struct.unpack_from(f"{order}H", program, 18)[0]
    return MACHINES.get(number, f"machine {number:#x}")


def _probe(path: str, start: int, size: int) -> Mapping[str, str]:
    words = ("--probe", "--offset", str(start), "--size", str(size), "--output", "export", path)
    lines = _run("blkid", *words).stdout.decode(errors="replace").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")


def _run(name: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a tool; what it prints is its answer. Raises ConfigError if it does not end."""
    program = find_program(name)
    if program is None:
        raise ConfigError(f"{name} is not installed", f"apt install {TOOLS[name]}")
    try:
        return subprocess.run(
            [program, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
            check=False, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name} does not end", "is the card still in the reader?") from None
