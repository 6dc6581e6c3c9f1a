"""What the mean of members' running variances lacks: how far their running means lie apart.

A normalisation layer's running mean m becomes a m + (1 - a) u in some batches of mean u, with
a = (1 - momentum)^batches. Its running square q moves alike, with u^2 in place of u. Averaged over
members, q - m^2 is the variance of the batches' means, and with it the mean of the variances is the
variance of all members' data. It is added where the fleet's model is shown, and nowhere in
training: so what a lossy codec or noise does to q and m never makes a variance smaller.
"""

from __future__ import annotations

import torch
from torch import nn


class Square:
    """The running square of a layer's mean, `tensor`, [channels], which is in the flat vector."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = f"{name}.running_square".removeprefix(".")
        self._layer = layer
        self.tensor = self._mean_of().detach().square()
        self.note()

    def _mean_of(self) -> torch.Tensor:
        return self._layer.get_buffer("running_mean")

    def note(self) -> None:
        """The mean is one that the vector had, and no batch's since."""
        self._before, self._seen = self._mean_of().clone(), self._batches()

    def _batches(self) -> int:
        return int(self._layer.get_buffer("num_batches_tracked"))

    def measure(self) -> None:
        """Take in the batches since the last `measure` or `note`."""
        seen, momentum = self._batches(), getattr(self._layer, "momentum", None)
        if (count := seen - self._seen) > 0:
            kept = self._seen / seen if momentum is None else (1.0 - float(momentum)) ** count
            if kept < 1:
                fresh = self._before.lerp(self._mean_of(), 1 / (1 - kept))
                self.tensor.lerp_(fresh.square(), 1 - kept)
        self.note()

    def widen(self) -> None:
        """Make the layer's running variance, a mean of members', that of all their data."""
        apart = (self.tensor - self._mean_of().square()).clamp_(min=0)
        self._layer.get_buffer("running_var").clamp_(min=0).add_(apart)


def spread_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers, by name, that count their batches, with a running mean and variance (not in half
    precision, which a mean's square does not bear)."""
    return {name: layer for name, layer in model.named_modules() if _has_running(layer)}


def _has_running(layer: nn.Module) -> bool:
    if not hasattr(layer, "momentum"):
        return False
    names = ("running_mean", "running_var", "num_batches_tracked")
    mean, variance, count = (layer._buffers.get(name) for name in names)
    if mean is None or variance is None or count is None:
        return False
    wide = torch.float32, torch.float64
    return mean.dtype in wide and (mean.dtype, mean.shape) == (variance.dtype, variance.shape)
