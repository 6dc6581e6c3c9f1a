"""A hub and stages on machines of their own: processes with keys, which are killed."""

from __future__ import annotations

import contextlib
import shutil
import signal

import pytest
from command_line import Running, edgetrain, running
from fakes import pipeline_task
from hub_runs import free_port, hub_folder, keys, wait_for_rounds

from edgetrain.files.toml import to_toml
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics, read_summary

pytestmark = pytest.mark.real

JOB = {
    "task": "rows:rows",
    "fleet": {"members": 4, "placement": "pipeline=4 microbatches=6 cuts=1,3,4", "pace_s": 0.02},
    "train": {"steps": 30, "batch": 6, "evaluate_every": 10},
    "strategy": {"name": "sync-sgd"},
    "hub": {"snapshot_every": 5, "heartbeat_s": 0.1},
}


class Fleet:
    """The hub and the members of the job, each with keys of its own."""

    def __init__(self, cwd, stack: contextlib.ExitStack) -> None:
        self.cwd, self._stack = cwd, stack
        (cwd / "job.toml").write_text(to_toml(JOB))
        shutil.copy(pipeline_task.__file__, cwd / "rows.py")
        self.address = f"tcp://127.0.0.1:{free_port()}"
        names = [f"d{index}" for index in range(4)]
        self._keys = [keys(cwd, name) for name in names]
        self._hub_keys = keys(cwd, "hub", *names)
        self.public = (cwd / "hub" / "key").read_text().split("public ")[1].split()[0]
        self.hub = self.start_hub("job.toml")

    def start(self, *words: str) -> Running:
        return self._stack.enter_context(running(*words, cwd=self.cwd))

    def start_hub(self, *words: str) -> Running:
        hub = self.start("hub", *words, "--bind", self.address, *self._hub_keys)
        hub.until("encrypted")
        return hub

    def start_member(self, index: int) -> Running:
        return self.start(
            "member", "job.toml", "--hub", self.address, "--hub-key", self.public,
            "--index", str(index), "--runs", f"m{index}", *self._keys[index],
        )  # fmt: skip


def test_hubs_and_stages_that_are_killed_change_no_bit(tmp_path):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        folder = hub_folder(tmp_path)
        members = [fleet.start_member(index) for index in range(4)]
        wait_for_rounds(folder, 1)
        paused, stopped = (
            edgetrain("control", str(folder), word, cwd=tmp_path) for word in ("pause", "stop")
        )
        assert paused.returncode == 0, paused.stderr
        assert "4 members are in" in paused.stdout
        assert "stop: a stage of a pipeline has a part of the model alone" in stopped.stderr
        members[2].process.kill()
        members[2].finish()
        members[2] = fleet.start_member(2)
        fleet.hub.until("back")
        assert edgetrain("control", str(folder), "resume", cwd=tmp_path).returncode == 0
        for ends, number in ((2, signal.SIGKILL), (4, signal.SIGTERM)):
            wait_for_rounds(folder, ends)
            fleet.hub.process.send_signal(number)
            assert fleet.hub.finish() == (-number if number == signal.SIGKILL else 128 + number)
            fleet.hub = fleet.start_hub("--resume", str(folder))
            assert int(fleet.hub.said.split("resumed after ")[1].split()[0]) >= 5 * ends
        assert [each.finish() for each in members] == [0] * 4, [each.said for each in members]
        assert fleet.hub.finish() == 0, fleet.hub.said
    (trained,) = (tmp_path / "m0").iterdir()
    job = load(tmp_path / "job.toml", ["task=fakes.pipeline_task:rows"])
    pipeline_task.assert_trained(trained, job, 6)
    summary, figures = read_summary(folder), list(read_metrics(trained, "eval"))
    assert summary["status"] == "finished"
    assert summary["steps"] == 30
    assert summary["final"]["loss"] == pytest.approx(figures[-1]["loss"])
    assert {10, 20, 30} >= {line["step"] for line in figures} >= {30}


def test_a_member_that_is_cut_elsewhere_or_comes_with_other_flags_is_told_why(tmp_path):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, stack)
        for words, said in (
            (("hub", "job.toml", "--any-job"), "--any-job has no job for a pipeline"),
            (("hub", "job.toml", "--spare"), "--spare takes no part in a pipeline"),
            (("hub", "job.toml", "--number", "2"), "--number 2: one hub serves a pipeline"),
        ):
            found = edgetrain(*words, "--bind", "tcp://127.0.0.1:0", cwd=tmp_path)
            assert found.returncode == 2
            assert said in found.stderr
        alone = fleet.start_member(0)
        alone.until("joining")
        fleet.hub.until("m0 joined")
        alone.process.terminate()
        assert alone.finish() == 143
        fleet.hub.until("m0 left")
