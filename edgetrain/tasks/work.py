"""The local work of one device: gradients of its batches, and how good a model is."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Protocol

import torch

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.tasks.draws import figures_of, seed_step
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.protocol import Task, counts_of

Evaluation = Callable[[Task, torch.nn.Module], dict[str, Any]]
"""Finds out how good a model is."""

Named = Iterable[tuple[str, torch.Tensor]]
"""Parameters, each with the name that the model has for it."""


def optimizer_for(
    model: torch.nn.Module | Named, table: dict[str, Any], task: Task | None = None
) -> torch.optim.Optimizer:
    """The optimizer that a job's `optimizer` table names, of a model or a part of one: torch's,
    LARS or LAMB. Its groups are the table's, or else those of the task's `optimizer_groups`.
    ConfigError names what is wrong."""
    settings = dict(table)
    groups = settings.pop("groups", None)
    if groups is None:
        groups = getattr(task, "optimizer_groups", [])
    groups = groups if isinstance(groups, list) else [groups]
    name = str(settings.pop("name", "")).lower()
    known: dict[str, type[torch.optim.Optimizer]] = {
        cls.__name__.lower(): cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    del known["optimizer"]
    if name not in known:
        from edgetrain.tasks.layerwise import LAYER_WISE

        known.update(LAYER_WISE)
    if name == "sparseadam":
        raise ConfigError(
            "optimizer 'SparseAdam' takes sparse gradients", "use adam: a job's are dense"
        )
    cls = known.get(name)
    if cls is None:
        raise ConfigError(f"no optimizer '{name}'", did_you_mean(name, known))
    _check(name, cls, settings)
    is_whole = isinstance(model, torch.nn.Module)
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    trained = [(key, parameter) for key, parameter in named if parameter.requires_grad]
    for group in groups:
        _check_group(name, cls, group, trained if is_whole else None)
    try:
        plain = _uncompiled(cls)  # type: ignore[arg-type]  # a class, whose instances have no hash
        return plain(_grouped(trained, groups), **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer '{name}' with {settings}: {error}") from None


@functools.cache
def _uncompiled(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """`cls` without what keeps torch.compile out of its methods: nothing of ours compiles them, and
    for that they import torch._dynamo, a second of processor time and 100 MB of a process."""
    plain = inspect.unwrap(cls.step)

    def step(self: torch.optim.Optimizer, *args: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return plain(self, *args, **named)

    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    return type(cls.__name__, (cls,), {**methods, "step": step})


VECTORS = "vectors"
"""In place of a name pattern: parameters of at most one dimension, as norms and biases are."""


def _grouped(named: Named, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters in the groups whose patterns match first; those of none come first."""
    found: list[dict[str, Any]] = [{"params": []}]
    for group in groups:
        found.append({key: each for key, each in group.items() if key != "parameters"})
        found[-1]["params"] = []
    for name, parameter in named:
        place = next((i for i, g in enumerate(groups, 1) if _matches(name, parameter, g)), 0)
        found[place]["params"].append(parameter)
    return [group for group in found if group["params"]]


def _matches(name: str, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    return any(
        parameter.dim() <= 1 if pattern == VECTORS else fnmatchcase(name, pattern)
        for pattern in group["parameters"]
    )


def _check_group(
    name: str,
    cls: type[torch.optim.Optimizer],
    group: Any,
    whole: list[tuple[str, torch.Tensor]] | None,
) -> None:
    """Refuse a group without parameters of the `whole` model, or with unknown settings."""
    patterns = group.get("parameters") if isinstance(group, dict) else None
    if not (isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)):
        raise ConfigError(
            f"optimizer '{name}': a group is {group!r}",
            "as in { parameters = ['vectors', '*.bias'], weight_decay = 0.0 }",
        )
    settings = {key: value for key, value in group.items() if key != "parameters"}
    _check(name, cls, settings, needs=False)
    if whole is not None and not any(_matches(*each, group) for each in whole):
        raise ConfigError(
            f"optimizer '{name}': no parameter of the model is in the group {patterns}",
            did_you_mean(patterns[0], [key for key, _ in whole]) if patterns else VECTORS,
        )


def _check(
    name: str, cls: type[torch.optim.Optimizer], settings: dict[str, Any], needs: bool = True
) -> None:
    """Refuse settings that this optimizer lacks or, if it `needs` all of them, misses, and what is
    no number where it wants one: torch looks at ranges only."""
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
        if needs and parameter.default is inspect.Parameter.empty and key not in settings:
            raise ConfigError(f"optimizer '{name}' needs {key}", f"as in {key}=1.0")


@dataclass(frozen=True)
class Tuning:
    """Changes of an optimizer before each of its steps."""

    factor: Callable[[int], float] | None = None
    """Factor of the learning rate, for the step with this number in the job; None: always 1."""
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

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        """What `by` finds out about the member's parameters as they are: the task's figures."""


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
        if self._accumulate == 1:
            loss = self._task.loss(self._model, next(self._batches))
            self._flat.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = self._accumulated()
        self._flat.drop_unused()
        return loss.item

    def _accumulated(self) -> torch.Tensor:
        """Add up gradients of several batches, one at a time; the mean over what counts."""
        from edgetrain.tasks.experts import set_share

        self._flat.zero_grad()
        total = torch.zeros(())
        set_share(self._model, 1 / self._accumulate)
        batches = list(islice(self._batches, self._accumulate))
        counts = counts_of(self._task, batches)
        for batch, count in zip(batches, counts, strict=True):
            if not count:
                continue
            loss = self._task.loss(self._model, batch) / (counts.sum() / count)
            loss.backward()
            total = total + loss.detach().to(total.device)
        return total

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        return by(self._task, self._model)


class OwnDraws:
    """A member's work, whose steps draw what follows from the job's seed, the member and the
    step."""

    takes_many = False

    def __init__(
        self,
        inner: Local,
        seed: int,
        member: int,
        step: int = 0,
        freeze: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`freeze` is called after each gradient, with the number of the step in the job."""
        self._inner, self._of, self._freeze = inner, (seed, member), freeze
        self.step = step
        """The number of the next step in the job."""

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        seed_step(*self._of, self.step)
        loss_of = self._inner.backward()
        self._freeze(self.step)
        self.step += 1
        return loss_of

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        return self._inner.evaluate(by)
