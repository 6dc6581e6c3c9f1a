"""A rank of a group killed with SIGKILL at a random moment: are the bits those of a quiet run?

    python benchmarks/killed_ranks.py [--trials 10] [--busy 2] [--placement "data=2 pipeline=2 …"]

Prints a line for each trial, and how many were exact. `--busy` processes compute beside it. The
exit status is 0 if all were. A step is slowed to 20 ms at least: something to be killed in.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.tasks import weights
from edgetrain.training.servers import group

TASK = """
import time
from edgetrain.tasks import char_lm
from edgetrain.tasks.text import CharLM


def slow(**options):
    task = char_lm(**options)
    found = task.batches_from

    def batches_from(*where):
        for each in found(*where):
            time.sleep(0.02)
            yield each

    task.batches_from = batches_from
    return task
"""
STEPS = 60


def ranks() -> list[int]:
    """Process ids of the ranks that train: children of the fork server that have a name."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.num_threads() > 1 and child.parent() != psutil.Process():
                found.append(child.pid)
    return found


def train(folder: Path, words: str, name: str, kill_after_s: float | None) -> tuple[bytes, int]:
    """Train, and kill one rank this long after the first step; the model's file, and attempts."""
    job = load(None, ["task=slow:slow", "data.limit_bytes=50000", "data.context=16",
                      "data.width=32", "data.layers=4", "members=4", "batch=4", f"steps={STEPS}",
                      "optimizer=adamw", "evaluate_every=1000", "servers.snapshot_every=10",
                      f"servers.placement={words}"])  # fmt: skip
    question = question_of(job, folder)
    out = folder / name
    out.mkdir()
    state = {"began": 0.0, "killed": kill_after_s is None}

    def watch() -> None:
        if state["killed"]:
            return
        if not state["began"] and any(True for _ in read_metrics(out, "step")):
            state["began"] = time.monotonic()
        if state["began"] and time.monotonic() - state["began"] >= (kill_after_s or 0):
            alive = ranks()
            if alive:
                os.kill(random.choice(alive), signal.SIGKILL)
                state["killed"] = True

    group.run(plan(job, folder), decide(question).found[0], out, watch, 0.01, question=question)
    return (out / weights.FILE).read_bytes(), int((read_summary(out) or {})["attempts"])


def main() -> int:
    """Run all trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--placement", default="data=2 pipeline=2 microbatches=4")
    arguments = parser.parse_args()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)
    ]
    exact = killed = 0
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "slow.py").write_text(TASK)
            whole, _ = train(folder, arguments.placement, "whole", None)
            for trial in range(arguments.trials):
                after_s = random.Random(trial).uniform(0.0, 0.02 * STEPS)
                began = time.monotonic()
                found, attempts = train(folder, arguments.placement, f"trial-{trial}", after_s)
                exact += found == whole
                killed += attempts > 1
                print(
                    f"trial {trial}: killed {after_s:.2f} s after the first step, {attempts} "
                    f"attempts, {time.monotonic() - began:.0f} s, "
                    f"{'exact' if found == whole else 'OTHER BITS'}",
                    flush=True,
                )
    finally:
        for each in busy:
            each.kill()
            each.wait()
    print(f"{arguments.placement}: {exact} of {arguments.trials} exact, {killed} restarted")
    return 0 if exact == arguments.trials else 1


if __name__ == "__main__":
    sys.exit(main())
