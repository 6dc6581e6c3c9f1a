"""The member's half of synchronous SGD whose mean gradient is two factors, in two trips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from edgetrain.strategies.gradient import Gradient
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Vector


class Factors(Protocol):
    """Two dependent means that make one: see codecs.lowrank.PowerSGD."""

    @property
    def left_elements(self) -> int:
        """Length of the first contribution."""

    @property
    def right_elements(self) -> int:
        """Length of the second one; 0: there is none."""

    def left(self, gradient: Vector) -> Vector:
        """The first contribution, of a gradient and of what was left of earlier ones."""

    def right(self, mean_left: Vector) -> Vector:
        """The second, from the mean of all first ones."""

    def finish(self, mean_right: Vector, out: Vector) -> None:
        """Write the merged gradient; keep what was not sent."""


class Factored(Gradient):
    """A step takes two rounds: all contribute their first factor, and with the mean of it their
    second. Both travel as vectors of the model's length, with zeros behind what they need.

    PowerSGD (Vogels et al., NeurIPS 2019, algorithm 1). As in `Gradient` all members step with
    equal gradients, so the parameters are the base; in the middle of a step they are what they
    were at its beginning.
    """

    def __init__(
        self,
        params: Vector,
        gradient: Vector,
        factors: Factors,
        memory: VectorPool | None = None,
    ) -> None:
        super().__init__(params, gradient, memory)
        self._factors = factors
        self._second: Vector | None = None
        self._awaits_left = False

    def before_step(self) -> Vector | None:
        self._check()
        self._awaits_left = True
        return self._contribution(self._factors.left(self.gradient))

    def follow_up(self) -> Vector | None:
        """The second factor, once the mean of the first ones is here."""
        second, self._second = self._second, None
        return None if second is None else self._contribution(second)

    def apply(self, reply: Iterable[Vector]) -> None:
        """The mean of the first factors, or of the second: then the gradient is the merged one."""
        mean = np.concatenate(list(reply))
        self.applied += 1
        if self._awaits_left:
            self._awaits_left = False
            self._second = self._factors.right(mean[: self._factors.left_elements])
            if self._second.size:
                return
            self._second = None
        self._factors.finish(mean[: self._factors.right_elements], self.gradient)

    def _contribution(self, factor: Vector) -> Vector:
        self.round += 1
        own = self._memory.borrow_vector()
        own[: factor.size] = factor
        own[factor.size :] = 0
        return own
