"""Slices of a batch that every member holds: loss and gradient of any of them.

Knows neither hubs nor members, but for whose shard is the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from edgetrain.errors import refuse_first
from edgetrain.tasks.draws import figures_of, generators_kept, seed_generators
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.protocol import Picks, Task, is_counted
from edgetrain.tasks.work import Evaluation

CHUNK = 1024
"""Samples that are read at a time for a digest."""


class Slices:
    """The `Local` of a member whose hub hands out work.

    A slice is computed `chunk` samples at a time. What is drawn for it (augmentation, dropout) is
    drawn anew from `seed` and its first sample each time, so that a slice of a given batch has one
    loss and one gradient at given parameters, whoever computes it.
    """

    takes_many = False

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        flat: FlatModel,
        shard: tuple[int, int],
        batch: int,
        chunk: int,
        seed: int,
    ) -> None:
        """`shard`: which of how many it is; `batch`: samples, the first of the shard; 0: all.
        ConfigError as `check_slices`."""
        check_slices(task, shard, batch)
        self._task, self._model, self._flat, self._shard = task, model, flat, shard
        self._batch = batch or task.samples(*shard)
        self._chunk, self._seed = chunk, seed
        self._losses: list[float] = []
        self._loss = float("nan")
        flat.note_used()

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local: nothing is computed before the hub asks for it. Gives the mean loss of the
        slices that were computed since; where there is none, the one before."""
        self._losses = []
        return self._mean

    def _mean(self) -> float:
        if self._losses:
            self._loss = sum(self._losses) / len(self._losses)
        return self._loss

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        return by(self._task, self._model)

    def samples(self, number: int, of: int) -> tuple[int, int]:
        """The first sample of a slice, and the first that follows it."""
        return number * self._batch // of, (number + 1) * self._batch // of

    def compute(self, number: int, of: int, gradient: bool) -> tuple[float, int]:
        """The mean loss of a slice, and its samples; with `gradient` its mean gradient, too."""
        first, stop = self.samples(number, of)
        count, total = stop - first, 0.0
        self._flat.zero_grad()
        with generators_kept(), torch.set_grad_enabled(gradient):
            seed_generators(self._seed + first)
            for start in range(first, stop, self._chunk):
                rows = np.arange(start, min(start + self._chunk, stop))
                assert isinstance(self._task, Picks)
                rng = np.random.default_rng([self._seed, int(rows[0])])
                loss = self._task.loss(self._model, self._task.pick(*self._shard, rows, rng)) * (
                    len(rows) / count
                )
                if gradient:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        self._flat.drop_unused()
        self._losses.append(total)
        return total, count


def check_slices(task: Task, shard: tuple[int, int], batch: int) -> None:
    """ConfigError for a task whose data cannot be cut into slices, or a batch of more than that."""
    refuse_first(
        (not isinstance(task, Picks),
         f"task '{task.name}' has no pick(), which gives any samples of the data",
         "lbfgs computes slices of a batch: add it (docs/how-to/tasks.md), or set dga or sync-sgd"),
        (is_counted(task),
         f"task '{task.name}' counts other things than samples, and slices are weighed by these",
         "choose dga or sync-sgd"),
        (batch > task.samples(*shard),
         f"lbfgs: batch = {batch}: the data have {task.samples(*shard)} samples",
         "say batch = all, or at most that many"),
    )  # fmt: skip


def digest_of(task: Task, shard: tuple[int, int], batch: int) -> str:
    """A digest of a batch, as slices have it without augmentation drawn elsewhere; of its length,
    too. ConfigError as `check_slices`."""
    check_slices(task, shard, batch)
    assert isinstance(task, Picks)
    found, samples = hashlib.sha256(), batch or task.samples(*shard)
    for start in range(0, samples, CHUNK):
        rows = np.arange(start, min(start + CHUNK, samples))
        for tensor in task.pick(*shard, rows, np.random.default_rng([0, start])):
            found.update(tensor.contiguous().numpy().tobytes())
    found.update(str(samples).encode())
    return found.hexdigest()
