"""What a task is: the model, the data of each member, the loss and the evaluation of one job.

Only the protocol and what every task needs to keep it. No data is read here, no model is built.
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

    The factory is called with the keys of the job's [data] table. Everything a task returns is
    deterministic in the factory's and the method's arguments, the same on every machine, so that
    members agree on their shards without talking to each other.
    """

    name: str
    metric: str
    """The key of `evaluate` that people look at: "accuracy", "loss"."""
    better: str
    """"higher" or "lower": which way the metric improves."""
    target: float | None
    """The metric's value that counts as trained; None where nobody has said."""

    def model(self) -> nn.Module:
        """A fresh model on the CPU. Its weights are drawn from torch's global generator, which the
        caller seeds: members that seed alike start alike."""

    def samples(self, member: int, members: int) -> int:
        """How many samples the shard of `member` (from 0) holds when there are `members`."""

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Batch]:
        """Endless batches of the member's shard, shuffled anew every epoch; or an epoch of them, as
        a list or a DataLoader, which is begun again at its end.

        The same ones for the same arguments. All have the same shapes, `batch` first. The tensors
        are fresh ones: the caller owns them.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch, a scalar with a graph; the batch may be on another device."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data, always with "loss". The caller puts the model's modes back."""


@runtime_checkable
class Positioned(Protocol):
    """A task that can begin its batches anywhere without making those before."""

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
    """A member's batches without the first `start`, made and dropped if it has to be.

    What is no iterator, as a list or a loader, begins again at its end; a rest that is smaller than
    a batch is left out, as a loader's `drop_last` does. TaskError for what are no batches of
    `batch` samples, and at the end of an iterator, before so many `steps` of the job are taken.
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
    """What a task may offer besides: any samples of a shard. Privacy of examples asks for it."""

    def pick(
        self, member: int, members: int, chosen: NDArray[np.int64], rng: np.random.Generator
    ) -> Batch:
        """One batch of the samples at these places (0 to samples - 1, increasing, at least one) of
        the member's shard; `rng` is for what varies them. An example of it is a row of it."""


@runtime_checkable
class Counted(Protocol):
    """What a task may offer besides, if its loss is no mean over samples and positions alike."""

    def counted(self, batch: Batch) -> float | Tensor:
        """How much the mean of `loss` is over: the targets of a batch that are not left out, or the
        sum of their weights. 0: nothing of it counts, and its loss is not looked at."""


@runtime_checkable
class HoldsOut(Protocol):
    """What a task may offer besides: data of each member that it is evaluated on there."""

    def held_out(self, member: int, members: int) -> Iterable[Batch]:
        """Those of the member's samples in batches of any sizes; none: it has none."""


@runtime_checkable
class Grouped(Protocol):
    """What a task may offer besides: parameters with settings of their own."""

    optimizer_groups: list[dict[str, Any]]
    """As `groups` of a job's `train.optimizer`, which holds instead where it is there."""


def is_counted(task: Task) -> bool:
    """Whether a task is `Counted`. One that another task is within may be, too."""
    return callable(getattr(task, "counted", None))


def counts_of(task: Task, batches: Sequence[Batch]) -> NDArray[np.float64]:
    """What counts of each of these batches, as the task says; their samples: it does not say."""
    if not is_counted(task):
        return np.array([float(len(batch[0])) for batch in batches])
    counted: Callable[[Batch], float | Tensor] = task.counted  # type: ignore[attr-defined]
    return np.array([float(counted(batch)) for batch in batches])


MEMBERS_OF_TASK = ("name", "metric", "better", "target")
METHODS_OF_TASK = ("model", "samples", "batches", "loss", "evaluate")


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each submodule has its mode back: `model.train()` would also switch on what the
    caller had frozen in eval."""
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
