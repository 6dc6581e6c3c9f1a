"""What rows that are computed together draw: each what its member draws alone, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from edgetrain.tasks.draws import DRAWING


class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: an operation of torch that draws is done row by row, each with its own state.

    `states` are those of torch's generator, one a row; they are replaced as numbers are drawn. The
    rows come first in what is drawn, as torch.func.vmap lays them. RuntimeError where they do not.
    """

    def __init__(self, states: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        sizes = [each.shape if isinstance(each, Tensor) else each for each in args]
        first = {tuple(size[:1]) for size in sizes if isinstance(size, Sequence)}
        if first != {(len(self._states),)}:
            raise RuntimeError(f"{func} does not draw row by row")
        found: list[Tensor] = []
        for row, state in enumerate(self._states):
            own = (
                each[row] if isinstance(each, Tensor)
                else each[1:] if isinstance(each, Sequence) else each
                for each in args
            )  # fmt: skip
            with DRAWING:
                torch.set_rng_state(state)
                found.append(func(*own, **(kwargs or {})))
                self._states[row] = torch.get_rng_state()
        return args[0] if func._schema.is_mutable else torch.stack(found)
