"""The worker archive for Raspberry Pi OS 12, made as its user makes it. Fetches 120 MB at first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def why_not() -> str:
    """Why it cannot be made here; "" if it can."""
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    return "" if compiler else "not installed: gcc-aarch64-linux-gnu"


def make(out: Path) -> None:
    """Make the archive. AssertionError with what `edgetrain devices worker` said."""
    words = ["devices", "worker", "--for", "raspberry-pi-os-12", "-o", str(out)]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-m", "edgetrain", *words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
