"""The work of a training step: floating-point operations and operator calls.

Counted by running the step; torch is imported only then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def measure_step(
    model: torch.nn.Module,
    batch: tuple[torch.Tensor, ...],
    loss: Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], torch.Tensor],
) -> tuple[int, int]:
    """Return (flops, operators) of `loss(model, batch)` and its backward pass.

    Flops are those of matrix products and convolutions, a multiply-add counted as two (torch's
    counter). Operators are the ATen calls of both passes, without views. Runs on a copy: the
    model's parameters, gradients and buffers, and torch's generators, do not change.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts calls that compute; views of a tensor cost almost nothing."""

        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += not func.is_view
            return func(*args, **(kwargs or {}))

    own = copy.deepcopy(model)
    own.zero_grad(set_to_none=True)
    # Two passes: the flop counter decomposes composite operators, which would count twice.
    with torch.random.fork_rng(), FlopCounterMode(display=False) as flops:
        loss(own, batch).backward()  # type: ignore[no-untyped-call]
    own.zero_grad(set_to_none=True)
    with torch.random.fork_rng(), Operators() as operators:  # type: ignore[no-untyped-call]
        loss(own, batch).backward()  # type: ignore[no-untyped-call]
    return flops.get_total_flops(), operators.count
