"""A task whose models differ in a frozen layer, as those of scripts that set no seed."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from edgetrain.tasks import digits

MADE: list[nn.Module] = []
"""All models that were made in this process, the oldest first."""
_NUMBERS = itertools.count(1)


class Unseeded:
    """Digits, behind a frozen layer and beside a buffer that hold a number of their own."""

    def __init__(self) -> None:
        self._digits = digits()

    def __getattr__(self, name):
        return getattr(self._digits, name)

    def model(self):
        """Equal in what is trained."""
        frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        model = nn.Sequential(
            nn.Flatten(), frozen, nn.Unflatten(1, (1, 8, 8)), self._digits.model()
        )
        number = float(next(_NUMBERS))
        with torch.no_grad():
            frozen.weight.copy_(torch.eye(64) * (1 + number / 1000))
        model.register_buffer("number", torch.tensor(number))
        MADE.append(model)
        return model


def unseeded():
    """The task of a job."""
    return Unseeded()


def number_of(model):
    """What its frozen layer and its buffer hold; they agree."""
    number = float(model.number)
    assert torch.equal(model[1].weight, torch.eye(64) * (1 + number / 1000))
    return number
