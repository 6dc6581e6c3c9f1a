"""The protocol of tasks: the model, the data of each member, the loss and the evaluation of a job.

Only the protocol, and helpers for every task. No data is read here, no model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgetrain.errors import TaskError

Batch = tuple[Tensor, ...]


@runtime_checkable
class Task(Protocol):
    """One learning problem. A job names a *factory* of it, `task = "module:object"`.

    The factory gets the keys of the job's [data] table. All results of a task are deterministic in
    the factory's and the method's arguments, and the same on every machine: members agree on their
    shards without a message.
    """

    name: str
    metric: str
    """The key of `evaluate` for tables and pictures: "accuracy", "loss"."""
    better: str
    """"higher" or "lower": which way the metric improves."""
    target: float | None
    """Goal of the metric; None: none."""

    def model(self) -> nn.Module:
        """A new model on the CPU, with weights from torch's global generator: with equal seeds
        members have equal weights."""

    def samples(self, member: int, members: int) -> int:
        """Number of samples in the shard of `member` (from 0) of `members`."""

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Batch]:
        """Endless batches of the member's shard, shuffled anew every epoch; or one epoch as a list
        or a DataLoader, repeated at its end.

        Equal arguments give equal batches. All have the same shapes, `batch` first. The tensors
        are new: the caller owns them.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch, a scalar with a graph; the batch may be on another device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data, always with "loss". The caller restores the model's modes."""


@runtime_checkable
class Positioned(Protocol):
    """A task with batches from any position, without making earlier ones."""

    def batches_from(
        self, member: int, members: int, batch: int, seed: int, start: int
    ) -> Iterator[Batch]:
        """The batches of `batches` without the first `start`."""


def batches_from(
    task: Task,
    member: int,
    members: int,
    batch: int,
    seed: int,
    start: int = 0,
    steps: int = 0,
    accumulate: int = 1,
) -> Iterator[Batch]:
    """A member's batches without the first `start`, made and dropped if necessary.

    A list or a loader begins again at its end; an incomplete last batch is left out, like with a
    loader's `drop_last`. Raises TaskError for batches without exactly `batch` samples, and at the
    end of an iterator before the job's `steps` are taken.
    """
    if isinstance(task, Positioned):
        source: Any = task.batches_from(member, members, batch, seed, start)
        return _checked(task, source, batch, start, steps, accumulate)
    source = task.batches(member, members, batch, seed)
    return islice(_checked(task, source, batch, 0, steps, accumulate), start, None)


def _checked(
    task: Task, source: Any, batch: int, given: int, steps: int, accumulate: int
) -> Iterator[Batch]:
    again, before = not isinstance(source, Iterator), -1
    source = source if isinstance(source, Iterable) else [source]
    while (again and given > before) or before < 0:
        before = given
        for each in source:
            found = tuple(each) if isinstance(each, list) else each
            first = found[0] if isinstance(found, tuple) and found else found
            samples = len(first) if isinstance(first, Tensor) and first.dim() else 0
            if again and given > before and 0 < samples < batch:
                continue
            if samples != batch:
                raise TaskError(
                    f"task '{task.name}': batches(…) gives a {type(each).__name__} of {samples} "
                    f"samples, not {batch}", "tuples of tensors, each with `batch` samples",
                )  # fmt: skip
            given += 1
            yield found
    said = f"{given // accumulate} of {steps} steps" if steps else f"{given} batches"
    raise TaskError(
        f"batches of task '{task.name}' ended after {said}",
        "let them go on for ever, or return a list or a loader: it begins again at its end",
    )


@runtime_checkable
class Picks(Protocol):
    """An optional part of a task: any samples of a shard, for privacy of examples."""

    def pick(
        self, member: int, members: int, chosen: NDArray[np.int64], rng: np.random.Generator
    ) -> Batch:
        """One batch of the samples at these places (0 to samples - 1, increasing, at least one) of
        the member's shard; `rng`: for augmentation. Each row is an example."""


@runtime_checkable
class Counted(Protocol):
    """An optional part of a task, for a loss other than the mean over samples and positions."""

    def counted(self, batch: Batch) -> float | Tensor:
        """Denominator of `loss`: the number of a batch's targets in the mean, or the sum of their
        weights. 0: the batch does not count, and its loss is ignored."""


@runtime_checkable
class HoldsOut(Protocol):
    """An optional part of a task: evaluation data of each member."""

    def held_out(self, member: int, members: int) -> Iterable[Batch]:
        """The member's evaluation samples, in batches of any sizes; may be empty."""


@runtime_checkable
class Grouped(Protocol):
    """An optional part of a task: parameters with settings of their own."""

    optimizer_groups: list[dict[str, Any]]
    """Like `groups` of a job's `train.optimizer`; the job's groups win."""


def is_counted(task: Task) -> bool:
    """Whether a task, or the task within it, is `Counted`."""
    return callable(getattr(task, "counted", None))


def counts_of(task: Task, batches: Sequence[Batch]) -> NDArray[np.float64]:
    """The task's `counted` of each batch, or else its number of samples."""
    if not is_counted(task):
        return np.array([float(len(batch[0])) for batch in batches])
    counted: Callable[[Batch], float | Tensor] = task.counted  # type: ignore[attr-defined]
    return np.array([float(counted(batch)) for batch in batches])


MEMBERS_OF_TASK = ("name", "metric", "better", "target")
METHODS_OF_TASK = ("model", "samples", "batches", "loss", "evaluate")


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore each submodule's mode at the end: `model.train()` would also change modules kept in
    eval by the caller."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Eval mode without gradients; yields the model's device, and restores each submodule's
    mode."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield device_of(model)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
