"""The member's half of strategies whose hub moves the base: the parameters are the base."""

from __future__ import annotations

from collections.abc import Iterable

from edgetrain.strategies.gradient import Gradient
from edgetrain.vectors.vector import Vector, checksum


class AtBase(Gradient):
    """Contributes nothing, and takes no step: what the member computes at the base goes another
    way, as answers to the hub's work. `params` change by replies alone."""

    adjusts_gradient = False
    moves_params = True

    def before_step(self) -> Vector | None:
        return None

    def due(self, ready: int = 0) -> int | None:
        """None: the driver applies the reply of each round as it answers work."""
        return None

    def apply(self, reply: Iterable[Vector]) -> None:
        start = 0
        for piece in reply:
            self.params[start : start + piece.size] += piece
            start += piece.size
        self.checksum = checksum(self.params)
        self.applied += 1
        self.round = self.applied

    def rebase(self, base: Vector, applied: int) -> None:
        self.params[:] = base
        self.checksum = checksum(self.params)
        self.applied = self.round = applied

    def skip_to(self, round: int) -> None:
        """The replies of the rounds between are on their way."""

    def start(self, applied: int, round: int) -> None:
        super().start(applied, applied)

    def rest(self) -> Vector | None:
        return None
