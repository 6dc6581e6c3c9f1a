"""What a member trains where only the exchange matters: a small vector, without torch.

The stand-in is an optimizer over flat vectors; the real driver, half and link do the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.seam import Exchange, Request
from edgetrain.vectors.vector import Vector
from tests.fakes.flat_vectors import FlatVectors

MODEL = "model"
"""In place of a model's digest: it proves nothing. The hub is started with --any-job."""


class StandIn:
    """A contraction towards a point that each member has for itself, plus noise drawn from (member,
    step): a Stepper for strategies that exchange displacements.

    `params`, float32 [elements], begin at zero; `steps` are those of this process.
    """

    def __init__(self, index: int, elements: int) -> None:
        self.index = index
        self.params: Vector = np.zeros(elements, np.float32)
        self.steps = 0

    @property
    def name(self) -> str:
        """The name that it joins with."""
        return f"m{self.index}"

    def join(self, exchange: Exchange, clock: Callable[[], float] = time.monotonic) -> Driver:
        """Join as a newcomer; what to train with. Raises what Driver.join does."""
        return Driver.join(
            exchange, FlatVectors(self.params), self, Request(MODEL, self.name), clock
        )

    def step(self) -> None:
        """One step of what stands for an optimizer."""
        noise = np.random.default_rng([self.index, self.steps]).standard_normal(
            self.params.size, np.float32
        )
        self.params -= np.float32(0.1) * (self.params - self.index) + np.float32(0.05) * noise
        self.steps += 1
