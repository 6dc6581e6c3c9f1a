"""The optimizers that a member steps: without what wraps them, and several as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgetrain.errors import ConfigError

Optimizer = torch.optim.Optimizer

_WITHIN = "optimizer", "original_optimizer"
_TELLING = 16
"""Elements of a tensor that is near another one by chance only once in many millions of times."""


def plain_optimizers(given: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """Optimizers without what Accelerate, Lightning and Opacus wrap them in. ConfigError."""
    found = []
    for optimizer in [given] if not isinstance(given, list | tuple) else given:
        while within := [
            o for n in _WITHIN if isinstance(o := getattr(optimizer, n, 0), Optimizer)
        ]:
            optimizer = within[0]
        if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"optimizer = {type(optimizer).__name__}",
                "a torch.optim.Optimizer, or a list of them in the order of their steps",
            )
        found.append(optimizer)
    if not found or len(set(map(id, found))) < len(found):
        raise ConfigError(f"{len(found)} optimizers", "name each once, and at least one")
    return tuple(found)


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kept_copy(optimizer: Optimizer) -> str:
    """The name of what this optimizer keeps of a parameter that has its shape and is near it, as an
    average of it or a slow copy is, and no gradient or moment; "": there is none."""
    for parameter, kept in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or parameter.numel() < _TELLING:
            continue
        own = parameter.detach().double()
        for name, each in dict(kept).items():
            if isinstance(each, torch.Tensor) and each.shape == own.shape:
                away = each.detach().to(own) - own
                # Not by what all elements have in common either: a scale of ones beside sums of 1.
                pairs = (away, own), (away - away.mean(), own - own.mean())
                if all(far.norm() < size.norm() / 2 for far, size in pairs):
                    return str(name)
    return ""


class Together:
    """One or several optimizers, as a driver sees them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def each_of(stepper: object) -> Sequence[object]:
    """The optimizers that are stepped with this one: itself, or those that are together in it."""
    return stepper.optimizers if isinstance(stepper, Together) else [stepper]
