"""Which network namespaces and processes an emulation has made, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def spaces(*pids: int) -> set[str]:
    """Network namespaces that these processes, or any of this machine, stand in or hold open."""
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
    """Network namespaces of these processes that are not ours: other tests have theirs."""
    return spaces(*pids) - spaces(os.getpid())


def all_gone(made: set[str]) -> bool:
    """Whether nobody holds these namespaces any more."""
    return wait_for(lambda: not spaces() & made)


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Other processes end in their own time; look until they have."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
