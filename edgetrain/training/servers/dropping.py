"""Progressive layer dropping: blocks that are left out of a step, the same ones on all ranks.

After Zhang and He, Accelerating Training of Transformer-Based Language Models with Progressive
Layer Dropping, NeurIPS 2020: block i of L is kept in step t of T with the chance

    p = 1 - i / L (1 - theta(t)),   theta(t) = (1 - keep) exp(-100 t / T) + keep

and what a block that is kept adds to its input is divided by its chance. The draw follows from seed
and step alone, so that all ranks, micro-batches and a run that goes on leave out the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.errors import ConfigError

_FALL = 100.0
"""How fast theta falls over the run: gamma = 100 / T in the paper."""
_STREAM = 0x504C44
"""Keeps these draws apart from others of the same seed."""


class Dropping:
    """The blocks of a model in each step, and the factors of their additions."""

    def __init__(self, keep: float, steps: int, seed: int, blocks: Sequence[str]) -> None:
        """`keep` is the chance of the last block in the end, of a run of `steps`."""
        self._keep, self._steps, self._seed = keep, steps, seed
        self._places = {name: place for place, name in enumerate(blocks)}
        self.factors: list[float] = [1.0] * len(blocks)
        """Factor of each block's addition to its input; 0: it is left out."""

    def chances(self, step: int) -> list[float]:
        """Each block's chance to be kept, in the step with this number, from 0."""
        count = len(self._places)
        theta = (1 - self._keep) * math.exp(-_FALL * step / self._steps) + self._keep
        return [1 - (place + 1) / count * (1 - theta) for place in range(count)]

    def begin(self, step: int) -> None:
        """Draw for the step with this number, from 0."""
        drawn = np.random.default_rng([self._seed, _STREAM, step]).random(len(self.factors))
        chances = self.chances(step)
        self.factors = [1 / p if u < p else 0.0 for u, p in zip(drawn, chances, strict=True)]

    def apply(self, module: nn.Module, name: str) -> None:
        """Let the block `name` of a module be left out in training. ConfigError, when it is called,
        for one that does not hand on a tensor of its input's shape."""
        block, place = module.get_submodule(name), self._places[name]
        forward = block.forward

        def dropped(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            factor = self.factors[place] if block.training and torch.is_grad_enabled() else 1.0
            if factor == 0.0:
                return hidden.clone()  # a stage may hand on nothing else: not its input itself
            found = forward(hidden, *args, **kwargs)
            if not isinstance(found, Tensor) or found.shape != hidden.shape:
                raise ConfigError(
                    f"servers.layer_keep = {self._keep:g}: the block {name} hands on other than a "
                    "tensor of its input's shape",
                    "leave servers.layer_keep out",
                )
            return found if factor == 1.0 else hidden + factor * (found - hidden)

        block.forward = dropped
