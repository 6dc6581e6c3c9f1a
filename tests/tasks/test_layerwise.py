"""LARS, LAMB and accumulated gradients, against the papers' formulas and one large batch."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.jobs import optimizers
from edgetrain.jobs.lookup import tuning_of
from edgetrain.jobs.reading import parse as job_of
from edgetrain.jobs.rules import resolve
from edgetrain.tasks import load_task
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.layerwise import LAMB, LARS, LAYER_WISE
from edgetrain.tasks.work import OneModel, optimizer_for


def lars(w, gradients, lr, momentum, decay, trust):
    v = np.zeros_like(w)
    for g in gradients:
        length, slope = np.linalg.norm(w), np.linalg.norm(g)
        local = trust * length / (slope + decay * length) if length and slope else 1
        v = momentum * v + lr * local * (g + decay * w)
        w = w - v
    return w


def lamb(w, gradients, lr, betas, eps, decay):
    m, v = np.zeros((2, *w.shape))
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decay * w
        length, reach = np.linalg.norm(w), np.linalg.norm(r)
        w = w - lr * (length / reach if length and reach else 1) * r
    return w


@given(
    seed=st.integers(0, 2**32 - 1), decay=st.sampled_from([0.0, 0.01]), name=st.sampled_from("ab"),
    zero=st.sampled_from(["", "weights", "gradients"]),
)  # fmt: skip
def test_they_are_the_papers_for_each_tensor_alone_and_within_a_flat_model(seed, decay, name, zero):
    rng = np.random.default_rng(seed)
    tensors = [rng.standard_normal(size) * (zero != "weights") for size in (6, 1, 9)]
    gradients = [rng.standard_normal((4, w.size)) * (zero != "gradients") for w in tensors]
    if name == "a":
        make = lambda params: LARS(params, 0.1, 0.9, decay, 0.02)  # noqa: E731
        wanted = [
            lars(w, g, 0.1, 0.9, decay, 0.02) for w, g in zip(tensors, gradients, strict=True)
        ]
    else:
        make = lambda params: LAMB(params, 0.1, (0.9, 0.99), 1e-6, decay)  # noqa: E731
        wanted = [
            lamb(w, g, 0.1, (0.9, 0.99), 1e-6, decay)
            for w, g in zip(tensors, gradients, strict=True)
        ]
    apart = [torch.nn.Parameter(torch.tensor(w)) for w in tensors]
    flat = torch.nn.Parameter(torch.tensor(np.concatenate(tensors)))
    each, whole = make(apart), make([flat])
    whole.pieces = [(0, 6), (6, 7), (7, 16)]
    for step in range(4):
        for parameter, g in zip(apart, gradients, strict=True):
            parameter.grad = torch.tensor(g[step])
        flat.grad = torch.tensor(np.concatenate([g[step] for g in gradients]))
        each.step()
        whole.step()
    for parameter, w in zip(apart, wanted, strict=True):
        np.testing.assert_allclose(parameter.detach(), w, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(flat.detach(), np.concatenate(wanted), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_sparse_gradient_is_one_clear_line(name):
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optimizer_for(model, {"name": name, "lr": 0.1})
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"sparse gradient \(give the model Embedding\(sparse=F"):
        optimizer.step()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "lars", "lr": -1}, "lars: lr = -1 (allowed are 0 and more)"),
        ({"name": "lamb", "betas": [0.9, 1.0]}, "betas = [0.9, 1.0] (allowed are two from 0"),
        ({"name": "lamb", "trust": 1}, "optimizer 'lamb' has no 'trust' (known: betas"),
        ({"name": "lamd"}, "did you mean 'lamb'?"),
        ({"name": "lars"}, "optimizer 'lars' needs lr (as in lr=1.0)"),
        ({"name": "sgd", "momentun": 0.9}, "has no 'momentun' (did you mean 'momentum'?)"),
        ({"name": "sgd", "lr": "x"}, "lr = 'x' (allowed is a finite number)"),
        ({"name": "lars", "lr": True}, "lr = True (allowed is a finite number)"),
        ({"name": "adam", "eps": float("nan")}, "eps = nan (allowed is a finite number)"),
    ],
)
def test_bad_settings_are_one_clear_line(table, said):
    with pytest.raises(ConfigError) as refused:
        optimizer_for(torch.nn.Linear(2, 2), table)
    assert said in str(refused.value)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_accumulated_gradient_is_that_of_one_large_batch(accumulate):
    task = load_task("edgetrain.tasks:digits", {}, defaults={"seed": 0})
    torch.manual_seed(0)
    model = task.model()
    flat = FlatModel(model)
    batches = list(islice(task.batches(0, 2, 8, 0), 6))
    work = OneModel(task, model, flat, iter(batches), accumulate)
    for first in range(0, 6, accumulate):
        loss = work.backward()()
        flat.pull_gradient()
        found = flat.gradient.copy()
        large = tuple(torch.cat(p) for p in zip(*batches[first : first + accumulate], strict=True))
        OneModel(task, model, flat, iter([large])).backward()
        flat.pull_gradient()
        np.testing.assert_allclose(found, flat.gradient, rtol=1e-3, atol=1e-6)
        assert math.isclose(loss, task.loss(model, large).item(), rel_tol=1e-4)


def test_the_rate_grows_with_the_samples_of_a_step():
    words = ["members=8", "batch=4", "accumulate=2", "lr_reference_batch=16", "schedule=warmup(4)"]
    tuning = tuning_of(job_of({}, words))
    assert [tuning.factor(step) for step in (0, 3, 50)] == [1.0, 4.0, 4.0]
    assert tuning_of(job_of({}, [*words[:3], "lr_reference_batch=0"])).factor is None


def test_all_members_agree_on_both():
    plain = job_of({}, [])
    assert plain.digest() == job_of({}, ["accumulate=1", "lr_reference_batch=0"]).digest()
    assert (
        len(
            {plain.digest()}
            | {job_of({}, [w]).digest() for w in ("accumulate=2", "lr_reference_batch=9")}
        )
        == 3
    )


def test_accumulating_private_examples_is_refused_in_one_line():
    with pytest.raises(
        ConfigError, match=r"train.accumulate = 2: samples are taken a few at a time already \("
    ):
        resolve(job_of({}, ["accumulate=2", "privacy=example", "strategy=sync-sgd"]))


def test_a_job_may_name_them_and_torchs_before_torch_is_loaded():
    assert set(optimizers.LAYER_WISE) == LAYER_WISE.keys()
    model = torch.nn.Linear(2, 2, bias=False)
    found = set(optimizers.optimizers())
    assert {"lars", "lamb", "sgd", "adamw"} <= found
    for name in found - {"sparseadam"}:
        assert type(optimizer_for(model, {"name": name, "lr": 0.1})).__name__.lower() == name


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer={ lr = 0.1 }", r"train.optimizer has no name \(as in { name = 'sgd'"),
        ("optimizer=LBFGS", r"'LBFGS' computes the loss again within its step"),
    ],
)
def test_an_optimizer_that_no_member_can_have_is_refused_without_torch(word, said):
    with pytest.raises(ConfigError, match=said):
        optimizers.check_optimizer(job_of({}, [word]))
