"""Where and on what a run ran: software, machine, and what this process has used of it.

What a board *can* do stands in a device profile; here is only what this machine says of itself.
Imports only the standard library at import, and never torch.
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import edgetrain

_PACKAGES = ("torch", "numpy", "pyzmq", "msgpack", "psutil")


def capture() -> dict[str, Any]:
    """Software and machine as JSON values; what cannot be found out is None.

    Versions are read from the installed packages without importing them.
    """
    import psutil

    return {
        "started": datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "edgetrain": edgetrain.__version__,
        "git": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "hostname": socket.gethostname(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "board": _text("/proc/device-tree/model").rstrip("\0") or None,
        "cpu": cpu_model(_text("/proc/cpuinfo")) or platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def git_commit() -> dict[str, Any] | None:
    """Commit and whether files differ from it, if edgetrain runs from a checkout of its own.

    A virtual environment inside somebody else's repository is no such checkout.
    """
    root = Path(edgetrain.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name out of /proc/cpuinfo, whose keys differ between architectures."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    for key in ("model name", "Model", "Hardware", "uarch"):
        if fields.get(key):
            return fields[key]
    # A 64-bit ARM kernel names no model, only who made the core and its part number.
    if "CPU part" in fields:
        return f"ARM implementer {fields.get('CPU implementer')} part {fields['CPU part']}"
    return None


def usable_cores() -> int:
    """Cores this process may run on, which a container or taskset can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Usage(Protocol):
    """What a process has used of its machine so far."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds."""

    @property
    def peak_bytes(self) -> int:
        """The largest resident set, or 0 where nobody knows."""


class Meter:
    """CPU seconds and peak memory of this process; cheap enough to ask after every step.

    cpu_s counts all threads, from the moment the Meter was made. peak_bytes is the largest resident
    set so far, pages shared with other processes included.
    """

    def __init__(self) -> None:
        self._cpu_at_start = time.process_time()
        peak = _peak_by_rusage()
        own = _peak_by_proc()
        # A program started by a bigger one inherits that one's peak in getrusage, not in /proc.
        self._inherited = peak if own is not None and own < peak else 0

    @property
    def cpu_s(self) -> float:
        """User and system seconds of this process since the Meter was made."""
        return time.process_time() - self._cpu_at_start

    @property
    def peak_bytes(self) -> int:
        """The largest resident set of this process so far, in bytes."""
        peak = _peak_by_rusage()
        return peak if peak > self._inherited else _peak_by_proc() or peak


def _peak_by_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_by_proc() -> int | None:
    for line in _text("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
