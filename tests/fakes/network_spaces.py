"""Which network namespaces and processes an emulation has made, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def spaces(*pids: int) -> set[str]:
    """Return the network namespaces that these processes, or all processes, are in or hold open."""
    found = set()
    for process in [Path("/proc", str(pid)) for pid in pids] or Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.add(str((process / "ns/net").readlink()))
            found |= {
                str(fd.readlink())
                for fd in (process / "fd").iterdir()
                if "net:" in str(fd.readlink())
            }
    return found


def made_by(*pids: int) -> set[str]:
    """Return the network namespaces of these processes, without our own."""
    return spaces(*pids) - spaces(os.getpid())


def all_gone(made: set[str]) -> bool:
    """Wait until no process holds these namespaces; return whether that is so."""
    return wait_for(lambda: not spaces() & made)


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait until the condition holds or the time is over; return whether it holds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
