"""What a page of `edgetrain report` costs: its size, and what the whole command takes.

Fleets of members x steps are simulated, then reported. On a busy machine processor seconds say
more than those of the clock, in which Python's start is, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Measured, measure

EDGETRAIN = (sys.executable, "-m", "edgetrain")
FLEETS = ((8, 400), (1000, 100))


def reported(run: Path, page: Path) -> dict[str, float]:
    """Make the page of a run."""
    began = time.perf_counter()
    words = [*EDGETRAIN, "report", str(run), "-o", str(page), "--force"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"edgetrain report {run} failed")
    return {
        "metrics, MB": (run / "metrics.jsonl").stat().st_size / 1e6,
        "page, kB": page.stat().st_size / 1e3,
        "seconds": time.perf_counter() - began,
        "CPU seconds": used.ru_utime + used.ru_stime,
        "memory, MB": used.ru_maxrss * 1024 / 1e6,
    }


def measured() -> Iterator[Measured]:
    """Simulate fleets and report them."""
    for members, steps in FLEETS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = [f"members={members}", f"steps={steps}", "batch=2", "device=raspberry-pi-4b"]
            words += ["network=wan-200ms", "optimizer={ name = 'sgd', lr = 0.05 }"]
            simulate = [*EDGETRAIN, "simulate", *words, "--json"]
            subprocess.run(simulate, cwd=folder, check=True, capture_output=True)
            (run,) = (folder / "runs").iterdir()
            page = folder / "report.html"
            yield measure(f"{members} members x {steps} steps", lambda: reported(run, page), 5)  # noqa: B023
