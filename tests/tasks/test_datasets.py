"""A task in six lines, of arrays, data sets and dictionaries; and who holds what of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import edgetrain
from edgetrain.__main__ import main
from edgetrain.errors import TaskError

X = torch.randn(700, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


class Pairs(Dataset):
    """As torchvision's: samples are made when they are asked for."""

    def __init__(self, form):
        self.form, self.writer = form, np.arange(700) // 100

    def __len__(self):
        return 700

    def __getitem__(self, index):
        pair = X[index], int(Y[index])
        return pair if self.form is tuple else {"label": pair[1], "x": pair[0], "name": "…"}


FORMS = {
    "arrays": (X.numpy(), Y.numpy()), "tensors": TensorDataset(X, Y), "tuples": Pairs(tuple),
    "dictionaries": Pairs(dict),
}  # fmt: skip


def model():
    return torch.nn.Linear(5, 3)


def made(form, **more):
    return edgetrain.task(model, train=FORMS[form], test=(X[:300], Y[:300]), **more)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_task(form):
    task, plain = made(form, partition="shards(2)"), made("arrays", partition="shards(2)")
    for one, other in zip(task.batches(1, 4, 8, 0), plain.batches(1, 4, 8, 0), strict=False):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        break
    torch.manual_seed(0)
    assert task.loss(model(), next(task.batches(0, 4, 8, 0))).requires_grad
    assert [task.samples(m, 4) for m in range(4)] == [175] * 4


def test_figures_are_those_of_the_whole_test_set_whatever_its_last_batch():
    torch.manual_seed(1)
    net = model()

    def sure(outputs, targets):
        return outputs.softmax(1).max(1).values.mean()

    figures = made("arrays", metric=sure).evaluate(net)  # 300 samples: 256 and 44
    outputs = net(X[:300])
    loss = torch.nn.functional.cross_entropy(outputs, Y[:300]).item()
    assert figures == pytest.approx({"loss": loss, "sure": sure(outputs, Y).item()})
    accuracy = made("arrays").evaluate(net)["accuracy"]
    assert accuracy == pytest.approx((outputs.argmax(1) == Y[:300]).float().mean().item())


def test_writers_of_a_data_set_are_members():
    for task in (
        made("tuples", partition="by(writer)"),
        made("arrays", partition="by(writer)", columns={"writer": np.arange(700) // 100}),
    ):
        assert [list(task.shards.of(m, 7))[::99] for m in (0, 6)] == [[0, 99], [600, 699]]


@pytest.mark.parametrize(("train", "more", "says"), [
    ((X, Y[:9]), {}, "700, 9"), ((X[:0], Y[:0]), {}, "without samples"),
    ((X, Y), {"metric": "acuracy"}, "metric = 'acuracy'"),
    ((X, Y), {"partition": "by(writer)"}, "no such column"),
    (Pairs(dict), {"label": "y", "partition": "shards(2)"}, "label = one of them"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(train, more, says):
    with pytest.raises(TaskError, match=says):
        edgetrain.task(model, train=train, test=(X, Y), **more).samples(0, 2)


def test_it_trains(tmp_path):
    run = edgetrain.simulate(
        task=made("tuples"), members=3, steps=60, strategy="fedavg", progress=False, runs=tmp_path,
        network="none", **{"optimizer.lr": 0.5},
    )  # fmt: skip
    assert run.summary["final"]["accuracy"] > 0.7


def test_who_holds_what_is_a_picture(capsys):
    words = ["data", "show", "members=5", "data.partition=shards(1) | sizes(zipf(1))"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("5 members, 1,438 samples, ")
    assert len(said) == 7
    assert all("█" in line for line in said[2:])
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert np.array(told["classes"]).sum(1).tolist() == told["samples"]
