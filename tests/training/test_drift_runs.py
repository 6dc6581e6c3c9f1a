"""dga(predict) as a whole job: emulated, simulated, batched, over chaos, after a checkpoint."""

from __future__ import annotations

import json

import children
import numpy as np
import pytest
import torch
from chaos import command
from command_line import edgetrain, write_tiny
from test_checkpoint_fleet import fleet

from edgetrain.exchange.member.driver import momentum_of
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.tasks.layerwise import LARS
from edgetrain.training.simulated import simulation

JOB = (
    "strategy=dga(predict)", "device=raspberry-pi-4b", "members=4", "steps=40", "batch=8",
    "local_steps=5", "delay=5",
)  # fmt: skip


def simulated(folder, name, *words, batched):
    inside = create(folder, name)
    return simulation.run(plan(reading.load(None, [*JOB, *words])), inside, batched=batched)


@pytest.mark.parametrize(
    ("build", "momentum"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8), 0.8),
        (lambda p: torch.optim.AdamW(p, betas=(0.7, 0.99)), 0.7),
        (lambda p: torch.optim.Adagrad(p), 0),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), 0.5),
        (lambda p: LARS(p, lr=0.1, momentum=0.6), 0.6),
        (lambda p: torch.optim.LBFGS(p), 0),
    ],
)
def test_the_momentum_of_an_optimizer_is_found(build, momentum):
    assert momentum_of(build([torch.nn.Parameter(torch.zeros(3))])) == momentum


def test_simulated_members_batched_learn_what_they_learn_one_by_one(tmp_path):
    one = simulated(tmp_path, "one", batched=False)
    many = simulated(tmp_path, "many", batched=True)
    assert many["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-3)
    own = simulated(tmp_path, "own", "strategy=dga(paper)", batched=True)
    assert abs(own["final"]["loss"] / many["final"]["loss"] - 1) > 1e-3, "it makes a difference"


@pytest.mark.parametrize(("partition", "chosen"), [("iid", "decay"), ("dirichlet(0.1)", "predict")])
def test_members_say_what_they_chose_and_train_as_if_the_job_had_said_it(
    tmp_path, partition, chosen
):
    momentum = 0.9 if chosen == "predict" else 0
    words = (
        f"data={{ partition = '{partition}' }}",
        f"optimizer={{ name = 'sgd', lr = 0.1, momentum = {momentum} }}",
    )
    auto = simulated(tmp_path, "auto", "strategy=dga", *words, batched=True)
    said = simulated(tmp_path, "said", f"strategy=dga({chosen})", *words, batched=True)
    assert auto["corrections"] == {chosen: 4}
    assert said["corrections"] == {}
    assert auto["final"] == said["final"]
    (folder,) = (path.parent for path in tmp_path.glob("*auto/metrics.jsonl"))
    events = [e for e in read_metrics(folder, "event") if e["event"] == "correction"]
    assert len({event["member"] for event in events}) == len(events) == 4
    assert all(e["reason"].startswith(f"{chosen}: divergence from the fleet") for e in events)


@pytest.mark.parametrize(("steps", "batch", "chosen"), [
    (20, 200, "paper"), (20, 8, "predict"),
    pytest.param(80, 200, "predict", marks=pytest.mark.real),
])  # fmt: skip
def test_in_a_short_run_members_whose_steps_have_all_samples_keep_own_progress(
    tmp_path, steps, batch, chosen
):
    """1,437 digits, 8 members: 180 samples each."""
    words = ("members=8", f"steps={steps}", f"batch={batch}", "data.partition=dirichlet(0.1)")
    one = simulated(tmp_path, "one", *words, "strategy=dga", batched=False)
    said = simulated(tmp_path, "said", *words, f"strategy=dga({chosen})", batched=False)
    assert one["final"] == said["final"]


def test_on_equal_data_members_leave_a_part_and_land_with_momentum(tmp_path):
    auto = simulated(tmp_path, "auto", "strategy=dga", batched=True)
    own = simulated(tmp_path, "own", "strategy=dga(paper)", "final_sync=0", batched=True)
    assert auto["corrections"] == {"decay": 4}
    assert auto["seconds"] > own["seconds"], "each round of a final sync waits for its reply"
    plain = ("strategy=dga", "optimizer={ name = 'sgd', lr = 0.2 }")
    free, unsynced, paper = (
        simulated(tmp_path, name, *plain, *more, batched=True)
        for name, more in (
            ("free", ()), ("unsynced", ("final_sync=0",)), ("paper", ("correction=paper",))
        )
    )  # fmt: skip
    assert free["corrections"] == {"decay": 4}
    assert free["final"] == unsynced["final"], (
        "without momentum no run has a final sync on equal data"
    )
    assert free["seconds"] > paper["seconds"], "three rounds wait for their replies"


def test_masked_contributions_are_foretold_as_well(tmp_path):
    """The rule sees nothing but a member's own contribution and the reply that all are sent."""
    plain = simulated(tmp_path, "plain", batched=True)
    masked = simulated(tmp_path, "masked", "secure=true", batched=True)
    assert masked["final"]["loss"] == pytest.approx(plain["final"]["loss"], rel=0.02)


@pytest.mark.real
def test_processes_train_to_the_base_that_is_simulated(tmp_path):
    job = write_tiny(
        tmp_path,
        fleet={"members": 2},
        train={"steps": 24},
        strategy={"name": "dga", "correction": "predict", "local_steps": 3, "delay": 6},
    )
    bases = set()
    for verb, *more in ("run",), ("simulate", "device=raspberry-pi-4b", "pace_s=0.01"):
        done = edgetrain(verb, job, "--json", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / json.loads(done.stdout.splitlines()[-1])["folder"]
        events = read_metrics(folder, "event")
        bases |= {event["reason"] for event in events if event["event"] == "finished"}
    assert len(bases) == 1, bases


def test_nothing_is_lost_in_chaos(tmp_path, own_imports, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = write_tiny(
        tmp_path,
        fleet={"members": 3, "pace_s": 0.05, "device": "raspberry-pi-4b", "network": "rtt-50ms"},
        train={"steps": 60},
        strategy={"name": "dga(predict)", "local_steps": 3, "delay": 6},
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert command.main([job, "--schedules", "4"]) == 0
    assert "every law held" in capsys.readouterr().out


def test_a_member_that_lost_power_knows_what_it_had_learned(tmp_path):
    """It trained alone after its checkpoint, so nothing was learned that the file does not have."""
    lives, _, _ = fleet(tmp_path / "a", 60, [31], "dga(predict)", others=2, every=1, delay=4)
    learned = [life.member.half.learned() for life in lives]
    assert children.flat(lives[-1].model).size == learned[1]["gap"].size
    assert np.abs(learned[0]["gap"]).max() > 0
    # The first life was cut 31 steps in: the second did not begin at no replies, as a newcomer.
    assert learned[1]["figures"][2] > learned[0]["figures"][2] + 8
