"""What a model does besides computing is seen on tensors without numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgetrain.tasks.effects import Effects, effects_of
from edgetrain.tasks.experts import MixtureOfExperts


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Model(nn.Module):
    """Two layers, and `between` them what is to be seen."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        self.register_buffer("mean", torch.zeros(4))
        self.table = torch.zeros(4)

    def forward(self, hidden):
        return self.last(self.between(self, self.first(hidden)))


class Named(Model):
    pieces = (("first",), ("last",))


class Task:
    def __init__(self, model):
        self.model = model

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def note(model, hidden):
    model.table = hidden.square().mean()
    model.seen = hidden.detach()
    return hidden


def hook(model, hidden):
    hidden.register_hook(lambda gradient: 2 * gradient)
    return hidden


def write(model, hidden):
    model.mean.lerp_(hidden.detach().mean(0), 0.1)
    return hidden - model.mean


def replace(model, hidden):
    model.mean = hidden.detach().mean(0)
    return hidden


def grow(model, hidden):
    model.third = nn.Linear(4, 4)
    return model.third(hidden)


def prune(model, hidden):
    model.last.bias = None
    return hidden


def anew(model, hidden):
    model.last = nn.Linear(4, 4)
    return hidden


def clamp(model, hidden):
    with torch.no_grad():
        model.last.weight.clamp_(-1, 1)
    return hidden


def clamp_data(model, hidden):
    model.last.weight.data.clamp_(-1, 1)
    return hidden


def set_data(model, hidden):
    model.last.weight.data = model.last.weight.data * 0.5
    return hidden


def fill_rows(model, hidden):
    model.last.weight.data[0] = 0.0
    return hidden.add(1).mul_(2)


def with_complex():
    model = Model(lambda model, hidden: hidden * model.phase.abs())
    model.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return model


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 4, sparse=True)

    def forward(self, hidden):
        return self.rows(torch.zeros(len(hidden), dtype=torch.int64)) + hidden


def tied_by_data():
    model = Model(lambda model, hidden: hidden)
    model.last.weight.data = model.first.weight.data
    return model


def buffers_together():
    model = Model(lambda model, hidden: hidden)
    model.register_buffer("same", model.mean.data)
    return model


class Kept(nn.Module):
    """Rows that the forward pass keeps short."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 4, max_norm=1.0)

    def forward(self, hidden):
        return self.rows(torch.zeros(len(hidden), dtype=torch.int64)) + hidden


def attribute(model, hidden):
    model.table += 1
    return hidden


def count(model, hidden):
    model.calls = getattr(model, "calls", 0) + 1
    return hidden / model.calls


def cache(model, hidden):
    model.calls = 1
    return hidden


def attend(model, hidden):
    rows = hidden.reshape(-1, 2, 1, 2)
    mask = torch.zeros(1, 1) if hasattr(model, "pieces") else None
    found = nn.functional.scaled_dot_product_attention(rows, rows, rows, mask, 0.25)
    return found.reshape(hidden.shape)


def hooked():
    model = Model(lambda model, hidden: hidden)
    model.last.weight.register_hook(lambda gradient: 2 * gradient)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Model(lambda model, hidden: hidden.detach() + hidden), Effects()),
        (lambda: Model(write), Effects(buffer="mean")),
        (lambda: Model(replace), Effects(buffer="mean")),
        (lambda: Model(attribute), Effects(buffer="table")),
        (lambda: Model(count), Effects(count="calls")),
        (lambda: Model(cache), Effects()),
        (lambda: Model(note), Effects()),
        (lambda: Model(clamp), Effects(written="last.weight")),
        (lambda: Model(clamp_data), Effects(written="last.weight")),
        (lambda: Model(set_data), Effects(written="last.weight")),
        (lambda: Model(fill_rows), Effects(written="last.weight")),
        (with_complex, Effects(complex="phase")),
        (Sparse, Effects(sparse="rows")),
        (tied_by_data, Effects(shared="'first.weight' and 'last.weight'")),
        (buffers_together, Effects()),
        (Kept, Effects(written="rows.weight")),
        (lambda: Model(grow), Effects(rebuilt="third")),
        (lambda: Model(prune), Effects(rebuilt="last.bias")),
        (lambda: Model(anew), Effects(rebuilt="last")),
        (lambda: Model(hook), Effects(untraced="a hook on a tensor's gradient")),
        (lambda: Named(hook), Effects()),
        (lambda: Model(lambda model, hidden: Reverse.apply(hidden)),
         Effects(untraced="the autograd function 'Reverse'")),
        (lambda: Named(lambda model, hidden: Reverse.apply(hidden)), Effects()),
        (lambda: Model(attend), Effects(attention="dropout of 0.25")),
        (lambda: Named(attend), Effects(attention="a mask of its own")),
        (hooked, Effects(hooked="last.weight")),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), MixtureOfExperts(2, 2, 4)), Effects()),
        (lambda: nn.Sequential(nn.BatchNorm1d(4).eval()), Effects()),
    ],
)  # fmt: skip
def test_what_is_seen(model, expected):
    assert effects_of(Task(model), (torch.zeros(8, 4),)) == expected


def test_of_a_model_that_fails_without_numbers_modules_are_looked_at():
    model = nn.Sequential(nn.BatchNorm1d(4))
    model.register_forward_hook(lambda module, given, found: 1 / float(found.sum()))
    assert effects_of(Task(lambda: model), (torch.ones(8, 4),)) == Effects(samples="0")
