"""Whole runs of pipelines over members: processes, one of which is killed, and virtual time."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file

from edgetrain.errors import ConfigError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks.work import optimizer_for
from edgetrain.training import emulated
from edgetrain.training.servers.steps import batches_of
from edgetrain.training.simulated import simulation

WORDS = (
    "task=fakes.pipeline_task:rows", "members=4", "batch=6", "steps=6", "strategy=sync-sgd",
    "hub.snapshot_every=2", "fleet.placement=pipeline=4 microbatches=6 cuts=1,3,4",
)  # fmt: skip


def one_process(job) -> dict[str, torch.Tensor]:
    """What one process trains in the same steps, with six micro-batches in each."""
    task = task_of(job)
    torch.manual_seed(job.seed)
    model, batches = task.model(), batches_of(task, job, 1, 0)
    optimizer = optimizer_for(model, job.train.optimizer)
    for _ in range(job.train.steps):
        for micro in zip(*[tensor.tensor_split(6) for tensor in next(batches)], strict=True):
            (task.loss(model, micro) / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_trained(folder, job) -> None:
    found, expected = load_file(folder / "model.safetensors"), one_process(job)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def events(folder) -> list[str]:
    lines = [line for line in read_metrics(folder) if line["kind"] == "event"]
    return [f"{line.get('about', line['member'])} {line['event']}" for line in lines]


def test_a_stage_that_is_killed_starts_again_and_the_bits_are_the_same(tmp_path):
    words = (*WORDS, f"data.dies={tmp_path / 'died'}", "data.at=20", "fleet.backend=none")
    found = plan(load(None, words))
    folder = tmp_path / "run"
    folder.mkdir()
    summary = emulated.run(found, folder)
    assert (tmp_path / "died").exists()
    assert summary["status"] == "finished"
    assert {"m2 gone", "hub back"} <= set(events(folder))
    assert_trained(folder, found.job)
    assert not (folder / "stages").exists()


@pytest.mark.parametrize("faults", ["[]", "[{kind='down', at_s=0.9, for_s=25.0, members=[2]}]"])
def test_a_simulated_pipeline_has_the_bits_and_takes_as_long_as_planned(tmp_path, faults):
    words = (*WORDS, "network=wan-100ms", "device=raspberry-pi-4b", f"faults={faults}")
    found = plan(load(None, words))
    summary = simulation.run(found, tmp_path)
    assert summary["status"] == "finished"
    assert_trained(tmp_path, found.job)
    ends = [line["t"] for line in read_metrics(tmp_path)
            if line["kind"] == "step" and line["member"] == "m3"]  # fmt: skip
    if faults != "[]":
        assert "hub back" in events(tmp_path)
        return
    # Six trips a step, and what little is computed; handshakes and slow start are before it.
    assert all(0.6 < after - before < 0.7 for before, after in itertools.pairwise(ends))


def test_a_device_without_a_speed_is_not_simulated(tmp_path):
    with pytest.raises(ConfigError, match="device 'host' has no speed"):
        simulation.run(plan(load(None, [*WORDS, "network=wan-100ms"])), tmp_path)
