"""A model's flat vector with room for another behind it. No torch."""

from __future__ import annotations

from contextlib import AbstractContextManager

from edgetrain.exchange.member.driver import Flat
from edgetrain.exchange.seam import FixedTensors
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import Vector, zeros


class Doubled:
    """A `Flat` whose `params`, float32 [2 elements], are a model's and as many more, for strategies
    whose contributions have a gradient behind the displacement (`Strategy.has_variates`).

    The second half is this object's and begins as zeros; `gradient` and `trained` are the model's.
    """

    is_storage = False

    def __init__(self, flat: Flat) -> None:
        self._flat, self._size = flat, flat.elements
        self.elements, self.trained, self.fixed = 2 * flat.elements, flat.trained, flat.fixed
        self.params: Vector = zeros(self.elements)
        self.params[: self._size] = flat.params
        self.gradient = flat.gradient
        self.description = layouts.doubled(flat.description)

    @property
    def fixed_tensors(self) -> FixedTensors | None:
        return self._flat.fixed_tensors

    def pull_params(self) -> None:
        self._flat.pull_params()
        self.params[: self._size] = self._flat.params

    def push_params(self) -> None:
        self._flat.params[:] = self.params[: self._size]
        self._flat.push_params()

    def holding(self, vector: Vector) -> AbstractContextManager[None]:
        return self._flat.holding(vector[: self._size])

    def pull_gradient(self) -> None:
        self._flat.pull_gradient()

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        self._flat.push_gradient(zeros_are_none)
