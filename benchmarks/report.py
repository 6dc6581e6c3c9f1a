"""What a report costs: runs are simulated, and `edgetrain report` makes a page of each.

    python benchmarks/report.py                      8 members x 400 steps, 1,000 x 100
    python benchmarks/report.py --fleets 8x400       the small one

Prints the page's size, and the seconds, processor seconds and memory of the whole command, Python's
start included. On a busy machine processor seconds say more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EDGETRAIN = (sys.executable, "-m", "edgetrain")


def measure(fleet: str, folder: Path) -> dict[str, Any]:
    """Simulate a fleet like "8x400", members x steps, and report it; what the report took."""
    members, steps = fleet.split("x")
    words = [f"members={members}", f"steps={steps}", "batch=2", "device=raspberry-pi-4b"]
    words += ["network=wan-200ms", "optimizer={ name = 'sgd', lr = 0.05 }"]
    subprocess.run(
        [*EDGETRAIN, "run", "--simulate", *words, "--json"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (run,) = (folder / "runs").iterdir()
    page = folder / "report.html"
    began = time.perf_counter()
    process = subprocess.Popen(
        [*EDGETRAIN, "report", str(run), "-o", str(page)], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"edgetrain report {run} failed")
    return {
        "fleet": fleet,
        "metrics_bytes": (run / "metrics.jsonl").stat().st_size,
        "page_bytes": page.stat().st_size,
        "seconds": time.perf_counter() - began,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def main() -> None:
    """Measure the fleets that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", default="8x400,1000x100", help="members x steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each")
    arguments = parser.parse_args()
    if not arguments.json:
        print("     fleet  metrics     page  seconds    CPU  memory")
    for fleet in arguments.fleets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(fleet, Path(folder))
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        print(
            f"{fleet:>10}  {found['metrics_bytes'] / 1e6:4.1f} MB  "
            f"{found['page_bytes'] / 1e3:4.0f} kB  {found['seconds']:5.1f} s "
            f"{found['cpu_s']:4.1f} s  {found['peak_bytes'] / 1e6:3.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
