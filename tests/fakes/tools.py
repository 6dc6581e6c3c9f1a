"""The programs that some tests want, and what they would test."""

from __future__ import annotations

import shutil
from typing import NamedTuple


class Tool(NamedTuple):
    package: str
    program: str
    tests: str
    is_real: bool = False
    """Whether only `make test-real` wants it."""


TOOLS = (
    Tool("mtools", "mcopy", "cards and images: FAT"),
    Tool("e2fsprogs", "mke2fs", "cards and images: ext4"),
    Tool("fdisk", "sfdisk", "cards and images: partitions"),
    Tool("openssh-client", "ssh-keygen", "keys of hosts and of cards"),
    Tool("gcc-aarch64-linux-gnu", "aarch64-linux-gnu-gcc", "the kernels' NEON build"),
    Tool("libc6-dev-arm64-cross", "aarch64-linux-gnu-gcc", "the kernels' NEON build"),
    Tool("qemu-user-static", "qemu-aarch64-static", "the kernels' NEON build, run"),
    Tool("python3-argcomplete", "register-python-argcomplete", "completion", True),
    Tool("zsh", "zsh", "completion"),
    Tool("fish", "fish", "completion"),
    Tool("systemd", "systemd-analyze", "units"),
    Tool("iproute2", "ip", "networks emulated packet by packet", True),
    Tool("iputils-ping", "ping", "commands of the docs", True),
    Tool("user-mode-linux", "linux.uml", "the kernel's own tc", True),
    Tool("nginx-light", "nginx", "the dashboard behind a proxy", True),
)


def told(of_real: bool) -> list[str]:
    """Lines that name what is missing here, what it would test, and the command that installs it;
    none if nothing is missing. `of_real`: for `make test-real`."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    missing = [
        each for each in TOOLS
        if (of_real or not each.is_real) and not shutil.which(each.program, path=path)
    ]  # fmt: skip
    if not missing:
        return []
    lines = [f"not installed: {each.program:22} {each.tests}" for each in missing]
    packages = " ".join(each.package for each in missing)
    return ["Some tests are skipped:", *lines, f"apt-get install {packages}"]
