"""Seconds per step: one value in table, live view and picture, and parts that add up."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from command_line import edgetrain, write_tiny

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics, read_summary
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import text
from edgetrain.runs.reports.live.plain import plain_line
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.training.simulated import simulation

PARTS = ("compute_s", "wait_s", "overhead_s", "eval_s", "end_s")


def parts(record):
    return sum(record.get(key) or 0.0 for key in PARTS)


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg", "dga"])
def test_the_parts_of_a_step_add_up_and_everything_shows_the_same(strategy, tmp_path):
    delay = 20 if strategy == "dga" else 0
    words = ["members=3", "network=wan-200ms", "pace_s=0.02", "steps=40", "batch=2", "final_sync=0"]
    job = reading.load(None, [*words, f"strategy={strategy}", f"delay={delay}"])
    folder = create(tmp_path, "run")
    summary = simulation.run(plan(job), folder)
    assert sum(summary[key] for key in PARTS) == pytest.approx(
        summary["seconds_per_step"], rel=0.01
    )
    assert (summary["end_s"] > 0) == (strategy == "dga"), "only there replies are outstanding"
    (row,) = compare([summary]).rows
    assert row.seconds_per_step == summary["seconds_per_step"]
    shown = units.duration(summary["seconds_per_step"])
    assert shown in text(compare([summary]))
    watch = FolderWatch(folder)
    watch.read()
    assert f"{shown}/step" in plain_line(watch.state())
    members = watch.data.members.values()
    bars = [sum(member.parts) for member in members]
    assert sum(bars) / len(bars) == pytest.approx(summary["seconds_per_step"], rel=0.01)


SLOW_TO_EVALUATE = """
import time
from tiny import Tiny as Plain


class Tiny(Plain):
    def evaluate(self, model):
        time.sleep(0.02)
        return super().evaluate(model)
"""


@pytest.mark.real
def test_evaluations_are_a_part_of_their_own(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_TO_EVALUATE)
    (tmp_path / "job.toml").write_text('task = "slow:Tiny"\n')
    words = ("run", "job.toml", "members=2", "steps=60", "evaluate_every=3", "--json")
    done = edgetrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    summary = read_summary(folder)
    assert summary is not None
    assert summary["eval_s"] > 0.02 * 20 / 60 / 2
    for name in ("m0", "m1"):
        lines = [r for r in read_metrics(folder, "step") if r["member"] == name]
        took = [later["t"] - sooner["t"] for sooner, later in itertools.pairwise(lines)]
        # A line is written a moment after its step; without evaluations 0.4 s would be missing.
        assert sum(map(parts, lines[1:])) == pytest.approx(sum(took), abs=0.15)
        assert any(r.get("eval_s") for r in lines) == (name == "m0")
