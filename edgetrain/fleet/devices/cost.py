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
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts flops, and calls that compute: views of a tensor cost almost nothing."""

        flops = calls = 0
        inside = False

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """False: torch would import its compiler, to keep it out."""
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            formula = flop_registry.get(func._overloadpacket)
            self.calls += not (func.is_view or self.inside)
            if formula is None:  # the flops of a composite operator are those of its parts
                before, self.inside = self.inside, True
                with self:
                    out = func.decompose(*args, **named)
                self.inside = before
                if out is not NotImplemented:
                    return out
            out = func(*args, **named)
            if formula is not None:
                self.flops += formula(*args, **named, out_val=out)
            return out

    own = copy.deepcopy(model)
    own.zero_grad(set_to_none=True)
    with torch.random.fork_rng(), Counter() as counter:  # type: ignore[no-untyped-call]
        loss(own, batch).backward()  # type: ignore[no-untyped-call]
    return counter.flops, counter.calls
