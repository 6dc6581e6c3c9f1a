"""A contribution as the hub keeps it, and as merge rules read it: decoded slice by slice.

Knows codecs and payloads; the sender is a name. No connection, no round, no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgetrain.codecs import Codec
from edgetrain.errors import BadPayload
from edgetrain.exchange.hub.delay import Wish
from edgetrain.vectors.vector import Buffer, Vector, all_finite

NOT_FINITE = "an element is not a finite number"


class Contribution(NamedTuple):
    """One member's contribution to one round, still encoded."""

    member: str
    weight: float
    """NO_WEIGHT: it is not merged."""
    payloads: tuple[Buffer, ...]
    """One per part; none where contributions are masked."""
    wish: Wish | None = None
    """Measurements of its sender; None: merged again, from a journal."""
    members: int = 1
    """Members' contributions in it."""
    is_exact: bool = False
    """Whether it is a gateway's: in full precision, whatever the job's codec."""


@dataclass(frozen=True)
class BatchMean:
    """The end of a round of slices: the batch's mean loss and gradient at the base."""

    loss: float
    vector: Vector | None
    """The gradient, float32 [elements]; None: the loss alone was wanted."""
    products: NDArray[np.float64] | None = None
    """Products of whole vectors, if this is a stretch of the gradient: see `Lbfgs.move`."""
    reason: str = ""


class Spoilt(Exception):
    """A payload cannot be decoded, or its numbers cannot be used: leave out `contribution`."""

    def __init__(self, contribution: Contribution, reason: str) -> None:
        super().__init__(reason)
        self.contribution = contribution


class ContributionPiece(NamedTuple):
    """One part of a contribution: what a merge rule sees as a `Piece`. Raises Spoilt."""

    contribution: Contribution
    part: int
    codec: Codec

    @property
    def weight(self) -> float:
        return self.contribution.weight

    def read(self, out: Vector) -> None:
        """Overwrite `out` with the decoded slice."""
        try:
            self.codec.decode(self.contribution.payloads[self.part], out)
        except BadPayload as error:
            raise Spoilt(self.contribution, str(error)) from None

    def add(self, weight: float, out: Vector) -> None:
        """out += weight * decoded slice."""
        try:
            self.codec.add(self.contribution.payloads[self.part], weight, out)
        except BadPayload as error:
            raise Spoilt(self.contribution, str(error)) from None


class Guarded(ContributionPiece):
    """A piece for rules that judge contributions. Raises Spoilt unless its elements are finite."""

    def read(self, out: Vector) -> None:
        """Overwrite `out` with the decoded slice, in which every element is finite."""
        super().read(out)
        if not all_finite(out):
            raise Spoilt(self.contribution, NOT_FINITE)


def find_spoilt(pieces: Sequence[ContributionPiece], scratch: Vector) -> None:
    """Raise Spoilt for the first piece that is not finite. There may be none: a sum of finite
    numbers can overflow. `scratch` [slice] is overwritten."""
    for piece in pieces:
        Guarded(piece.contribution, piece.part, piece.codec).read(scratch)
