"""Whole runs of strategies: batched as one by one, as processes as simulated, and through chaos."""

from __future__ import annotations

import json

import pytest
from chaos import command
from command_line import edgetrain, write_tiny

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training.simulated import simulation

JOB = ("device=raspberry-pi-4b", "members=4", "steps=20", "batch=8", "local_steps=5")


def ends_in(folder):
    events = read_metrics(folder, "event")
    return {event["reason"] for event in events if event["event"] == "finished"}


def simulated(folder, strategy, batched):
    inside = create(folder, "run")
    job = reading.load(None, [*JOB, f"strategy={strategy}"])
    summary = simulation.run(plan(job), inside, batched=batched)
    assert len(ends_in(inside)) == 1, "all replicas have one base"
    return summary


@pytest.mark.parametrize(
    ("strategy", "without"), [("fedprox(0.5)", "fedprox(0)"), ("scaffold", "fedavg")]
)
def test_simulated_members_batched_learn_what_they_learn_one_by_one(tmp_path, strategy, without):
    one, many = (simulated(tmp_path, strategy, batched) for batched in (False, True))
    assert "vmap" in many["emulation"]["reason"]
    assert many["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-3)
    free = simulated(tmp_path, without, True)
    assert abs(free["final"]["loss"] / many["final"]["loss"] - 1) > 1e-3, "the correction is felt"


@pytest.mark.real
def test_processes_lead_to_the_bases_that_are_simulated(tmp_path):
    """In virtual time diloco with a rate of 1 ends as local-sgd does."""
    job = write_tiny(
        tmp_path, fleet={"members": 2}, train={"steps": 12}, strategy={"local_steps": 3}
    )
    emulated = ["diloco", "fedprox(0.1)", "scaffold"]
    names = ["local-sgd", "diloco | sgd(1)", *emulated, "fedadam"]
    bases = []
    for strategies, *more in (names, "--simulate", "device=raspberry-pi-4b"), (emulated,):
        words = ("compare", job, "--strategies", ",".join(strategies), *more, "--json")
        done = edgetrain(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert [run["strategy"] for run in found["runs"]] == strategies
        folders = json.loads((tmp_path / found["folder"] / "summary.json").read_text())["runs"]
        ends = [ends_in(tmp_path / found["folder"] / name) for name in folders]
        bases.append(dict(zip(strategies, ends, strict=True)))
    virtual, real = bases
    assert all(len(each) == 1 for each in virtual.values())
    assert virtual["local-sgd"] == virtual["diloco | sgd(1)"] != virtual["diloco"]
    assert real == {name: virtual[name] for name in emulated}


@pytest.mark.parametrize("strategy", ["fedprox(0.1)", "scaffold"])
def test_nothing_is_lost_in_chaos(strategy, tmp_path, own_imports, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.05, "device": "raspberry-pi-4b", "network": "rtt-50ms"},
        train={"steps": 60},
        strategy={"name": strategy, "local_steps": 3},
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert command.main([job, "--schedules", "4"]) == 0
    assert "every law held" in capsys.readouterr().out
