"""Simulated members' gradients: many at once are those of one by one, whoever computes them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from edgetrain.errors import ConfigError
from edgetrain.jobs import reading
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.rules import resolve
from edgetrain.training.simulated import local
from edgetrain.training.simulated.batched import Rows

pytestmark = pytest.mark.usefixtures("own_imports")


def job(*words):
    return reading.load(None, ["members=5", "batch=3", "device=raspberry-pi-4b", *words])


def stepped(gradients, members, steps, *, order=None):
    """Parameters of all members after so many local steps, and their losses."""
    made = [gradients.member(i) for i in range(members)]
    losses = []
    for step in range(steps):
        asked = [(i, made[i][2].backward()) for i in (order or (lambda s: range(members)))(step)]
        for i, loss_of in asked:
            losses.append(loss_of())
            made[i][1].step()
    return np.stack([flat.params.copy() for flat, _, _ in made]), losses


OPTIMIZERS = [
    "optimizer={ name = 'sgd', lr = 0.1, momentum = 0.9 }",
    "optimizer={ name = 'adamw', lr = 0.002 }",
    "optimizer={ name = 'rmsprop', lr = 0.001 }",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", ["digits", "char_lm"])
def test_many_at_once_step_as_one_by_one(optimizer, task):
    asked = job(optimizer, f"task=edgetrain.tasks:{task}", "strategy=fedavg")
    loaded = task_of(asked)
    batched = local.choose(loaded, resolve(asked), True)
    assert isinstance(batched, Rows), batched.reason
    found, losses = stepped(batched, 5, 3)
    wanted, expected = stepped(local.choose(loaded, resolve(asked), False), 5, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    start = local.OneByOne(loaded, resolve(asked), "").member(0)[0].params
    # Together: an optimizer that divides by the gradient's size blows up what is all rounding.
    assert np.linalg.norm(found - wanted) <= 1e-2 * np.linalg.norm(wanted - start)


def test_members_may_ask_in_any_order_and_not_all_at_once():
    asked = job("strategy=fedavg")
    task = task_of(asked)
    orders = [[4, 0, 2], [1, 3], [0, 1, 2, 3, 4]]
    found, _ = stepped(Rows(task, resolve(asked)), 5, 3, order=orders.__getitem__)
    wanted, _ = stepped(local.OneByOne(task, resolve(asked), ""), 5, 3, order=orders.__getitem__)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_rows_one_after_the_other_step_as_members_alone(optimizer, accumulate, drops):
    asked = job(optimizer, "strategy=fedavg", f"accumulate={accumulate}", "members=11")
    task = Odd(dropping) if drops else task_of(asked)
    wanted, expected = stepped(local.OneByOne(task, resolve(asked), ""), 11, 3)
    found, losses = stepped(Rows(task, resolve(asked), single=True), 11, 3)
    if drops:
        assert losses == expected
        assert found.tobytes() == wanted.tobytes()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # kernels round by where tensors lie
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize(("batch", "way"), [(4, "torch.func.vmap"), (256, "row by row")])
def test_large_convolutions_are_computed_row_by_row(batch, way):
    asked = job("members=40", f"batch={batch}")
    assert way in local.choose(task_of(asked), resolve(asked), None).reason
    assert "torch.func.vmap" in local.choose(task_of(asked), resolve(asked), True).reason


def test_the_bits_do_not_depend_on_the_cores(monkeypatch):
    asked = job("strategy=fedavg", "members=260", "batch=1", "data.partition=shared(4)")
    task = task_of(asked)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "cpu_count", lambda c=cores: c)
        found.append(stepped(Rows(task, resolve(asked)), 260, 3)[0])
    assert found[0].tobytes() == found[1].tobytes()


def test_gradient_strategies_step_only_with_what_comes_back():
    asked = job("strategy=sync-sgd", "optimizer={ name = 'sgd', lr = 1.0 }")
    flat, optimizer, work = Rows(task_of(asked), resolve(asked)).member(1)
    before = flat.params.copy()
    work.backward()()
    assert (flat.params == before).all()
    flat.gradient[:] = 0.25
    optimizer.step()
    np.testing.assert_allclose(flat.params, before - 0.25)


def test_a_member_that_starts_anew_has_fresh_parameters_and_a_fresh_optimizer():
    asked = job("strategy=fedavg", OPTIMIZERS[1])
    rows = Rows(task_of(asked), resolve(asked))
    first, _ = stepped(rows, 5, 4)
    again, _ = stepped(rows, 5, 4)
    assert first.tobytes() == again.tobytes()


def test_evaluation_is_of_the_members_own_parameters():
    asked = job("strategy=fedavg")
    task = task_of(asked)
    flat, _, work = Rows(task, resolve(asked)).member(0)
    plain, _, single = local.OneByOne(task, resolve(asked), "").member(0)
    assert work.evaluate() == single.evaluate()
    flat.params[:] = plain.params[:] = 0.01
    assert work.evaluate() == single.evaluate()


class Odd:
    """A task whose model batching cannot serve."""

    name, metric, better, target = "odd", "loss", "lower", None

    def __init__(self, model, loss=None):
        self.model = model
        self._loss = loss or (lambda net, batch: net(batch[0]).square().mean())

    def samples(self, member, members):
        return 1

    def batches(self, member, members, batch, seed):
        while True:
            yield (torch.ones(batch, 4),)

    def loss(self, model, batch):
        return self._loss(model, batch)


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        (
            Odd(lambda: nn.Linear(4, 2)),
            ["optimizer={ name = 'adafactor' }"],
            "'adafactor' does not work",
        ),
        (Odd(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), [], "has buffers"),
        (Odd(frozen), [], "frozen"),
        (Odd(tied), [], "tied"),
        (Odd(lambda: nn.Linear(4, 2).double()), [], "not float32"),
        (
            Odd(
                lambda: nn.Linear(4, 2),
                lambda net, batch: net(batch[0]).mean() * float(net(batch[0]).detach().mean()),
            ),
            [],
            "torch.func.vmap: ",
        ),
    ],
)
def test_what_cannot_be_batched_is_stepped_one_by_one_and_why_is_said(task, words, says):
    asked = job("members=64", *words)
    chosen = local.choose(task, resolve(asked), None)
    assert isinstance(chosen, local.OneByOne)
    assert says in chosen.reason
    with pytest.raises(ConfigError, match="members cannot be batched: "):
        local.choose(task, resolve(asked), True)


def test_few_members_are_stepped_one_by_one():
    asked = job()
    assert isinstance(local.choose(task_of(asked), resolve(asked), None), local.OneByOne)
