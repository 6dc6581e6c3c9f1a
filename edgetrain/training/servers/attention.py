"""Attention over a sequence that ranks share, for models that call scaled_dot_product_attention.

Each rank has a slice of every sequence, [samples, heads, length / ranks, width]. Two ways to let
it attend to all of it, alone or one within the other:

- Ulysses (Jacobs et al., DeepSpeed Ulysses, 2023): an all-to-all gives each rank whole sequences
  of some of the heads, and another brings its slice of all heads back.
- Ring (Liu et al., Ring Attention, 2023): keys and values go round; the softmax is put together
  from its blocks by their log-sum-exp, and the backward pass sends their gradients round with them.

Both at once (USP, Fang and Zhao 2024): Ulysses between neighbours, rings between their groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from edgetrain.errors import ConfigError


class SplitAttention(TorchFunctionMode):
    """While it is entered, attention goes over the slices of all ranks of two groups; None: one
    rank. `calls` counts what it has answered."""

    def __init__(self, ring: dist.ProcessGroup | None, ulysses: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._ring, self._ulysses, self.calls = ring, ulysses, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            said = "a mask of its own" if attn_mask is not None else f"dropout of {dropout_p:g}"
            raise ConfigError(
                f"placement: sequence, and the model's attention has {said}",
                "causal or full attention without dropout, or leave sequence out",
            )
        if query.shape[1] != key.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self._ulysses is not None:
            query, key, value = (to_heads(each, self._ulysses) for each in (query, key, value))
        if self._ring is not None:
            found: Tensor = _Ring.apply(query, key, value, self._ring, is_causal, scale)  # type: ignore[no-untyped-call]
        else:
            found = F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale
            )
        return to_slices(found, self._ulysses) if self._ulysses is not None else found


def to_heads(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[samples, heads, length / n, width] of each rank to [samples, heads / n, length, width]."""
    count = dist.get_world_size(group)
    samples, heads, length, width = slices.shape
    if heads % count:
        raise ConfigError(f"placement: ulysses={count} does not divide {heads} heads of a rank")
    apart = slices.reshape(samples, count, heads // count, length, width).transpose(0, 1)
    found = exchanged(apart, group)
    return found.permute(1, 2, 0, 3, 4).reshape(samples, heads // count, count * length, width)


def to_slices(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[samples, heads / n, length, width] of each rank to [samples, heads, length / n, width]."""
    count = dist.get_world_size(group)
    samples, heads, length, width = whole.shape
    apart = whole.reshape(samples, heads, count, length // count, width).permute(2, 0, 1, 3, 4)
    found = exchanged(apart, group)
    return found.transpose(0, 1).reshape(samples, heads * count, length // count, width)


def exchanged(apart: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal parts of the first dimension, one for each rank of a group, and one from each."""
    found: Tensor = collectives.all_to_all_single_autograd(apart.contiguous(), None, None, group)
    return found


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, causal: bool, scale: float
    ) -> Tensor:
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        passing = torch.stack([key, value])
        largest = torch.full_like(query[..., 0], -torch.inf)
        total, mixed = torch.zeros_like(largest), torch.zeros_like(query)
        for turn in range(count):
            source = (rank - turn) % count
            scores = _scores(query, passing[0], rank, source, causal, scale)
            if scores is not None:
                now = torch.maximum(largest, scores.amax(-1))
                weights = torch.exp(scores - now[..., None])
                before = torch.exp(largest - now)
                total = total * before + weights.sum(-1)
                mixed = mixed * before[..., None] + weights @ passing[1]
                largest = now
            if turn < count - 1:
                passing = _passed_on(passing, group)
        output = mixed / total[..., None]
        ctx.save_for_backward(query, key, value, output, largest + total.log())
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        query, key, value, output, log_total = ctx.saved_tensors
        rank, count = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        kept = (gradient * output).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query)
        passing = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])
        for turn in range(count):
            source = (rank - turn) % count
            scores = _scores(query, passing[0], rank, source, ctx.causal, ctx.scale)
            if scores is not None:
                weights = torch.exp(scores - log_total[..., None])
                change = weights * (gradient @ passing[1].transpose(-1, -2) - kept)
                of_query += change @ passing[0] * ctx.scale
                passing[2] += change.transpose(-1, -2) @ query * ctx.scale
                passing[3] += weights.transpose(-1, -2) @ gradient
            # All the way round: the gradients end where their keys and values came from.
            passing = _passed_on(passing, ctx.group)
        return of_query, passing[2], passing[3], None, None, None


def _scores(
    query: Tensor, key: Tensor, rank: int, source: int, causal: bool, scale: float
) -> Tensor | None:
    """Scores of the queries of `rank` and the keys of `source`; None: they all come later."""
    if causal and source > rank:
        return None
    scores = query @ key.transpose(-1, -2) * scale
    if causal and source == rank:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _passed_on(passing: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank of the ring what the one before sends here."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    found = torch.empty_like(passing)
    sends = dist.P2POp(dist.isend, passing.contiguous(), group=group, group_peer=(rank + 1) % count)
    takes = dist.P2POp(dist.irecv, found, group=group, group_peer=(rank - 1) % count)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    return found
