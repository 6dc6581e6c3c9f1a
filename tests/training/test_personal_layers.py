"""Personal layers: trained and kept at the member, never sent; the rest as without them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import time

import children
import numpy as np
import pytest
import torch
from loopback import Loopback
from safetensors.numpy import load_file
from torch import nn

from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.member.checkpoint import Keep, Sparing
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs import reading
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.strategies.cohort import Cohort
from edgetrain.tasks import batches_from
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.personal import make_personal
from edgetrain.tasks.work import optimizer_for
from edgetrain.training import emulated
from edgetrain.training.member.keeping import keeping_of
from edgetrain.training.member.member import Member, bind, driver_of
from edgetrain.training.simulated import simulation

HEAD = "2.*"
PARTS = """
import torch

class Parts:
    name, metric, better, target = "parts", "loss", "lower", None

    def __init__(self, frozen=False, seed=0):
        self.frozen = frozen

    def model(self):
        found = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
        found[1].requires_grad_(not self.frozen)
        return found

    def samples(self, member, members):
        return 8

    def batches(self, member, members, batch, seed):
        generator = torch.Generator().manual_seed(member)
        while True:
            yield (torch.randn(batch, 3, generator=generator),)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[0]).square().mean()

    def evaluate(self, model):
        return {"loss": float(model[1].weight.detach().square().sum())}
"""
CASES = {
    "sync-sgd": {}, "fedavg": {"local_steps": 3}, "dga(paper)": {"local_steps": 3, "delay": 2},
}  # fmt: skip


def made(personal=HEAD):
    found = children.model(0)
    make_personal(found, personal)
    return found, children.optimizer("adamw", found)


def lived(wires, index, steps=9, keeping=None, personal=HEAD):
    """One member's model and what it sent, after so many steps of its own."""
    model, optim = made(personal)
    flat = bind(model, optim)
    link = Link(wires.connect(), time.monotonic)
    keeping = keeping and keeping(model, optim)
    with Member.join(link, flat, optim, Request("", f"m{index}"), keeping=keeping) as member:
        while member.steps < abs(steps):
            children.backward(model, optim, index, member.steps)
            member.step()
        if steps < 0:
            member.vanish()
    return model, member.traffic().sent_bytes


def naive(strategy, local_steps=1, delay=0, steps=9):
    """The same two members in plain torch, of which the first layer is shared."""
    members = [(found := children.model(0), children.optimizer("adamw", found)) for _ in "ab"]
    shared = [list(model.parameters())[:2] for model, _ in members]
    start = [[p.detach().clone() for p in own] for own in shared]
    waiting = []
    for step in range(steps):
        for index, (model, optim) in enumerate(members):
            children.backward(model, optim, index, step)
        if strategy == "sync-sgd":
            for pair in zip(*shared, strict=True):
                mean = torch.stack([p.grad for p in pair]).mean(0)
                for p in pair:
                    p.grad = mean.clone()
        for _, optim in members:
            optim.step()
        if strategy == "sync-sgd":
            continue
        with torch.no_grad():
            if (step + 1) % local_steps == 0:
                did = [[p - b for p, b in zip(*each, strict=True)]
                       for each in zip(shared, start, strict=True)]  # fmt: skip
                waiting.append((step + delay, did))
                start = [[p.clone() for p in own] for own in shared]
            if (waiting and waiting[0][0] <= step) or step == steps - 1:
                for _, did in (waiting.pop(0) for _ in list(waiting)):
                    for own, mine, before in zip(shared, did, start, strict=True):
                        for p, m, b, a, c in zip(own, mine, before, *did, strict=True):
                            p += (a + c) / 2 - m
                            b += (a + c) / 2 - m
    return [model for model, _ in members]


@pytest.mark.parametrize("strategy", CASES)
def test_personal_and_shared_parameters_are_those_of_a_naive_loop(strategy):
    wires, how = Loopback(), CASES[strategy]
    with children.HubThread(wires, strategy, 2, **how).serving():
        found = children.in_threads(*(lambda i=i: lived(wires, i)[0] for i in (0, 1)))
    for mine, wanted in zip(found, naive(strategy, **how), strict=True):
        np.testing.assert_allclose(children.flat(mine), children.flat(wanted), atol=2e-6)
    (a, *_, b), (c, *_, d) = (list(each.parameters()) for each in found)
    assert torch.equal(a, c)
    assert not torch.equal(b, d)


@pytest.mark.usefixtures("own_imports")
def test_bytes_are_those_of_the_shared_part_alone(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    words = "task=parts:Parts", "local_steps=3", "strategy=fedavg", "frozen=own", "buffers=local"
    sent = [
        simulated(tmp_path, name, *words, *more)["sent_bytes"]
        for name, more in {
            "mine": ["personal=1.*"], "frozen": ["data.frozen=true"], "whole": [],
        }.items()
    ]  # fmt: skip
    mine, frozen, whole = sent
    assert mine == frozen
    assert whole - mine > 3 * 4 * 4 * 3 * 4, "members, rounds, bytes, a weight of the head"


@pytest.mark.parametrize("strategy", ["sync-sgd", "fedavg"])
def test_a_member_that_comes_back_has_its_own_layers(strategy, tmp_path):
    def keeping(model, optim):
        return keeping_of(Keep(tmp_path, Sparing(0.0, 1.0, 1e15)), "m0", model, optim)

    ends, policy = [], {"lost_after_s": 30.0}
    for lives in ((9,), (-6, 9)):
        wires = Loopback()
        with children.HubThread(wires, strategy, 1, local_steps=1, policy=policy).serving():
            models = [lived(wires, 0, steps, keeping)[0] for steps in lives]
        ends.append(children.flat(models[-1]))
    assert ends[0].tobytes() == ends[1].tobytes()


def test_a_drawn_member_that_was_killed_goes_on_from_the_base_with_what_is_its_own(tmp_path):
    """Its layers and its optimizer are as they were, what it shares is the fleet's now."""
    wires, cohort = Loopback(), Cohort(0, 2, 1)

    def drawn(index, life):
        model, optim = made()
        sparing, name = Sparing(0.0, 1.0, 1e15), f"m{index}"
        keeping = keeping_of(Keep(tmp_path, sparing), name, model, optim)
        keeping.joins_anew = True
        link, request = Link(wires.connect(), time.monotonic), Request("", name, job="job")
        with Member.join(link, bind(model, optim), optim, request, keeping=keeping) as member:
            driver = driver_of(member)
            life(model, optim, member, driver)

    ended = []

    def first(model, optim, member, driver):
        while member.steps < 4:
            children.backward(model, optim, 0, member.steps)
            member.step()
        ended.append((own_of(model, optim), driver.progress))
        member.vanish()

    def second(model, optim, member, driver):
        assert member.steps == 4, "its place in the data"
        ended.append((own_of(model, optim), driver.progress))
        while driver.progress < 60:
            children.backward(model, optim, 0, member.steps)
            member.step()

    def own_of(model, optim):
        state = [value for p in model.parameters() for value in optim.state[p].values()]
        return [*map(torch.clone, [*model.state_dict().values()][2:]), *map(torch.clone, state)]

    def other(model, optim, member, driver):
        while driver.progress < 60:
            children.backward(model, optim, 1, member.steps)
            member.step()

    def lives():
        drawn(0, first)
        while len(ended) < 2:
            with contextlib.suppress(Refused):  # until the hub has noticed that it is gone
                drawn(0, second)

    policy = {"lost_after_s": 30.0, "deadline_s": 30.0}
    part = CohortPart(cohort)
    with children.HubThread(
        wires, "fedavg", 2, local_steps=2, steps=60, part=part, policy=policy
    ).serving():  # fmt: skip
        children.in_threads(lives, lambda: drawn(1, other))
    (before, was_at), (after, is_at) = ended
    assert is_at >= was_at
    assert all(torch.equal(*each) for each in zip(before, after, strict=True)), (
        "layers and moments of its own"
    )


def test_a_member_with_another_pattern_is_refused_in_one_line():
    wires = Loopback()
    with children.HubThread(wires, "fedavg", 1).serving():
        first = made()
        link = Link(wires.connect(), time.monotonic)
        with Member.join(link, bind(*first), first[1], Request("", "m0")):
            said = r"first tensor that differs is 'no tensor' and 'float32 3x8 2.weight'"
            with pytest.raises(Refused, match=said):
                lived(wires, 1, personal="2.bias")
            first[1].step()


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("haed.*", r"personal = 'haed.\*': no parameter or buffer .* nearest are"),
        ("*", r"takes all that is trained: members would exchange nothing"),
        ("2.*, 3.*", r"personal = '3.\*': no parameter"),
    ],
)
def test_a_pattern_that_cannot_be_is_one_line(pattern, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make_personal(children.model(0), pattern)
    assert "\n" not in str(caught.value)


def test_what_is_personal_is_in_no_vector_copy_or_digest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 6))
    model.register_buffer("table", torch.ones(3))
    plain = FlatModel(copy.deepcopy(model), statistics=True)
    make_personal(model, ["1.*", "table"])
    flat = FlatModel(copy.deepcopy(model), statistics=True)
    assert [name for name, *_ in flat.layout] == [n for n, *_ in plain.layout if n[0] != "1"]
    assert b"running" in plain.description
    assert b"running" not in flat.description
    assert plain.fixed
    assert not flat.fixed
    make_personal(model, "")
    assert FlatModel(model, statistics=True).description == plain.description
    tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    make_personal(tied, "b.*")
    flat = FlatModel(tied)
    assert [name for name, *_ in flat.layout] == ["a.bias"]
    tied["b"](torch.ones(3)).sum().backward()
    flat.zero_grad()
    assert tied["b"].weight.grad is None, "or a job's steps would add up gradients"


def job(*words):
    short = "members=3", "pace_s=0.001", "steps=12", "batch=4", "evaluate_every=6"
    return reading.load(None, [*short, *words])


def simulated(folder, name, *words):
    return simulation.run(plan(job(*words), folder), create(folder, name))


def fedrep(job):
    """Plain torch: the state of each member's model, in which what is shared is the mean of those
    that were in the round, which began from the mean before."""
    task, table, fleet = task_of(job), job.strategy, range(job.fleet.members)
    samples = np.array([task.samples(index, len(fleet)) for index in fleet])
    members = [
        (model, optimizer_for(model, job.train.optimizer, task),
         batches_from(task, index, len(fleet), job.train.batch, job.seed))
        for index in fleet if (model := model_of(task, job.seed))
    ]  # fmt: skip
    for step in range(job.train.steps):
        drawn = job.cohort.drawn(step // table.local_steps) if job.cohort else fleet
        for model, optimizer, batches in (members[index] for index in drawn):
            task.loss(model, next(batches)).backward()
            for name, parameter in model.named_parameters():
                heads = step % table.local_steps < table.head_steps
                if table.head_steps and name.endswith("bias") != heads:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % table.local_steps == 0:
            for name in (n for n, _ in members[0][0].named_parameters() if n.endswith("weight")):
                all_of = [dict(model.named_parameters())[name].data for model, _, _ in members]
                weights = samples[list(drawn)] / samples[list(drawn)].sum()
                mean = sum(w * all_of[index] for w, index in zip(weights, drawn, strict=True))
                for each in all_of:
                    each.copy_(mean)
    return [{k: v.numpy() for k, v in model.state_dict().items()} for model, _, _ in members]


@pytest.mark.parametrize(
    "more",
    [
        ["head_steps=3"],
        ["members=7", "cohort=3", "steps=40"],
        ["members=7", "cohort=3", "steps=40", "head_steps=1"],
    ],
    ids=["head first", "cohort", "cohort, head first"],
)
def test_what_is_personal_and_the_head_first_are_those_of_plain_torch(tmp_path, more):
    words = "strategy=fedavg", "local_steps=4", "personal=*.bias", *more, "network=none"
    words += "data.partition=dirichlet(0.5)", "optimizer={ name = 'adamw', lr = 0.01 }"
    simulated(tmp_path, "run", *words)
    (inside,) = tmp_path.iterdir()
    wanted = fedrep(job(*words))
    shared = load_file(inside / "model.safetensors")
    for index, state in enumerate(wanted):
        own = load_file(inside / "personal" / f"m{index}.safetensors")
        assert own
        for name, value in state.items():
            found = own[name] if name.endswith("bias") else shared[name]
            np.testing.assert_allclose(found, value, atol=1e-4)


@pytest.mark.real
@pytest.mark.parametrize("more", [[], ["head_steps=2"]], ids=["all", "head first"])
@pytest.mark.usefixtures("own_imports")
def test_simulated_personal_layers_are_the_emulated_ones_bit_for_bit(tmp_path, more):
    ends, words = [], ("strategy=fedavg", "local_steps=3", "network=none", "personal=*.bias", *more)
    for run, name in ((emulated.run, "real"), (simulation.run, "virtual")):
        inside = create(tmp_path, name)
        run(plan(job(*words)), inside)
        said = " ".join(str(each.get("reason")) for each in read_metrics(inside, "event"))
        kept = {
            file.stem: {key: value.tobytes() for key, value in load_file(file).items()}
            for file in (inside / "personal").iterdir()
        }
        ends.append((set(re.findall("base ([0-9a-f]{16})", said)), kept))
        whole = load_file(inside / "model.safetensors")
        assert all(whole[name].tobytes() == kept["m0"][name] for name in kept["m0"])
    assert ends[0] == ends[1]
    bases, kept = ends[0]
    assert len(bases) == 1
    assert sorted(kept) == ["m0", "m1", "m2"]
    assert all(kept[a] != kept[b] for a, b in itertools.combinations(kept, 2))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["personal=nothing.*"], "no parameter or buffer"),
        (["personal=*"], "takes all that is trained"),
        (
            ["head_steps=2", "local_steps=3", "strategy=fedavg"],
            "without strategy.personal: members have no layers",
        ),
        (
            ["personal=*.bias", "head_steps=3", "local_steps=3", "strategy=fedavg"],
            "in rounds of 3 steps: none is left",
        ),
        (
            ["personal=*.bias", "head_steps=2", "strategy=dga", "local_steps=3"],
            "its rounds may change",
        ),
        (
            ["personal=*.bias", "head_steps=2", "strategy=fedprox(1)", "local_steps=3"],
            "adds to the grad",
        ),
        (
            [
                "personal=*.bias",
                "head_steps=2",
                "strategy=fedavg",
                "local_steps=9",
                "final_sync=0.5",
            ],
            "rounds may change",
        ),
        (["personal=*.bias", "strategy=sync-sgd", "train.clip=1.0"], "cut by its whole length"),
        (
            ["personal=*.bias", "unit=member", "noise=1.0", "strategy=dga"],
            "members' data are private",
        ),
    ],
)
@pytest.mark.usefixtures("own_imports")
def test_jobs_that_cannot_have_personal_layers_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        plan(job(*words))
