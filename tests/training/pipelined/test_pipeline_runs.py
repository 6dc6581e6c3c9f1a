"""Whole runs of pipelines over members: processes, one of which is killed, and virtual time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fakes.pipeline_task import assert_trained

from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.runs.reports.comparison import compare
from edgetrain.training import emulated
from edgetrain.training.pipelined.planning import plan_stages
from edgetrain.training.pipelined.simulated import step_seconds
from edgetrain.training.simulated import simulation

WORDS = (
    "task=fakes.pipeline_task:rows", "members=4", "batch=6", "steps=6", "strategy=sync-sgd",
    "hub.snapshot_every=2", "fleet.placement=pipeline=4 microbatches=6 cuts=1,3,4",
)  # fmt: skip


def events(folder) -> list[str]:
    lines = [line for line in read_metrics(folder) if line["kind"] == "event"]
    return [f"{line.get('about', line['member'])} {line['event']}" for line in lines]


@pytest.mark.real
def test_a_stage_that_is_killed_starts_again_and_the_bits_are_the_same(tmp_path):
    words = (*WORDS, f"data.dies={tmp_path / 'died'}", "data.at=20", "fleet.backend=none")
    found = plan(load(None, words))
    folder = tmp_path / "run"
    folder.mkdir()
    summary = emulated.run(found, folder)
    assert (tmp_path / "died").exists()
    assert summary["status"] == "finished"
    assert {"m2 gone", "hub back"} <= set(events(folder))
    assert_trained(folder, found.job, 6)
    assert not (folder / "stages").exists()


@pytest.mark.parametrize("faults", ["[]", "[{kind='down', at_s=0.9, for_s=25.0, members=[2]}]"])
def test_a_simulated_pipeline_has_the_bits_and_takes_as_long_as_planned(tmp_path, faults):
    words = (*WORDS, "network=wan-100ms", "device=raspberry-pi-4b", f"faults={faults}")
    found = plan(load(None, words))
    summary = simulation.run(found, tmp_path)
    assert summary["status"] == "finished"
    assert_trained(tmp_path, found.job, 6)
    ends = [line["t"] for line in read_metrics(tmp_path)
            if line["kind"] == "step" and line["member"] == "m3"]  # fmt: skip
    if faults != "[]":
        assert "hub back" in events(tmp_path)
        return
    # Six trips a step, and what little is computed; handshakes and slow start are before it.
    took = [after - before for before, after in itertools.pairwise(ends)]
    assert all(0.6 < each < 0.7 for each in took)
    assert step_seconds(replace(found, stages=plan_stages(found))) == pytest.approx(took[-1], 0.03)
    assert summary["strategy"] == "sync-sgd | pipeline=4 microbatches=6 cuts=1,3,4"
    (remark,) = [each for each in compare([summary]).notes if "wait" in each]
    assert "trips through all stages" in remark


def test_a_device_without_a_speed_is_not_simulated(tmp_path):
    with pytest.raises(ConfigError, match="device 'host' has no speed"):
        simulation.run(plan(load(None, [*WORDS, "network=wan-100ms"])), tmp_path)
