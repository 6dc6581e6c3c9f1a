"""Boots a card under QEMU, which emulates a whole machine: Debian's own kernel and initramfs."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import boot_card

KERNEL_PACKAGES = "linux-image-cloud-amd64,initramfs-tools,zstd"
SYSTEM = boot_card.System("qemu-amd64", "vda", f"{boot_card.PACKAGES},{KERNEL_PACKAGES}")
LACKING = {
    "arm64": "no worker archive of aarch64 packages is made by the tests",
    "raspi3b": "no worker archive of aarch64 packages is made by the tests, and no initramfs "
    "with the board's drivers",
}
"""Machines that are not booted yet, and why."""


def missing(machine: str) -> str:
    """Why this machine cannot be booted here; "" if it can."""
    if machine in LACKING:
        return f"{machine}: {LACKING[machine]}"
    if not shutil.which("qemu-system-x86_64"):
        return "not installed: qemu-system-x86"
    return boot_card.missing()


def kernel_of(tar: Path, folder: Path) -> tuple[Path, Path]:
    """The kernel and the initramfs of a root file system, unpacked into `folder`."""
    found = {}
    with tarfile.open(tar) as file:
        for entry in file:
            name = Path(entry.name).name
            if entry.isfile() and "boot/" in entry.name and name.startswith(("vmlinuz", "initrd")):
                content = file.extractfile(entry)
                assert content is not None
                path = folder / name.partition("-")[0]
                path.write_bytes(content.read())
                found[path.name] = path
    return found["vmlinuz"], found["initrd.img"]


def runner(kernel: Path, initrd: Path) -> Callable[[Path, str], list[str]]:
    """How `boot_card.Guest` starts a card. Emulates all instructions (TCG): KVM is not needed."""

    def run(card: Path, words: str) -> list[str]:
        line = (
            f"console=ttyS0 root=/dev/vda2 rootfstype=ext4 rw panic=-1 systemd.log_color=0 {words}"
        )
        return [
            "qemu-system-x86_64", "-M", "q35", "-cpu", "Nehalem", "-accel", "tcg,thread=multi",
            "-smp", "2", "-m", "1536", "-display", "none", "-no-reboot", "-nodefaults",
            "-serial", "stdio", "-monitor", "none",
            "-kernel", str(kernel), "-initrd", str(initrd), "-append", line,
            "-drive", f"file={card},format=raw,if=none,id=d0,cache=unsafe",
            "-device", "virtio-blk-pci,drive=d0",
            "-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no",
            "-device", "virtio-net-pci,netdev=n0,romfile=",
            "-object", "rng-random,filename=/dev/urandom,id=r0",
            "-device", "virtio-rng-pci,rng=r0",
        ]  # fmt: skip

    return run
