"""A job on a group from the command's side: run folder, ranks that are killed, snapshots."""

from __future__ import annotations

import os
import re
import signal
import threading

import numpy as np
import pytest
import torch
from command_line import TINY
from left_behind import Imports

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.tasks import weights
from edgetrain.training.servers import group
from edgetrain.training.servers.snapshots import latest

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("own_imports")]

# A task whose process gets a signal, a full disk or no numbers at one step of one rank, once.
DEADLY = (
    TINY
    + """

import os, resource, signal
from pathlib import Path


class Dropping(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.1))


class Deadly(Tiny):
    def model(self):
        return Dropping(3, self.width)

    def __init__(self, at=12, width=4, seed=0, mark="", what="SIGKILL"):
        super().__init__(width, seed)
        self.at, self.mark, self.what, self.member = at, mark, what, int(what != "full")

    def batches_from(self, member, members, batch, seed, start):
        for step, each in enumerate(self.batches(member, members, batch, seed)):
            if step < start:
                continue
            if step == self.at and member == self.member and not Path(self.mark).exists():
                Path(self.mark).touch()
                if self.what.startswith("SIG"):
                    os.kill(os.getpid(), getattr(signal, self.what))
                if self.what == "numberless":
                    each = (each[0] * float("nan"), *each[1:])
                if self.what == "mistake":
                    raise ValueError("one rank has a mistake")
                if self.what == "full":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
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
    return plan(job, folder), decide(question_of(resolve(job), folder)).found[0]


def model_of(folder, task):
    model = task.model()
    weights.load(model, folder / weights.FILE)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def run(folder, name, *words):
    out = folder / name
    out.mkdir()
    group.run(*planned(folder, f"data.mark={folder / 'mark'}", *words), out)
    return out


def trained(folder, out):
    return model_of(out, task_of(planned(folder, "data.mark=x")[0].job, folder))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of a run that nothing happens to, and what it trains."""
    folder, before = tmp_path_factory.mktemp("calm"), Imports()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        out = run(folder, "run", "data.at=99", "servers.snapshot_every=5")
        found = out, trained(folder, out)
    before.restore()
    return found


@pytest.fixture(scope="module")
def undisturbed(calm):
    return calm[1]


def test_a_rank_that_is_killed_costs_no_bits(tmp_path, undisturbed):
    out = run(tmp_path, "run")
    assert (tmp_path / "mark").exists()
    np.testing.assert_array_equal(trained(tmp_path, out), undisturbed)
    assert read_summary(out)["attempts"] == 2
    told = [r["reason"] for r in read_metrics(out, "event") if r["event"] == "error"]
    assert len(told) == 1
    assert told[0].startswith("r1 was killed; again, from step ")


def test_a_rank_that_is_stopped_is_said_and_costs_no_bits(tmp_path, undisturbed):
    out = run(tmp_path, "run", "data.what=SIGSTOP", "servers.hang_s=10")
    np.testing.assert_array_equal(trained(tmp_path, out), undisturbed)
    told = [(r["event"], r.get("about"), r["reason"]) for r in read_metrics(out, "event")]
    said = [reason for event, about, reason in told if (event, about) == ("stands", "r1")]
    assert said[0].startswith("no sign of life for ")
    assert said[0].endswith("after 10 s (servers.hang_s)")
    errors = [reason for event, _, reason in told if event == "error"]
    assert re.match(r"r1 hung for \d+ s; again, from step 1", errors[0])


def test_a_disk_that_fills_up_ends_in_a_line_and_the_run_goes_on_later(tmp_path, undisturbed):
    out = tmp_path / "run"
    with pytest.raises(
        EdgetrainError, match=r"cannot write .*model\.safetensors: .*free some space"
    ):
        run(tmp_path, "run", "data.what=full")
    assert read_summary(out)["status"] == "failed"
    assert latest(out)[0] in (10, 12), "the last is written while the disk fills up"
    group.run(*planned(tmp_path, f"data.mark={tmp_path / 'mark'}", "data.what=full"), out)
    np.testing.assert_array_equal(trained(tmp_path, out), undisturbed)


def test_a_loss_that_is_no_number_ends_the_run_before_its_step(tmp_path, undisturbed):
    out = tmp_path / "run"
    words = f"data.mark={tmp_path / 'mark'}", "data.what=numberless"
    with pytest.raises(EdgetrainError, match=r"loss is not finite in step 13.*smaller learning"):
        run(tmp_path, "run", *words)
    assert read_summary(out)["status"] == "failed"
    group.run(*planned(tmp_path, *words), out)
    np.testing.assert_array_equal(trained(tmp_path, out), undisturbed)


def test_a_run_that_another_job_cannot_go_on_with_stays_as_it_is(tmp_path, undisturbed):
    out = run(tmp_path, "run", "data.at=99", "steps=12", "servers.snapshot_every=12")
    job = (out / "job.toml").read_text()
    for word, said in {
        "data.width=5": "Size mismatch .*the job's model is another one than the run's",
        "optimizer=sgd": "'sgd' goes on from snapshots of 'adamw'.*optimizer=adamw, or a new run",
    }.items():
        with pytest.raises(EdgetrainError, match=said):
            group.run(*planned(tmp_path, "data.at=99", "data.mark=x", word), out)
        assert (out / "job.toml").read_text() == job
    group.run(*planned(tmp_path, "data.at=99", "data.mark=x"), out)
    assert load(out / "job.toml").train.steps == 20
    steps = [r["step"] for r in read_metrics(out, "step") if r["member"] == "r0"]
    assert steps == list(range(1, 21)), "none is taken twice"
    np.testing.assert_array_equal(trained(tmp_path, out), undisturbed)


def test_the_run_folder_says_what_was_planned_and_measured(calm):
    out, _ = calm
    summary = read_summary(out)
    assert summary["status"] == "finished"
    assert summary["attempts"] == 1
    assert summary["placement"] == "data=2"
    assert summary["measured_step_s"] > 0
    assert summary["predicted_step_s"] > 0
    assert summary["members"] == 2
    assert summary["sent_bytes"] > 0
    assert latest(out)[0] == 20
    assert len(list((out / "snapshots").iterdir())) == 2
    assert {r["member"] for r in read_metrics(out, "step")} == {"r0", "r1"}
    assert {r["event"] for r in read_metrics(out, "event")} >= {"started", "finished"}


def test_a_mistake_of_the_task_ends_the_run_at_once(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    _, found = planned(tmp_path, "data.mark=x", "data.at=99")
    poor = plan(load(None, ["task=deadly:Poor", "members=2", "steps=20"]), tmp_path)
    with pytest.raises(EdgetrainError, match="the task has a mistake"):
        group.run(poor, found, out)
    assert read_summary(out)["status"] == "failed"


def test_a_mistake_of_one_rank_is_none_of_its_peers(tmp_path):
    with pytest.raises(EdgetrainError, match=r"rank r1 of .*: ValueError: one rank has a mistake"):
        run(tmp_path, "run", "data.what=mistake")


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
