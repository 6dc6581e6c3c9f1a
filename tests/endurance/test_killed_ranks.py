"""A rank of a group killed with SIGKILL at a random moment: are the bits those of a quiet run?

A step is slowed to 20 ms at least: something to be killed in.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
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
TRIALS = int(os.environ.get("TRIALS", "10"))
BUSY = 2
PLACEMENT = "data=2 pipeline=2 microbatches=4"


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
    question = question_of(resolve(job), folder)
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


@pytest.fixture
def busy():
    """Processes that compute beside it."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    yield
    for each in found:
        each.kill()
        each.wait()


def test_a_group_whose_rank_is_killed_ends_with_the_same_bits(tmp_path, busy, printed, own_imports):
    (tmp_path / "slow.py").write_text(TASK)
    whole, _ = train(tmp_path, PLACEMENT, "whole", None)
    other, unhurt = [], 0
    for trial in range(TRIALS):
        after_s = random.Random(trial).uniform(0.0, 0.02 * STEPS)
        found, attempts = train(tmp_path, PLACEMENT, f"trial-{trial}", after_s)
        verdict = "exact" if found == whole else "OTHER BITS"
        printed(
            print, f"trial {trial}: killed after {after_s:.2f} s, {attempts} attempts, {verdict}"
        )
        unhurt += attempts == 1
        other += [trial] * (found != whole)
    assert not other
    assert unhurt < TRIALS
