"""Images as they are published for a Raspberry Pi, small: made without root, mounts and network.

Each has what is looked at: os-release, rpi-issue, the link to Python, an ELF header, cloud-init.
The texts are those of the published images named beside them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MB = 1 << 20
BOOT_MB, ROOT_MB = 20, 16
AARCH64, ARM, X86_64 = 0xB7, 0x28, 0x3E
PI_LINE = (
    "console=serial0,115200 console=tty1 root=PARTUUID=5eedf1a5-02 rootfstype=ext4 "
    "fsck.repair=yes rootwait quiet init=/usr/lib/raspberrypi-sys-mods/firstboot\n"
)


@dataclass(frozen=True)
class System:
    """What is in an image's root file system, as far as anybody looks."""

    os_release: str
    python: str = "python3.13"
    machine: int = AARCH64
    cloud_init: bool = True
    preseed: bool = False
    issue: str = ""
    label: str = "bootfs"
    line: str = PI_LINE
    boot: dict[str, bytes] = field(default_factory=dict)


TRIXIE = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nID=debian\n'
BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nID=debian\n'
SEED = {"user-data": b"#cloud-config\n", "network-config": b"# none\n", "meta-data": b"# none\n"}

SYSTEMS = {
    # 2025-12-04-raspios-trixie-arm64-lite: cloud-init does the first boot
    "raspberry-pi-os-13": System(
        TRIXIE, issue="Raspberry Pi reference 2025-12-04\n", boot=SEED, line=PI_LINE
    ),
    # 2025-10-01-raspios-trixie-arm64-lite: cloud-init is there, firstrun.sh does it
    "raspberry-pi-os-13 of October": System(
        TRIXIE, issue="Raspberry Pi reference 2025-10-01\n", boot=SEED
    ),
    # an image whose first boot is rpi-preseed's (https://github.com/raspberrypi/rpi-preseed)
    "raspberry-pi-os-13 with rpi-preseed": System(
        TRIXIE,
        cloud_init=False,
        preseed=True,
        issue="Raspberry Pi reference 2026-08-01\n",
        line=PI_LINE,
    ),
    # 2024-11-19-raspios-bookworm-arm64-lite
    "raspberry-pi-os-12": System(
        BOOKWORM, "python3.11", cloud_init=False, issue="Raspberry Pi reference 2024-11-19\n"
    ),
    # ubuntu-24.04.1-preinstalled-server-arm64+raspi
    "ubuntu-24.04": System(
        'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_ID="24.04"\nID=ubuntu\n',
        "python3.12",
        label="system-boot",
        line="multipath=off dwc_otg.lpm_enable=0 console=serial0,115200 console=tty1 "
        "root=LABEL=writable rootfstype=ext4 rootwait fixrtc\n",
        boot=SEED,
    ),
    # 2025-12-04-raspios-trixie-armhf-lite
    "32-bit": System(
        'VERSION_ID="13"\nID=raspbian\n', machine=ARM, issue="Raspberry Pi reference 2025-12-04\n"
    ),
    # 2023-05-03-raspios-bullseye-arm64-lite
    "raspberry-pi-os-11": System(
        'VERSION_ID="11"\nID=debian\n', "python3.9", cloud_init=False, issue="Raspberry Pi\n"
    ),
    "fedora": System('VERSION_ID="42"\nID=fedora\n', "python3.13"),
}


def missing() -> str:
    """Why no image can be made here; "" if it can."""
    path = "/usr/sbin:/sbin:/usr/bin:/bin"
    packages = {"mformat": "mtools", "mke2fs": "e2fsprogs", "partx": "util-linux"}
    lacking = [p for tool, p in packages.items() if not shutil.which(tool, path=path)]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def make(path: Path, system: System, *, boot_kind: str = "vfat") -> Path:
    """Make an image: an MBR, FAT, ext4. Returns its path."""
    folder = path.parent / f"{path.stem}-files"
    _root(folder / "root", system)
    start, root = 4 * MB, (4 + BOOT_MB) * MB
    table = bytearray(512)
    struct.pack_into("<I", table, 440, 0x5EEDF1A5)
    for at, (kind, begin, size) in enumerate(((0x0C, start, BOOT_MB), (0x83, root, ROOT_MB))):
        struct.pack_into("<4xB3xII", table, 446 + 16 * at, kind, begin // 512, size * MB // 512)
    table[510:] = b"\x55\xaa"
    with path.open("wb") as file:
        file.write(table)
        file.truncate(root + ROOT_MB * MB)
    device = f"{path}@@{start}"
    if boot_kind == "vfat":
        sectors = str(BOOT_MB * MB // 512)
        _run(
            "mformat", "-i", device, "-v", system.label, "-T", sectors, "-h", "64", "-s", "32", "::"
        )
        for name, content in {"cmdline.txt": system.line.encode(), **system.boot}.items():
            _run("mcopy", "-i", device, "-", f"::{name}", data=content)
    else:
        _run("mke2fs", "-q", "-t", "ext4", "-E", f"offset={start}", str(path), f"{BOOT_MB}m")
    options = f"offset={root},root_owner=0:0"
    _run("mke2fs", "-q", "-t", "ext4", "-d", str(folder / "root"), "-E", options, str(path),
         f"{ROOT_MB}m")  # fmt: skip
    shutil.rmtree(folder)
    return path


def _root(folder: Path, system: System) -> None:
    for name in ("usr/lib", "usr/bin", "etc"):
        (folder / name).mkdir(parents=True)
    (folder / "usr/lib/os-release").write_text(system.os_release)
    (folder / "etc/os-release").symlink_to("../usr/lib/os-release")
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, system.machine)
    (folder / "usr/bin" / system.python).write_bytes(header + bytes(4096))
    (folder / "usr/bin/python3").symlink_to(system.python)
    if system.cloud_init:
        (folder / "usr/bin/cloud-init").write_text("#!/usr/bin/python3\n")
    if system.preseed:
        (folder / "usr/bin/rpi-preseed").write_text("#!/bin/sh\n")
    if system.issue:
        (folder / "etc/rpi-issue").write_text(system.issue)


def _run(*words: str, data: bytes | None = None) -> None:
    env = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin", "MTOOLSRC": "/dev/null", "LC_ALL": "C"}
    done = subprocess.run(words, input=data or b"", capture_output=True, env=env, check=False)
    assert done.returncode == 0, (words, done.stderr)
