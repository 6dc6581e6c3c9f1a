"""A run's environment: software, machine, and this process's use of it.

What a board *can* do is in a device profile; this is what the machine reports of itself. Versions
are read from installed packages: nothing is imported to learn them. Importing this module loads
only the standard library.
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

_PACKAGE = "edgetrain"
_PACKAGES = ("torch", "numpy", "pyzmq", "msgpack", "psutil", "safetensors")


def capture() -> dict[str, Any]:
    """Software and machine as JSON values; None for what this machine does not report."""
    import psutil

    return {
        "started": datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "edgetrain": version(),
        "git": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in _PACKAGES},
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


def utc(ago_s: float = 0.0) -> str:
    """The time of day in UTC this many seconds ago, ISO 8601 to the millisecond."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s)
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def version() -> str:
    """edgetrain's own version: as installed, else as the package says."""
    installed = _version_of(_PACKAGE)
    return installed or str(sys.modules[_PACKAGE].__version__)


def git_commit() -> dict[str, Any] | None:
    """The commit of edgetrain's own checkout, and whether files differ; None: it is installed."""
    root = Path(str(sys.modules[_PACKAGE].__file__)).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(changed)}


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name from the text of /proc/cpuinfo; its keys differ by architecture."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    for key in ("model name", "Model", "Hardware", "uarch"):
        if fields.get(key):
            return fields[key]
    # A 64-bit ARM kernel does not name the model, only the core's maker and part number.
    if "CPU part" in fields:
        return f"ARM implementer {fields.get('CPU implementer')} part {fields['CPU part']}"
    return None


def usable_cores() -> int:
    """Cores this process may run on; a container or taskset can allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, of its control group, and of its
    address space (`ulimit -v`)."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    most, used = _text(str(group / "memory.max")), _text(str(group / "memory.current"))
    if most.strip().isdigit() and used.strip().isdigit():
        free = min(free, max(0, int(most) - int(used)))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - psutil.Process().memory_info().vms))
    return free


class Usage(Protocol):
    """A process's use of its machine so far."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds."""

    @property
    def peak_bytes(self) -> int:
        """The largest resident set in bytes, or 0 if it is not known."""


class Meter:
    """CPU seconds and peak memory of this process; cheap enough to read after every step.

    cpu_s counts all threads since the Meter was made. peak_bytes is the largest resident set so
    far, including pages shared with other processes.
    """

    def __init__(self) -> None:
        self._cpu_at_start = time.process_time()
        peak = _peak_by_rusage()
        own = _peak_by_proc()
        # In getrusage (not in /proc) a process inherits the peak of the one that started it.
        self._inherited = peak if own is not None and own < peak else 0

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu_at_start

    @property
    def peak_bytes(self) -> int:
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


def _version_of(package: str) -> str | None:
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
