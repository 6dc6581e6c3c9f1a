"""Boots Debian's user-mode-linux, as an ordinary user, to test real `tc` on kernels without it.

The files of this machine are its root, read-only. A script runs in it as root, and its output is
returned. Package: user-mode-linux (apt-get install user-mode-linux). Boots in about five seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import held

MODULES = (
    "drivers/net/veth",
    "drivers/net/ifb",
    "drivers/net/macsec",
    *("net/llc/llc", "net/802/stp", "net/802/garp", "net/802/mrp", "net/8021q/8021q"),
    "net/sched/sch_netem",
    "net/sched/sch_prio",
    "net/sched/sch_tbf",
    "net/sched/sch_ingress",
    "net/sched/cls_flower",
    "net/sched/act_mirred",
)

_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={checkout} PYTHONDONTWRITEBYTECODE=1
export TMPDIR=/run/work
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /run
mkdir -p /run/netns /run/work
cd /run/work
{python} {here} insert
ip link set lo up
echo UML-BEGIN
{python} {script} 2>&1
echo UML-END $?
{python} {here} halt
"""


def why_not() -> str:
    """Return why it cannot be booted here, or ""."""
    if shutil.which("linux.uml") is None:
        return "package user-mode-linux is not installed"
    if shutil.which("tc") is None:
        return "package iproute2 is not installed"
    if not _interpreter():
        return "no Python 3.11 that an ordinary user may run"
    return ""


_ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def _interpreter() -> str:
    """Return a Python that an ordinary user may run, or "". Root's home is closed to others."""
    drop = _ORDINARY if os.geteuid() == 0 else ()
    for program in (sys.executable, "/usr/bin/python3"):
        test = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            # Through a shell: setpriv itself still has the rights to read closed folders.
            command = [*drop, "sh", "-c", 'exec "$0" -c "$1"', program, test]
            trial = subprocess.run(command, capture_output=True, check=False)
        except OSError:
            continue
        if trial.returncode == 0:
            return program
    return ""


def run(script: Path, folder: Path, seconds: float = 280) -> tuple[int, str]:
    """Boot, run a Python script as root, halt. Return its exit status and output.

    `folder` is an empty folder of the caller. If we are root, another user boots. Skips the test
    where the processor has registers that this kernel cannot save (AMX).
    """
    checkout = Path(__file__).resolve().parents[2]
    init = folder / "init.sh"
    here = Path(__file__).resolve()
    init.write_text(
        _INIT.format(checkout=checkout, python=_interpreter(), here=here, script=script), "utf-8"
    )
    init.chmod(0o755)
    folder.chmod(0o777)
    command = [
        "linux.uml",
        "mem=256M",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "quiet",
        "con=null",
        "con0=null,fd:1",
        f"init={init}",
    ]
    if os.geteuid() == 0:
        command = held.held([*_ORDINARY, *command])
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        check=False,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)},
    )
    text = done.stdout.decode(errors="replace").replace("\r", "")
    _, begun, rest = text.partition("UML-BEGIN\n")
    said, ended, status = rest.partition("UML-END ")
    if failed := re.search(r"userspace - ptrace .* failed", text):
        import pytest  # not there inside

        pytest.skip(f"user-mode-linux does not run on this processor: {failed[0]}")
    if not begun or not ended:
        raise RuntimeError(f"user-mode-linux did not finish:\n{text[-2000:]}")
    return int(status.split()[0]), said


def _insert_modules() -> None:
    """Load the modules (finit_module; there is no modprobe for this kernel's folder)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    (kernel,) = Path("/usr/lib/uml/modules").glob("*/kernel")
    for name in MODULES:
        fd = os.open(kernel / f"{name}.ko", os.O_RDONLY)
        if libc.syscall(313, fd, b"", 0):
            print(f"{name}: {os.strerror(ctypes.get_errno())}")
        os.close(fd)


def _halt() -> None:
    import ctypes

    ctypes.CDLL(None).reboot(0x4321FEDC)


if __name__ == "__main__":
    {"insert": _insert_modules, "halt": _halt}[sys.argv[1]]()
