"""A task whose gradients are the numbers that it draws, and whose evaluation draws as many and
leaves the model in eval mode."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SIZE = 8_000
"""Numbers of each kind in a step, of mean 0 and variance 1."""
DRAWS = {
    "dropout": lambda training: functional.dropout(torch.ones(SIZE), 0.5, training) - 1,
    "randn": lambda training: torch.randn(SIZE),
    "numpy": lambda training: torch.from_numpy(np.random.standard_normal(SIZE)).float(),
    "python": lambda training: torch.tensor([random.gauss(0, 1) for _ in range(SIZE)]),
}


class Noise(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.weight = nn.Parameter(torch.zeros(len(kinds), SIZE))

    def forward(self, rows):
        return (self.weight * torch.stack([DRAWS[k](self.training) for k in self.kinds])).sum()


class Drawing:
    name, metric, better, target = "drawing", "loss", "lower", None

    def __init__(self, kinds=tuple(DRAWS), partition="iid", seed=0):
        self.kinds = list(kinds)

    def model(self):
        return Noise(self.kinds)

    def samples(self, member, members):
        return 8

    def batches(self, member, members, batch, seed):
        while True:
            yield (torch.zeros(batch, 1),)

    def pick(self, member, members, chosen, rng):
        return (torch.zeros(len(chosen), 1),)

    def loss(self, model, batch):
        return model(*batch)

    def evaluate(self, model):
        model.eval()
        return {"loss": float(model(torch.zeros(1, 1)).detach()) + float(torch.rand(()))}
