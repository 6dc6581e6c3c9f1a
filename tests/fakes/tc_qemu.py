"""Boots Debian's kernel under QEMU, to test real `tc` where user-mode-linux cannot run.

The files of this machine are its root, read-only (9p). A script runs in it as root, and its output
is returned. The guest's clock counts its instructions (`-icount`), so that a busy host makes it
slower, and changes no time that is measured in it. Packages: qemu-system-x86, busybox-static, and
Debian's kernel for amd64, unpacked into build/kernel (`make test-tc` does that).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import user_mode_linux

CHECKOUT = Path(__file__).resolve().parents[2]
KERNEL = CHECKOUT / "build" / "kernel"
_ROOT = ("virtio_pci", "9p", "9pnet_virtio")
_INIT = """#!/bin/busybox sh
bb() {{ /bin/busybox "$@"; }}
for module in {modules}; do bb insmod /$module.ko; done
bb mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 root /root
for kind in proc:proc sysfs:sys devtmpfs:dev tmpfs:run; do
  bb mount -t ${{kind%:*}} none /root/${{kind#*:}}
done
bb mkdir -p /root/run/netns /root/run/work
bb ip link set lo up
inside() {{
  bb chroot /root /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={checkout} \\
    PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run/work "$@" 2>&1
}}
# The clock runs on while a file is read for the first time: read what the script will start.
for each in kernel meter guard; do
  inside {python} -c "import edgetrain.fleet.networks.emulation.$each, edgetrain.fleet.networks"
done
inside sh -c 'for each in tc ip; do
  each=$(command -v $each); cat $each $(ldd $each | grep -o "/[^ ]*")
done > /dev/null'
echo GUEST-BEGIN
inside {python} {script}
echo GUEST-END $?
bb poweroff -f
"""


def why_not() -> str:
    """Return why it cannot be booted here, or ""."""
    for program, package in (
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("tc", "iproute2"),
        ("busybox", "busybox-static"),
    ):
        if shutil.which(program) is None:
            return f"package {package} is not installed"
    if not list(KERNEL.glob("boot/vmlinuz-*")):
        return "no kernel in build/kernel: make test-tc"
    return ""


def run(script: Path, folder: Path, seconds: float = 1700) -> tuple[int, str]:
    """Boot, run a Python script as root, halt. Return its exit status and output.

    `folder` is an empty folder of the caller.
    """
    (kernel,) = KERNEL.glob("boot/vmlinuz-*")
    command = [
        "qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-m", "512", "-nodefaults",
        "-accel", "tcg", "-icount", "shift=0,sleep=off",
        "-display", "none", "-serial", "stdio", "-no-reboot",
        "-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
        "-kernel", str(kernel), "-initrd", str(_initramfs(script, folder)),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
    ]  # fmt: skip
    console = folder / "console"
    with console.open("wb") as out:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    text = console.read_text(errors="replace").replace("\r", "")
    _, begun, rest = text.partition("GUEST-BEGIN\n")
    said, ended, status = rest.partition("GUEST-END ")
    if not begun or not ended:
        raise RuntimeError(f"QEMU's machine did not finish:\n{text[-2000:]}")
    return int(status.split()[0]), said


def _initramfs(script: Path, folder: Path) -> Path:
    """Pack busybox, the modules and an init script that ends on the root of this machine."""
    tree = folder / "initramfs"
    for name in ("bin", "root"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin" / "busybox")
    files = {path.stem.replace("-", "_"): path for path in KERNEL.rglob("*.ko")}
    modules: list[str] = []
    for name in (*_ROOT, *(Path(module).name for module in user_mode_linux.MODULES)):
        _with_needs(name, files, modules)
    for name in modules:
        shutil.copy(files[name], tree / f"{name}.ko")
    init = tree / "init"
    init.write_text(
        _INIT.format(
            modules=" ".join(modules), checkout=CHECKOUT, python=sys.executable, script=script
        )
    )
    init.chmod(0o755)
    packed = folder / "initramfs.cpio"
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with packed.open("wb") as file:
        subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"],
            input=names.encode(), cwd=tree, stdout=file, stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    return packed


def _with_needs(name: str, files: dict[str, Path], modules: list[str]) -> None:
    """Append a module after the modules that it depends on, by its own `depends=`."""
    if name in modules or name not in files:  # not there: it is in the kernel
        return
    found = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
    for need in (found[1].decode() if found else "").split(","):
        _with_needs(need.replace("-", "_"), files, modules)
    modules.append(name)
