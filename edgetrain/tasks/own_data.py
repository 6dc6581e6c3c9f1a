"""Evaluation of a model on the data that a member holds out of its own, as sums and counts.

So that a fleet's figures are those over all members' data, not means of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from edgetrain.errors import ConfigError, TaskError
from edgetrain.tasks.draws import DRAWING, generators_kept, seed_generators
from edgetrain.tasks.protocol import (
    Batch,
    HoldsOut,
    Task,
    counts_of,
    evaluating,
)

MOST_FIGURES = 256
LONGEST_NAME = 40


FigureSums = Mapping[str, tuple[float, float]]
"""Figures by name, each as a sum and what it is a sum over: the figure is their quotient."""


@runtime_checkable
class Measures(Protocol):
    """An optional part of a task: figures of held-out data other than the loss."""

    def measure(self, model: nn.Module, batch: Batch) -> FigureSums:
        """Figures of a batch, "loss" among them. The model is in eval mode, without gradients."""


def added(several: Iterable[FigureSums]) -> dict[str, tuple[float, float]]:
    """The sums of several sums, and what they are over."""
    found: dict[str, tuple[float, float]] = {}
    for sums in several:
        for name, (value, count) in sums.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = before[0] + value, before[1] + count
    return found


def quotients(several: Iterable[FigureSums]) -> dict[str, float]:
    """The figures over several batches; those over nothing are left out."""
    return {name: value / count for name, (value, count) in added(several).items() if count}


def hold_out(task: Task, share: float) -> None:
    """Keep a share of each shard out of training from now on; 0: nothing. ConfigError for a task
    whose shards edgetrain does not deal out."""
    shards: Any = getattr(task, "shards", None)
    if isinstance(task, HoldsOut) and hasattr(shards, "hold_out"):
        shards.hold_out = share
    elif share:
        raise ConfigError(
            f"train.hold_out = {share:g}: task '{task.name}' has no held_out(member, members), or "
            "no `shards` that edgetrain deals out",
            "see docs/how-to/own-data.md; a task with its own division has no train.hold_out",
        )


def evaluation_of(
    task: Task, members: Sequence[int], of: int
) -> Callable[[Task, nn.Module], dict[str, Any]] | None:
    """What evaluates a model on the held-out data of these members' shards; None: they have none.

    The model's modes are as before afterwards, and so are the generators of the process. TaskError
    for what are no sums and counts.
    """
    if not hasattr(task, "held_out"):  # a HoldsOut; isinstance of a Protocol is slow
        return None

    def batches() -> Iterable[Batch]:
        return (batch for member in members for batch in task.held_out(member, of))

    if next(iter(batches()), None) is None:
        return None

    def evaluate(task: Task, model: nn.Module) -> dict[str, Any]:
        with DRAWING, generators_kept(), evaluating(model):
            seed_generators(0)
            return _checked(task, added(measured(task, model, batch) for batch in batches()))

    return evaluate


def measured(task: Task, model: nn.Module, batch: Batch) -> FigureSums:
    """The figures of a batch, as plain numbers: of a task that does not say which, its loss.
    TaskError for what are no pairs of numbers."""
    if not isinstance(task, Measures):
        count = float(counts_of(task, [batch])[0])
        return {"loss": (float(task.loss(model, batch)) * count, count)}
    found = task.measure(model, batch)
    try:
        return {str(name): (float(value), float(of)) for name, (value, of) in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        said = " ".join(repr(found).split())[:80]
        raise TaskError(
            f"task '{task.name}': measure(model, batch) gives {said}",
            "a sum and a count by name, as in {'loss': (1.5, 4)}",
        ) from None


def _checked(task: Task, sums: dict[str, Any]) -> dict[str, Any]:
    said = ""
    if not 0 < len(sums) <= MOST_FIGURES:
        said = f"{len(sums)} figures"
    for name, (_, count) in sums.items():
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            said = f"a figure named {name[: LONGEST_NAME + 1]!r}"
        elif not (math.isfinite(count) and count >= 0):
            said = f"{name!r} over {count!r}"
        if said:
            break
    if said:
        raise TaskError(
            f"task '{task.name}': measure(model, batch) gives {said}",
            f"1 … {MOST_FIGURES} names of at most {LONGEST_NAME} characters, each with a sum and "
            "a count from 0",
        )
    return sums
