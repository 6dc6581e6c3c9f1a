"""Boots a card under QEMU, which emulates a whole machine: Debian's own kernel and initramfs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import boot_card
import pi_worker
import twin_root

_AMD64 = boot_card.System(
    "qemu-amd64", "LABEL=rootfs",
    f"{boot_card.PACKAGES},linux-image-cloud-amd64,initramfs-tools,zstd",
)  # fmt: skip
# The kernel of both has the drivers of a Raspberry Pi. An emulated core is slow: ask less often.
_ARM64 = boot_card.System("qemu-arm64", "LABEL=rootfs", architecture="arm64", pause_s=20)
_TAP = ("-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no")
_VIRTIO = (
    "-nodefaults", "-serial", "stdio",
    "-device", "virtio-blk-pci,drive=d0",
    *_TAP, "-device", "virtio-net-pci,netdev=n0,romfile=",
    "-object", "rng-random,filename=/dev/urandom,id=r0", "-device", "virtio-rng-pci,rng=r0",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What QEMU emulates, and the system that boots on it."""

    system: boot_card.System
    program: str
    package: str
    words: tuple[str, ...]
    console: str
    tree: str = ""
    """The file that describes the board to the kernel, if QEMU has none of its own."""
    interface: str = "none,id=d0"
    card_bytes: int = 0
    """Of a card that has to have one of few sizes."""


MACHINES = {
    "amd64": Machine(
        _AMD64, "qemu-system-x86_64", "qemu-system-x86",
        ("-M", "q35", "-cpu", "Nehalem", "-smp", "2", "-m", "1536", *_VIRTIO), "ttyS0",
    ),
    "arm64": Machine(
        _ARM64, "qemu-system-aarch64", "qemu-system-arm",
        ("-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "1536", *_VIRTIO), "ttyAMA0",
    ),
    # A Raspberry Pi 3B: its own SD controller, a network adapter on its USB, 1 GiB, four cores.
    "raspi3b": Machine(
        _ARM64, "qemu-system-aarch64", "qemu-system-arm",
        ("-M", "raspi3b", "-serial", "stdio", *_TAP, "-device", "usb-net,netdev=n0"),
        "ttyAMA0,115200", twin_root.TREE, "sd", 4 << 30,
    ),
}  # fmt: skip


def missing(name: str) -> str:
    """Why this machine cannot be booted here; "" if it can."""
    machine = MACHINES[name]
    if not shutil.which(machine.program):
        return f"not installed: {machine.package}"
    why_not = boot_card.missing()
    if machine.system.is_foreign:
        why_not = why_not or pi_worker.why_not()
    return why_not


def runner(name: str, early: Path) -> Callable[[Path, str], list[str]]:
    """How `boot_card.Guest` starts a card. Emulates all instructions (TCG): KVM is not needed.

    early: a folder of what a machine's firmware would read from the card.
    """
    machine = MACHINES[name]
    tree = ["-dtb", str(early / machine.tree)] if machine.tree else []

    def run(card: Path, words: str) -> list[str]:
        if machine.card_bytes:
            os.truncate(card, machine.card_bytes)
        line = f"console={machine.console} root=LABEL=rootfs rootfstype=ext4 rw rootwait panic=-1"
        return [
            machine.program, *machine.words, "-accel", "tcg,thread=multi",
            "-display", "none", "-no-reboot", "-monitor", "none",
            "-kernel", str(early / "vmlinuz"), "-initrd", str(early / "initrd.img"), *tree,
            "-append", f"{line} systemd.log_color=0 {words}",
            "-drive", f"file={card},format=raw,if={machine.interface},cache=unsafe",
        ]  # fmt: skip

    return run
