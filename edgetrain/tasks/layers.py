"""What a model is made of: layers in the order they run. `profiling` measures them, and what plans
placements reads them, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Layer:
    """One layer. Figures are of one sample; a layer is never cut, but may be divided."""

    name: str
    parameters: int = 0
    flops: float = 0.0
    """Operations of the forward pass, a multiply-add counted as two."""
    backward_flops: float = 0.0
    operators: int = 0
    """Calls of the forward pass, however many samples there are."""
    backward_operators: int = 0
    saved_bytes: float = 0.0
    """Kept from the forward for the backward pass."""
    passed_bytes: float = 0.0
    """Handed to the next layer."""
    divided: float = 0.0
    """The share of its parameters that tensor parallelism divides."""
    attentions: int = 0
    """Calls of scaled_dot_product_attention."""
    expert: float = 0.0
    """The share of its parameters that are of experts."""
    routed_bytes: float = 0.0
    """Given to experts."""


@dataclass
class Model:
    """The layers of a model. `tied` are (first layer, other layer, parameters) that both hold."""

    layers: Sequence[Layer]
    tied: Sequence[tuple[int, int, int]] = ()
    heads: int = 0
    """Attention heads, which tensor parallelism divides; 0: it divides nothing."""
    length: int = 0
    """Positions of a sequence, as its attention sees them; 0: it has none."""
    knows_place: bool = False
    """Whether it can be told which positions its inputs are."""
    experts: int = 0
    """The largest number that divides the experts of all layers that have any; 0: none has."""

    @property
    def is_divided(self) -> bool:
        """Whether tensor parallelism divides any layer."""
        return any(layer.divided for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) - sum(n for _, _, n in self.tied)

    @property
    def flops(self) -> float:
        return sum(layer.flops + layer.backward_flops for layer in self.layers)

    @property
    def operators(self) -> int:
        return sum(layer.operators + layer.backward_operators for layer in self.layers)

    @property
    def saved_bytes(self) -> float:
        return sum(layer.saved_bytes for layer in self.layers)
