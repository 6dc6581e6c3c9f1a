"""A mixture of experts: feed-forward layers of which each position uses two.

As GShard has it (Lepikhin et al., 2021): a gate chooses two experts of a position, whose outputs
are added up by its weights; an expert takes a limited number of positions of a sample, first
choices before second ones, and those beyond pass by; a small loss keeps the gate from always
choosing the same. Samples do not know of each other: however they are spread over ranks and
micro-batches, they train the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch import Tensor, nn

CHOICES = 2
"""Experts of a position."""


class Experts(nn.Module):
    """Feed-forward layers side by side, [experts, positions, width] in and out.

    A group of ranks can divide any module that has the attribute `experts`, their number, takes
    and returns such tensors, and has experts as the first dimension of its parameters.
    """

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.experts = experts
        self.first = nn.Parameter(torch.empty(experts, width, inner))
        self.first_bias = nn.Parameter(torch.empty(experts, 1, inner))
        self.second = nn.Parameter(torch.empty(experts, inner, width))
        self.second_bias = nn.Parameter(torch.empty(experts, 1, width))
        for parameter, fan_in in (
            (self.first, width), (self.first_bias, width),
            (self.second, inner), (self.second_bias, inner),
        ):  # fmt: skip
            nn.init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5)

    def forward(self, positions: Tensor) -> Tensor:
        inner = F.gelu(torch.baddbmm(self.first_bias, positions, self.first))
        return torch.baddbmm(self.second_bias, inner, self.second)


class MixtureOfExperts(nn.Module):
    """[samples, length, width] in and out; 0 for positions that no expert has room for.

    `experts` feed-forward layers with `inner` hidden values; an expert takes `capacity` times its
    even share of a sample's positions. `balance` is what the loss that evens choices out counts:
    only its gradient is there, a model's own loss does not show it. `share` is the part of a step's
    loss that the next forward pass is; whoever divides losses over several of them sets it.
    """

    def __init__(
        self, width: int, experts: int, inner: int, capacity: float = 2.0, balance: float = 0.01
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.layers = Experts(experts, width, inner)
        self.capacity, self.balance, self.share = capacity, balance, 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        count = self.layers.experts
        gates = self.gate(hidden).softmax(-1)
        weights, chosen = gates.topk(CHOICES, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        room = min(length, math.ceil(self.capacity * length / count))
        places = self._places(chosen, room)[..., None].expand(-1, -1, width)
        # One place more than there is room for takes what is left out.
        given = hidden.new_zeros(samples, count * room + 1, width)
        given = given.scatter_add(1, places, hidden.repeat_interleave(CHOICES, 1))
        given = given[:, :-1].reshape(samples, count, room, width).transpose(0, 1)
        found = self.layers(given.reshape(count, samples * room, width))
        found = found.reshape(count, samples, room, width).transpose(0, 1)
        found = F.pad(found.reshape(samples, count * room, width), (0, 0, 0, 1))
        each = found.gather(1, places).reshape(samples, length, CHOICES, width)
        output = (weights[..., None] * each).sum(2)
        found = _WithLoss.apply(output, self._balance(gates, chosen))  # type: ignore[no-untyped-call]
        assert isinstance(found, Tensor)
        return found

    def _places(self, chosen: Tensor, room: int) -> Tensor:
        """Where each choice of each position goes, [samples, length x CHOICES]: first choices come
        first, in the order of positions."""
        count = self.layers.experts
        samples, length, _ = chosen.shape
        in_order = F.one_hot(chosen.transpose(1, 2).reshape(samples, -1), count)
        before = ((in_order.cumsum(1) - 1) * in_order).sum(-1)
        before = before.reshape(samples, CHOICES, length).transpose(1, 2)
        places = torch.where(before < room, chosen * room + before, count * room)
        return places.reshape(samples, length * CHOICES)

    def _balance(self, gates: Tensor, chosen: Tensor) -> Tensor:
        """1, times `balance` and `share`, where first choices are even; more where they are not."""
        count = self.layers.experts
        chances = gates.mean(1)
        taken = F.one_hot(chosen[..., 0], count).to(gates.dtype).mean(1)
        return count * (chances * taken).sum(-1).mean() * (self.balance * self.share)


class _WithLoss(torch.autograd.Function):
    """An output as it is; in the backward pass a loss counts besides."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with experts that ranks can divide, by name."""
    return {
        name: each for name, each in model.named_modules()
        if isinstance(getattr(each, "experts", None), int)
    }  # fmt: skip


def set_share(model: nn.Module, share: float) -> None:
    """Say which part of a step's loss the next forward pass is, to losses without a value."""
    for each in model.modules():
        if isinstance(each, MixtureOfExperts):
            each.share = share
