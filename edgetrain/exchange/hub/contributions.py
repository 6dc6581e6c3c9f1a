"""A contribution as the hub keeps it, and how merge rules read it: decoded slice by slice.

Knows codecs and payloads; who sent it is a name. No connection, no round, no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.codecs import Codec
from edgetrain.errors import BadPayload
from edgetrain.vectors.vector import Buffer, Vector, all_finite

NOT_FINITE = "an element is not a finite number"


@dataclass(frozen=True)
class Contribution:
    """What one member gave to one round, still encoded."""

    member: str
    weight: float
    wanted_delay: int
    """Local steps that its sender's link would take to be hidden."""
    payloads: tuple[Buffer, ...]
    """One a part; none where contributions are masked."""


class Spoilt(Exception):
    """A payload is not what it should be; `contribution` is the one to leave out."""

    def __init__(self, contribution: Contribution, reason: str) -> None:
        super().__init__(reason)
        self.contribution = contribution


@dataclass(frozen=True)
class ContributionPiece:
    """One part of a contribution: what a merge rule sees as a `Piece`. Raises Spoilt."""

    contribution: Contribution
    part: int
    codec: Codec

    @property
    def weight(self) -> float:
        """Positive and finite."""
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
    """What a rule that judges contributions reads: finite, or its sender is at fault."""

    def read(self, out: Vector) -> None:
        """Overwrite `out` with the decoded slice, in which every element is finite."""
        super().read(out)
        if not all_finite(out):
            raise Spoilt(self.contribution, NOT_FINITE)


def find_spoilt(chosen: Sequence[Contribution], part: int, codec: Codec, scratch: Vector) -> None:
    """Raise Spoilt for the first whose part, read into `scratch`, is not finite; a sum of finite
    ones may overflow, too."""
    for contribution in chosen:
        Guarded(contribution, part, codec).read(scratch)
