"""What a member weighs: modules and lines of edgetrain that it loads, its memory, seconds to start.

    python benchmarks/weight.py [--elements 10000] [--starts 5]

Starts a hub and one member of task `sized` (a model of that size, no data) several times, and in
turns with it an interpreter that only imports torch. Prints medians. Start: seconds from the
process's start until the hub has let the member in. CPU seconds and memory (the most that was
resident) are of its whole life, 20 steps. Files and lines: those of edgetrain that are loaded at
its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

from command_line import EDGETRAIN, environment, hub

REPORT = """
import json, resource, sys
files = [module.__file__ for name, module in list(sys.modules.items())
         if name.split(".")[0] == "edgetrain" and module.__file__]
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"files": len(files), "lines": sum(len(open(each).readlines()) for each in files),
                  "cpu_s": used.ru_utime + used.ru_stime, "mb": used.ru_maxrss * 1024e-6}))
"""
TORCH = f"import torch\nprint('training as nobody', flush=True){REPORT}"
MEMBER = f"import sys\nfrom edgetrain.__main__ import main\nassert main(sys.argv[1:]) == 0{REPORT}"


def weigh(program: str, words: Sequence[str], cwd: Path) -> dict[str, float]:
    """Run a program that says `training as` when it has started, and the JSON above at its end."""
    began, ready = time.monotonic(), None
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if ready is None and line.startswith("training as"):
                ready = time.monotonic() - began
    assert process.returncode == 0
    assert ready is not None
    return {"start_s": ready, **json.loads(line)}


def main() -> None:
    """Measure in turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=5)
    args = parser.parse_args()
    job = ["members=1", "steps=20", "task=edgetrain.tasks:sized", f"data.elements={args.elements}"]
    weights: dict[str, list[dict[str, float]]] = {"import torch": [], "member": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(args.starts):
            weights["import torch"].append(weigh(TORCH, [], folder))
            with hub(*job, cwd=folder, program=EDGETRAIN) as (command, address):
                words = ["member", *job, "--hub", address, "--index", "0"]
                weights["member"].append(weigh(MEMBER, words, folder))
                command.finish()
    print(f"{'':12}  start  CPU seconds  memory  files  lines")
    for what, rows in weights.items():
        half = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"{what:12} {half['start_s']:4.2f} s  {half['cpu_s']:9.2f} s  {half['mb']:3.0f} MB"
            f"  {half['files']:5.0f}  {half['lines']:5,.0f}"
        )


if __name__ == "__main__":
    main()
