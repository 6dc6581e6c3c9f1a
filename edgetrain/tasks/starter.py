"""A task to start from: replace the data, the model and the loss by your own.

`edgetrain init job.toml --task mine.py` writes this file beside a job that names it. All of it runs
on every member and on no hub. What a task promises is written in `edgetrain.tasks.Task`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.tasks.partition import Shards
from edgetrain.tasks.protocol import evaluating


class Task:
    """Learn sin(x) from noisy samples; every member holds its part of them."""

    name = "sine"
    # The figure that people look at is a key of what `evaluate` returns.
    metric, better, target = "loss", "lower", 0.01

    def __init__(self, samples: int = 2000, partition: str = "iid", seed: int = 0) -> None:
        # Arguments are the keys of the job's [data] table. Load the data here, the same on every
        # machine: a device that holds data of its own reads it from a folder that [data] names.
        noise = torch.Generator().manual_seed(0)
        self.x = torch.linspace(-4, 4, samples).unsqueeze(1)
        self.y = self.x.sin() + 0.05 * torch.randn(self.x.shape, generator=noise)
        # Who gets which samples: "iid", or "dirichlet(0.3)", which mixes these ten classes.
        classes = np.arange(samples) * 10 // samples
        self.shards = Shards(classes, partition, seed)

    def model(self) -> nn.Module:
        """Called once on each member. edgetrain seeds torch, so that all start with one model."""
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def samples(self, member: int, members: int) -> int:
        """How many samples this member holds: its weight in the fleet's mean."""
        return len(self.shards.of(member, members))

    def batches(
        self, member: int, members: int, batch: int, seed: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches of this member's samples, all of one shape."""
        order, _ = self.shards.batches(member, members, batch, seed)
        return ((self.x[indices], self.y[indices]) for indices in order)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of a batch. edgetrain calls backward() and steps the optimizer."""
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on data that nobody trains on, always with "loss"."""
        with evaluating(model):
            return {"loss": float(self.loss(model, (self.x, self.x.sin())))}
