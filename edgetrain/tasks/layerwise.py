"""LARS and LAMB: optimizers for large batches, whose steps are as long as each tensor allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from edgetrain.errors import ConfigError

Pieces = Iterable[tuple[int, int]]
"""Borders of the tensors in a flat vector."""


class LayerWise(torch.optim.Optimizer):
    """What both have in common: a step for each tensor, scaled by its length.

    A parameter that is a whole model, flat, says in `pieces` where its tensors begin and end;
    any other is one tensor.
    """

    pieces: Pieces | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ConfigError(
                        f"optimizer '{type(self).__name__}' with a sparse gradient",
                        "give the model Embedding(sparse=False), or take sgd",
                    )
                self._step_tensor(parameter, parameter.grad, group)

    def _step_tensor(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _each(self, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if self.pieces is None:
            yield vectors
            return
        for start, stop in self.pieces:
            yield tuple(vector[start:stop] for vector in vectors)


def _ranges(name: str, **values: tuple[float, float]) -> None:
    for key, (value, low) in values.items():
        if not value >= low:
            raise ValueError(f"{name}: {key} = {value} (allowed are {low:g} and more)")


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling (You et al., Large Batch Training of Convolutional Networks,
    2017, algorithm 1), for each tensor w with gradient g::

        local = trust |w| / (|g| + weight_decay |w|)       (1 where either is 0)
        v     = momentum v + lr local (g + weight_decay w)
        w     = w - v
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        _ranges(
            "lars", lr=(lr, 0), momentum=(momentum, 0), weight_decay=(weight_decay, 0),
            trust=(trust, 0),
        )  # fmt: skip
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    def _step_tensor(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        decay = group["weight_decay"]
        for w, g, v in self._each(parameter, gradient, state["velocity"]):
            length, slope = w.norm(), g.norm()
            local = group["trust"] * length / (slope + decay * length)
            local = torch.where((length > 0) & (slope > 0), local, torch.ones_like(local))
            v.mul_(group["momentum"]).add_((g + decay * w) * (group["lr"] * local))
            w.sub_(v)


class LAMB(LayerWise):
    """Layer-wise Adam for batches (You et al., Large Batch Optimization for Deep Learning, ICLR
    2020, algorithm 2), for each tensor w with gradient g::

        m, v  = means of g and g g, as Adam's, without bias
        r     = m / (sqrt(v) + eps) + weight_decay w
        w     = w - lr (|w| / |r|) r                       (without the factor where either is 0)
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _ranges("lamb", lr=(lr, 0), eps=(eps, 0), weight_decay=(weight_decay, 0))
        first, second = betas
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError(f"lamb: betas = {list(betas)} (allowed are two from 0 to less than 1)")
        super().__init__(
            params, {"lr": lr, "betas": (first, second), "eps": eps, "weight_decay": weight_decay}
        )

    def _step_tensor(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        state["step"] += 1
        (first, second), count = group["betas"], float(state["step"])
        mean, square = state["mean"], state["square"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        for w, m, v in self._each(parameter, mean, square):
            root = (v / (1 - second**count)).sqrt_().add_(group["eps"])
            step = (m / (1 - first**count)).div_(root).add_(w, alpha=group["weight_decay"])
            length, reach = w.norm(), step.norm()
            ratio = torch.where((length > 0) & (reach > 0), length / reach, torch.ones_like(reach))
            w.sub_(step * (group["lr"] * ratio))


LAYER_WISE: dict[str, type[LayerWise]] = {"lars": LARS, "lamb": LAMB}
"""By the names that jobs know them by."""
