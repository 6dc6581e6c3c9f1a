"""The local work of one device: gradients of its batches, and how good a model is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.tasks.experts import set_share
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.layerwise import LAYER_WISE
from edgetrain.tasks.protocol import Task


def optimizer_for(model: torch.nn.Module, table: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that a job's `optimizer` table names: torch's, LARS or LAMB. ConfigError names
    what is wrong."""
    settings = dict(table)
    name = str(settings.pop("name", "")).lower()
    known: dict[str, type[torch.optim.Optimizer]] = {
        cls.__name__.lower(): cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    known.update(LAYER_WISE)
    del known["optimizer"]
    if name == "sparseadam":
        raise ConfigError(
            "optimizer 'SparseAdam' takes sparse gradients", "use adam: a job's are dense"
        )
    cls = known.get(name)
    if cls is None:
        raise ConfigError(f"no optimizer '{name}'", did_you_mean(name, known))
    _check(name, cls, settings)
    try:
        return cls([p for p in model.parameters() if p.requires_grad], **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer '{name}' with {settings}: {error}") from None


def _check(name: str, cls: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    """Refuse settings that this optimizer lacks or misses, and what is no number where it wants
    one: torch looks at ranges only."""
    wanted = dict(inspect.signature(cls).parameters)
    del wanted["params"]
    for key, value in settings.items():
        if key not in wanted:
            raise ConfigError(f"optimizer '{name}' has no '{key}'", did_you_mean(key, wanted))
        numeric = type(wanted[key].default) in (int, float) or key == "lr"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (numeric and not is_number) or (is_number and not math.isfinite(value)):
            raise ConfigError(f"optimizer '{name}': {key} = {value!r} (allowed is a finite number)")
    for key, parameter in wanted.items():
        if parameter.default is inspect.Parameter.empty and key not in settings:
            raise ConfigError(f"optimizer '{name}' needs {key}", f"as in {key}=1.0")


@dataclass(frozen=True)
class Tuning:
    """What is done to an optimizer before each of its steps."""

    factor: Callable[[int], float] | None = None
    """Of the learning rate, for the step of the job with this number; None: always 1."""
    clip: float = 0.0
    """Length that the gradient, of all parameters together, is cut to; 0: it is not."""

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing."""
        return self.factor is None and not self.clip


_STEP = "step_of_job"
"""The key of an optimizer's groups with the number of the next step; so checkpoints have it."""


def tune(optimizer: torch.optim.Optimizer, tuning: Tuning) -> None:
    """Let the optimizer's steps be tuned from now on. They count from 0, or as `begin_at` says."""
    if tuning.is_idle:
        return
    begin_at(optimizer, 0)
    rates = [float(group["lr"]) for group in optimizer.param_groups]

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for rate, group in zip(rates, optimizer.param_groups, strict=True):
            if tuning.factor is not None:
                group["lr"] = rate * tuning.factor(group[_STEP])
            group[_STEP] += 1
        if tuning.clip:
            every = (p for group in optimizer.param_groups for p in group["params"])
            torch.nn.utils.clip_grad_norm_([p for p in every if p.grad is not None], tuning.clip)

    optimizer.register_step_pre_hook(before_step)


def begin_at(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The next step of a tuned optimizer is the job's step with this number."""
    for group in optimizer.param_groups:
        group[_STEP] = step


class Local(Protocol):
    """The work of one member between exchanges: its gradients, and how good a model is."""

    takes_many: bool
    """Whether steps that nobody looks between are taken in one go, optimizer and all."""

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """Fill the member's gradient with that of its next batch.

        What is returned gives the batch's loss. The gradient need not be there before it is called
        or pulled; and nobody looks at the parameters before `ahead` more steps have been taken.
        """

    def evaluate(self) -> dict[str, float]:
        """The task's figures for the member's parameters as they are."""


class OneModel:
    """The usual `Local`: a torch model and its batches, one after the other."""

    takes_many = False

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        flat: FlatModel,
        batches: Iterator[tuple[torch.Tensor, ...]],
        accumulate: int = 1,
    ) -> None:
        """A step's gradient is the mean of those of `accumulate` batches."""
        self._task, self._model, self._flat, self._batches = task, model, flat, batches
        self._accumulate = accumulate
        flat.note_used()

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local."""
        if self._accumulate == 1:
            loss = self._task.loss(self._model, next(self._batches))
            self._flat.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = self._accumulated()
        self._flat.drop_unused()
        return loss.item

    def _accumulated(self) -> torch.Tensor:
        """Add up the gradients of several batches, one in memory at a time; their mean loss."""
        self._flat.zero_grad()
        total = torch.zeros(())
        set_share(self._model, 1 / self._accumulate)
        for _ in range(self._accumulate):
            loss = self._task.loss(self._model, next(self._batches)) / self._accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach().to(total.device)
        return total

    def evaluate(self) -> dict[str, float]:
        """See Local."""
        return self._task.evaluate(self._model)
