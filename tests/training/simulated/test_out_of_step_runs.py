"""Fleets out of step, simulated: repeatable by seed, and how old contributions were is reported."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.runs.reports.live.frame import run_table
from edgetrain.runs.reports.live.watch import FolderWatch
from edgetrain.training.simulated import simulation

WORDS = (
    "members=4", "device=raspberry-pi-4b:2, raspberry-pi-zero-2w:2",
    "network=wan-200ms", "steps=40", "local_steps=5", "evaluate_every=40",
)  # fmt: skip


def trained(folder, name, strategy, *words):
    inside = create(folder, name)
    job = reading.load(None, [*WORDS, f"strategy={strategy}", *words])
    return simulation.run(plan(job), inside), inside


def told(inside):
    """What every round was made of, and when."""
    return [
        (r["round"], r["members"], r["ages"], r["weight"], r["t"])
        for r in read_metrics(inside, "round")
    ]


@pytest.mark.parametrize("strategy", ["fedbuff(2, 0.5)", "ssp(2)", "async-sgd(5)"])
def test_a_seed_gives_the_same_rounds_again(tmp_path, strategy):
    runs = [trained(tmp_path, name, strategy) for name in ("first", "second")]
    (first, one), (second, two) = runs
    assert told(one) == told(two)
    assert first["final"] == second["final"]
    assert first["seconds"] == second["seconds"]
    ages = [r["ages"] for r in read_metrics(one, "round")]
    assert all(0 <= middle <= most for middle, most in ages)
    assert first["ages"] == [ages[-1][0], max(most for _, most in ages)]
    assert first["ages"][1] > 0, "some wait for a reply to what others have moved on from"
    rounds = [r["round"] for r in read_metrics(one, "round")]
    assert all(after == before + 1 for before, after in pairwise(rounds))


def test_the_live_table_has_ages_out_of_step_only(tmp_path):
    for strategy, shown in (("fedbuff(2, 0.5)", True), ("fedavg", False)):
        summary, inside = trained(tmp_path, strategy[:6], strategy)
        watch = FolderWatch(inside)
        watch.read()
        table = run_table([watch.state()], 200).plain
        assert ("age, most" in table) == shown == ("ages" in summary)
        assert not shown or "{}, {}".format(*summary["ages"]) in table
