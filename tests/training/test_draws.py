"""Random numbers of members: each member's are its own, and follow from the job's seed."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from types import SimpleNamespace

import children
import drawing_task
import numpy as np
import pytest
import torch
from loopback import Loopback
from safetensors.torch import load_file

from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs.lookup import work_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.tasks.draws import generator_states, model_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.training import emulated
from edgetrain.training.member.keeping import keeping_of
from edgetrain.training.member.member import Member
from edgetrain.training.servers.streams import Streams
from edgetrain.training.simulated import simulation
from edgetrain.vectors.noise import system

STEPS = 2
JOB = [
    "task=drawing_task:Drawing", f"steps={STEPS}", "batch=1", "strategy=sync-sgd",
    "network=ethernet", "pace_s=0.01", "device=raspberry-pi-4b",
    "optimizer={ name = 'sgd', lr = 1.0 }",
]  # fmt: skip
TORCH = "data.kinds=['dropout', 'randn']"
FLEETS = [1, 2, 4, 8]

pytestmark = pytest.mark.usefixtures("own_imports")


def trained(folder, *words, run=simulation.run, **how):
    """The trained parameters, and the figures of all evaluations."""
    inside = create(folder, "run")
    planned = plan(load(None, [*JOB, *words]), Path(drawing_task.__file__).parent)
    run(planned, inside, **how)
    model = load_file(inside / "model.safetensors")
    return model["weight"], [line["loss"] for line in read_metrics(inside, "eval")]


def check(weight, members):
    """Each step moved by the mean of the members' draws, whose variance is one member's share."""
    for kind, row in zip(drawing_task.DRAWS, weight, strict=False):
        assert float(row.var()) * members / STEPS == pytest.approx(1, rel=0.05), kind


@pytest.mark.parametrize("members", FLEETS)
def test_many_members_draw_as_many_numbers(tmp_path, members):
    found, _ = trained(tmp_path, f"members={members}", batched=False)
    check(found, members)
    batched, _ = trained(tmp_path, f"members={members}", TORCH, batched=True)
    check(batched, members)
    assert torch.equal(batched, found[:2])


@pytest.mark.real
@pytest.mark.parametrize("members", FLEETS)
def test_processes_draw_what_is_simulated(tmp_path, members):
    found, figures = trained(tmp_path, f"members={members}", run=emulated.run)
    check(found, members)
    simulated, computed = trained(tmp_path, f"members={members}", batched=False)
    assert torch.equal(found, simulated)
    assert figures == computed


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (False, []),
        (True, [TORCH]),
        (False, ["train.accumulate=2", "strategy=fedavg", "local_steps=2"]),
    ],
)
def test_evaluations_change_no_bit_of_training(tmp_path, how, words):
    """This task's draws, and leaves the model in eval mode, in which dropout is off."""
    words = ["members=2", *words]
    often, figures = trained(tmp_path, "evaluate_every=1", *words, batched=how)
    rarely, _ = trained(tmp_path, f"evaluate_every={STEPS}", *words, batched=how)
    assert len(figures) == STEPS + 1
    assert torch.equal(often, rarely)


def test_a_simulation_leaves_the_generators_of_its_process_alone(tmp_path):
    before = generator_states()
    trained(tmp_path, "members=2")
    after = generator_states()
    assert torch.equal(before["torch"], after["torch"])
    assert (before["python"], str(before["numpy"])) == (after["python"], str(after["numpy"]))


def lives(folder, strategy, *ends):
    """The trained parameters of a job's only member, whose processes end after so many steps: all
    but the last one as if the power had gone. And how many steps each found behind it."""
    job, task, began = load(None, JOB), drawing_task.Drawing(), []
    wires, journal, clock = Loopback(), Journal(folder / "journal"), itertools.count()
    keep, request = Keep(folder / "m0", Sparing(3.0, 1.0, 1e15)), Request("", "m0")
    hub = children.HubThread(wires, strategy, 1, journal=journal, policy={"lost_after_s": 60.0})
    with hub.serving():
        for end in ends:
            model = model_of(task, job.seed)
            flat, optimizer = FlatModel(model), torch.optim.SGD(model.parameters(), 1.0)
            keeping = keeping_of(keep, "m0", model, optimizer, lambda: float(next(clock)))
            link = Link(wires.connect(), time.monotonic)
            member = Member.join(link, flat, optimizer, request, keeping=keeping)
            work = work_of(job, task, model, flat, 0, system, member.steps, member.begins_at)
            began.append(member.begins_at)
            torch.rand(random.randrange(9)), np.random.random()
            for _ in range(member.begins_at, end):
                work.backward()
                member.step()
            member.close() if end == ends[-1] else member.vanish()
    journal.close()
    return model.weight.detach(), began


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg", "dga"])
def test_a_member_that_was_killed_draws_what_it_would_have_drawn(tmp_path, strategy):
    unbroken, _ = lives(tmp_path / "a", strategy, 12)
    resumed, began = lives(tmp_path / "b", strategy, 4, 9, 12)
    assert 0 < began[1] <= 4 < began[2] <= 9
    assert torch.equal(unbroken, resumed)


def test_groups_that_are_members_draw_other_numbers():
    def drawn(member, data_rank):
        ranks = SimpleNamespace(data_rank=data_rank, slice=0, device=torch.device("cpu"))
        streams = Streams(0, ranks, member)
        streams.begin(0)
        with streams.drawing_loss(0):
            return float(torch.rand(()))

    assert len({drawn(member, rank) for member in range(3) for rank in range(3)}) == 9
