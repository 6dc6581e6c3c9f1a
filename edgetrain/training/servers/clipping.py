"""The length of a gradient that ranks hold parts of, and the gradient cut to a length."""

from __future__ import annotations

import torch
import torch.distributed as dist

from edgetrain.training.servers.model import Held, local_gradient


def clip_gradients(held: Held, most: float) -> float:
    """Cut the gradient of the whole model to the length `most`; the length that it had.

    As `torch.nn.utils.clip_grad_norm_` in one process, in one sum over all ranks: every part counts
    once, however many ranks have a copy of it. All ranks call it.
    """
    total = torch.zeros((), dtype=torch.float64)
    for stage, own in zip(held.ranks.stages, held.own, strict=True):
        for name, parameter in own.items():
            if parameter.grad is not None and held.parts.holders[name][0] == stage:
                part = local_gradient(parameter)
                length = torch.linalg.vector_norm(part, dtype=torch.promote_types(
                    part.dtype, torch.float32
                ))  # fmt: skip
                total += length.double().cpu().square() / held.copies(parameter)
    dist.all_reduce(total)
    length = float(total.sqrt())
    if length + 1e-6 > most:
        for own in held.own:
            for parameter in own.values():
                if parameter.grad is not None:
                    local_gradient(parameter).mul_(most / (length + 1e-6))
    return length
