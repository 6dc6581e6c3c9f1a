"""What a member trains without torch: vectors that are no model's."""

from __future__ import annotations

from contextlib import AbstractContextManager

from edgetrain.exchange.member.driver import in_place
from edgetrain.exchange.seam import FixedTensors
from edgetrain.vectors.vector import Vector, zeros


class FlatVectors:
    """Parameters and a gradient that are no model's, for members without torch: see Flat.

    `params`, float32 [elements], is shared with the caller.
    """

    is_storage = True
    fixed = ""
    fixed_tensors: FixedTensors | None = None

    def __init__(self, params: Vector, description: bytes = b"") -> None:
        self.params = params
        self.gradient: Vector = zeros(params.size)
        self.elements = self.trained = params.size
        self.description = description

    def pull_params(self) -> None:
        """See Flat: nothing to do."""

    push_params = pull_gradient = pull_params

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        """See Flat: nothing to do."""

    def holding(self, vector: Vector) -> AbstractContextManager[None]:
        return in_place(self.params, vector)
