"""A task without data whose model has as many parameters as asked for: for measuring links.

What is trained means nothing; how many bytes an exchange has is what matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgetrain.errors import TaskError
from edgetrain.tasks.protocol import Batch, evaluating

MOST_ELEMENTS = 1 << 30


class _Point(nn.Module):
    """One vector of parameters, [elements], and its mean square as the output."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements))

    def forward(self) -> Tensor:
        return self.weight.square().mean()


@dataclass(frozen=True)
class Sized:
    """Members of a model of `elements` float32 parameters walk towards zero; see Task.

    The batches hold nothing that the loss depends on.
    """

    elements: int
    name: str = "sized"
    metric: str = "loss"
    better: str = "lower"
    target: float | None = None

    def model(self) -> nn.Module:
        return _Point(self.elements)

    def samples(self, member: int, members: int) -> int:
        return 1

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Batch]:
        while True:
            yield (torch.zeros(batch),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Half the sum of squares over the number of parameters; see Task."""
        loss: Tensor = model() / 2
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            return {"loss": float(model()) / 2}


def sized(elements: int = 10_000, seed: int = 0) -> Sized:
    """A task whose exchanges have 4 bytes times `elements` before the codec. `seed` is not used: it
    is there as every factory has it. Raises TaskError unless 1 <= elements <= 2^30."""
    if not 1 <= elements <= MOST_ELEMENTS:
        raise TaskError(f"elements = {elements}", f"allowed are 1 to {MOST_ELEMENTS}")
    return Sized(elements)
