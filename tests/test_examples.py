"""The examples, run as a reader would: with the real hub and real processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_line import hub, running

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs import folder as runs
from edgetrain.training.simulated import simulation

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.real
def test_your_own_loop(tmp_path):
    program = (sys.executable, str(EXAMPLES / "your_own_loop.py"))
    with hub("members=2", "--any-job", cwd=tmp_path) as (serving, address):
        with (
            running("0", address, program=program, cwd=tmp_path) as first,
            running("1", address, program=program, cwd=tmp_path) as second,
        ):
            assert (first.finish(120), second.finish(120)) == (0, 0), first.said + second.said
        assert serving.finish() == 0
    accuracies = [
        re.findall(r"accuracy on unseen digits: (0\.\d+)", m.said) for m in (first, second)
    ]
    assert accuracies[0] == accuracies[1], "both end with the fleet's model"
    assert float(accuracies[0][0]) > 0.85


@pytest.mark.real
def test_a_loop_that_is_killed_keeps_going(tmp_path):
    program = (sys.executable, str(EXAMPLES / "keeps_going.py"))
    with hub("members=1", "--any-job", "lost_after_s=30", "delay=5", cwd=tmp_path) as (
        serving,
        address,
    ):
        with running("kept", address, program=program, cwd=tmp_path) as first:
            assert first.until("begins with").split()[-1] == "0"
            first.process.kill()
            first.finish()
        with running("kept", address, program=program, cwd=tmp_path) as second:
            begun = int(second.until("begins with").split()[-1])
            assert second.finish(120) == 0, second.said
            assert float(second.said.split()[-1]) > 0.85
        assert serving.finish() == 0
    rounds = list(runs.read_metrics(next((tmp_path / "runs").iterdir()), "round"))
    local_steps = (
        5  # of dga, the default; an automatic delay would let rounds of such short steps grow
    )
    assert begun % local_steps == 0
    assert sum(len(r["members"]) for r in rounds) >= 1000 // local_steps - 1
    assert not list((tmp_path / "kept").glob("*.checkpoint"))


def test_the_added_lines_are_marked():
    lines = (EXAMPLES / "your_own_loop.py").read_text().splitlines()
    marked = [line.split("#")[0].strip() for line in lines if "  # edgetrain" in line]
    assert marked == [
        "member = edgetrain.join(hub, model, optimizer)",
        "member.close()",
    ]


def test_leaf_files_are_a_member_for_each_writer(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    import leaf

    leaf.make(tmp_path, 6)
    words = ["members=6", f"data.folder={tmp_path}", "steps=20", "train.evaluate_every=10"]
    job = plan(reading.load(EXAMPLES / "leaf.toml", [*words, "cohort=2"]), EXAMPLES)
    _, labels, users = leaf.read(tmp_path, "train")
    task = leaf.writers(tmp_path)
    for member, user in enumerate(dict.fromkeys(users)):
        held = task.shards.of(member, 6)
        assert {users[index] for index in held} == {user}
    assert sum(task.samples(member, 6) for member in range(6)) == len(labels)
    summary = simulation.run(job, runs.create(tmp_path / "runs", "leaf"))
    assert summary["status"] == "finished"
    assert summary["final"]["loss"] < 2.5
    sys.modules.pop("leaf")
