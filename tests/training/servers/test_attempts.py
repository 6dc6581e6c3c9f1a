"""A job on a group from the command's side: run folder, ranks that are killed, snapshots."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch
from command_line import TINY

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.placement.question import plan_placement
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.tasks import weights
from edgetrain.training.servers import group
from edgetrain.training.servers.snapshots import latest

pytestmark = pytest.mark.usefixtures("own_imports")

# A task that kills its own process at one step of one rank, once.
DEADLY = (
    TINY
    + """

import os, signal
from pathlib import Path


class Deadly(Tiny):
    def __init__(self, at=12, width=4, seed=0, mark=""):
        super().__init__(width, seed)
        self.at, self.mark, self.taken = at, mark, 0

    def batches_from(self, member, members, batch, seed, start):
        for step, each in enumerate(self.batches(member, members, batch, seed)):
            if step < start:
                continue
            if step == self.at and member == 1 and not Path(self.mark).exists():
                Path(self.mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield each


class Poor(Tiny):
    def loss(self, model, batch):
        raise ValueError("the task has a mistake")
"""
)


def planned(folder, *words):
    (folder / "deadly.py").write_text(DEADLY)
    job = load(None, ["task=deadly:Deadly", "members=2", "steps=20", "evaluate_every=20",
                      "servers.placement=data=2", "optimizer=adamw", *words])  # fmt: skip
    return plan(job, folder), plan_placement(job, folder).found[0]


def model_of(folder, task):
    model = task.model()
    weights.load(model, folder / weights.FILE)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def run(folder, name, *words):
    out = folder / name
    out.mkdir()
    group.run(*planned(folder, f"data.mark={folder / 'killed'}", *words), out)
    return out


def test_a_rank_that_is_killed_costs_no_bits(tmp_path):
    from edgetrain.jobs.lookup import task_of

    killed = run(tmp_path, "killed-run")
    assert (tmp_path / "killed").exists()
    whole = run(tmp_path, "whole-run")
    job = planned(tmp_path, "data.mark=x")[0].job
    task = task_of(job, tmp_path)
    np.testing.assert_array_equal(model_of(killed, task), model_of(whole, task))
    assert [read_summary(each)["attempts"] for each in (killed, whole)] == [2, 1]
    told = [r["reason"] for r in read_metrics(killed, "event") if r["event"] == "error"]
    assert len(told) == 1
    assert told[0].startswith("r1 was killed; again, from step ")
    assert {r["event"] for r in read_metrics(whole, "event")} >= {"started", "finished"}


def test_the_run_folder_says_what_was_planned_and_measured(tmp_path):
    out = run(tmp_path, "run", "data.at=99", "servers.snapshot_every=5")
    summary = read_summary(out)
    assert summary["status"] == "finished"
    assert summary["placement"] == "data=2"
    assert summary["measured_step_s"] > 0
    assert summary["predicted_step_s"] > 0
    assert summary["members"] == 2
    assert summary["sent_bytes"] > 0
    assert latest(out)[0] == 20
    assert len(list((out / "snapshots").iterdir())) == 2
    assert {r["member"] for r in read_metrics(out, "step")} == {"r0", "r1"}


def test_a_run_goes_on_from_its_snapshot(tmp_path):
    out = run(tmp_path, "run", "data.at=99", "steps=10", "servers.snapshot_every=10")
    assert latest(out)[0] == 10
    group.run(*planned(tmp_path, "data.at=99", "data.mark=x"), out)
    steps = [r["step"] for r in read_metrics(out, "step") if r["member"] == "r0"]
    assert steps == list(range(1, 21)), "none is taken twice"


def test_a_mistake_of_the_task_ends_the_run_at_once(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    _, found = planned(tmp_path, "data.mark=x", "data.at=99")
    poor = plan(load(None, ["task=deadly:Poor", "members=2", "steps=20"]), tmp_path)
    with pytest.raises(EdgetrainError, match="the task has a mistake"):
        group.run(poor, found, out)
    assert read_summary(out)["status"] == "failed"


def test_ctrl_c_leaves_no_process_and_a_readable_folder(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    job, found = planned(tmp_path, "data.mark=x", "data.at=999", "steps=100000")

    def watch():
        if any(True for _ in read_metrics(out, "step")):
            os.kill(os.getpid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        group.run(job, found, out, watch)
    assert read_summary(out)["status"] == "interrupted"


def test_a_disk_that_takes_no_snapshot_is_one_clear_line(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "snapshots").write_text("in the way")
    with pytest.raises(EdgetrainError, match=r"cannot write a snapshot to .*snapshots"):
        group.run(*planned(tmp_path, "data.mark=x", "data.at=99"), out)
