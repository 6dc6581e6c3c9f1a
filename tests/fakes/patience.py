"""How long a test of something real waits: its seconds on an idle machine, times how much slower
this one was measured to be when the run began (`make test-real`)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

_CPU_S, _FORK_S = 0.107, 0.044
"""Of the yardsticks, on two idle cores."""
_VARIABLE = "EDGETRAIN_PATIENCE"
_LONGEST = 30.0


def patience(seconds: float) -> float:
    """Seconds that a test may wait for what takes `seconds` on an idle machine."""
    return seconds * float(os.environ.get(_VARIABLE, "1"))


def measure() -> str:
    """Measure this machine once, for this process and those that it starts; returns the line that
    says so. A CPU yardstick (hashing) and a fork yardstick (processes that end at once): the slower
    one counts."""
    began = time.monotonic()
    for _ in range(160):
        hashlib.sha256(bytes(1 << 20)).digest()
    hashed = time.monotonic()
    for _ in range(20):
        subprocess.run(["/bin/true"], check=True)
    cpu, fork = (hashed - began) / _CPU_S, (time.monotonic() - hashed) / _FORK_S
    factor = min(_LONGEST, max(1.0, cpu, fork))
    os.environ[_VARIABLE] = f"{factor:.2f}"
    return (
        f"deadlines x {factor:.1f}: this machine takes {cpu:.1f} x the CPU yardstick and "
        f"{fork:.1f} x the fork yardstick; {load()}"
    )


def load() -> str:
    """The load beside a test."""
    return f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
