"""What a run leaves behind, where the model is, and a job that goes on from another's model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgetrain.errors import ConfigError
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics
from edgetrain.tasks import digits, weights
from edgetrain.tasks.flat import FlatModel
from edgetrain.training import emulated
from edgetrain.training.member.train import device_for
from edgetrain.training.simulated import simulation
from edgetrain.vectors.vector import checksum

JOB = ("steps=10", "members=2", "strategy=dga", "local_steps=2", "delay=2",
       "device=raspberry-pi-4b", "pace_s=0.001", "backend=none")  # fmt: skip


def bases(folder):
    return {
        record["reason"].split()[-1]
        for record in read_metrics(folder, "event")
        if record["event"] == "finished"
    }


def model_in(folder):
    model = digits().model()
    weights.load(model, folder / weights.FILE)
    return f"{checksum(FlatModel(model).params):016x}"


@pytest.mark.real
@pytest.mark.parametrize("run", [emulated.run, simulation.run], ids=["emulated", "simulated"])
def test_a_run_leaves_the_model_that_its_members_agree_on(tmp_path, run):
    run(plan(load(None, JOB)), tmp_path)
    assert bases(tmp_path) == {model_in(tmp_path)}
    run_on = tmp_path / "on"
    run_on.mkdir()
    run(plan(load(None, [*JOB, f"start={tmp_path / weights.FILE}", "lr=0"])), run_on)
    assert bases(run_on) == bases(tmp_path)


def test_batched_members_leave_the_same_file(tmp_path):
    simulation.run(plan(load(None, JOB)), tmp_path, batched=True)
    assert bases(tmp_path) == {model_in(tmp_path)}


def test_where_the_model_is():
    there = torch.cuda.is_available()
    assert device_for("cpu").type == "cpu"
    assert device_for("auto").type == ("cuda" if there else "cpu")
    assert device_for("auto", "example").type == "cpu"
    if not there:
        with pytest.raises(ConfigError, match="finds no GPU here"):
            device_for("cuda")
    with pytest.raises(ConfigError, match=r"train\.accelerator = 'gpu'"):
        resolve(load(None, ["accelerator=gpu"]))


def test_where_the_model_is_belongs_to_no_jobs_digest():
    job = load(None)
    assert job.digest() == load(None, ["accelerator=cpu", "start=x"]).digest()


def test_the_model_in_a_file_is_the_vector(tmp_path):
    model = digits().model()
    weights.save(model, tmp_path / weights.FILE)
    other = digits().model()
    weights.load(other, tmp_path / weights.FILE)
    np.testing.assert_array_equal(FlatModel(other).params, FlatModel(model).params)
