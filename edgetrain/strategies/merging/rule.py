"""Merge rules, the hub's half of a strategy: many contributions in, one merged contribution out.

Pure: no socket, no clock, no membership (`closing` decides the end of a round). This module has the
protocols and the mean; rules against lying members are in the modules beside it. A merge rule has
no memory: outer rules have state from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from edgetrain.vectors.vector import Vector


class Piece(Protocol):
    """One member's contribution to one slice, still encoded."""

    @property
    def weight(self) -> float:
        """Positive and finite."""

    def read(self, out: Vector) -> None:
        """Overwrite `out` with the decoded slice; every element is finite."""

    def add(self, weight: float, out: Vector) -> None:
        """out += weight * decoded slice."""


@dataclass(frozen=True)
class Discounted:
    """A contribution counted only in part, or not at all."""

    index: int
    """Position in the round's contributions."""
    share: float
    """Share left out of the mean: 1.0 is the whole contribution."""
    reason: str


class MergeRule(Protocol):
    """Makes one of the contributions. A rule is a SliceRule or a RoundRule."""

    keeps_late: bool
    """Whether a late contribution may join the next round."""


@runtime_checkable
class SliceRule(MergeRule, Protocol):
    """A rule on one slice of the vector at a time, with all members' contributions to it.

    So the hub can merge complete slices before the others arrive.
    """

    def merge(self, pieces: Sequence[Piece], out: Vector) -> None:
        """Overwrite `out` (float32, shape [slice]) with the merged slice of at least one piece.

        Pieces come in the order of the members' names, so the result does not depend on the order
        of arrival.
        """


@runtime_checkable
class RoundRule(MergeRule, Protocol):
    """A rule that compares members, and needs a whole round: one contribution of each."""

    def merge_round(
        self, contributions: Sequence[Sequence[Piece]], out: Sequence[Vector]
    ) -> tuple[Discounted, ...]:
        """Overwrite the slices `out` with the merged vector; returns the discounted members.

        `contributions[i][p]` is member i's piece of slice p. Members come in the order of their
        names. Deterministic; takes memory for one slice of each member, not for the vectors.
        """


class Mean:
    """The weighted mean of a round: sum(w_m x_m) / sum(w_m). A SliceRule.

    FedAvg (McMahan et al., 2017, algorithm 1) with w_m the samples of member m; with equal weights
    the plain mean of DGA, local SGD and synchronous SGD. A lost member needs no branch: the mean
    lacks it.
    """

    def __init__(self, keeps_late: bool = True) -> None:
        self.keeps_late = keeps_late

    def merge(self, pieces: Sequence[Piece], out: Vector) -> None:
        """See SliceRule. Equal weights cost no multiplication."""
        unit = pieces[0].weight
        pieces[0].read(out)
        for piece in pieces[1:]:
            piece.add(piece.weight / unit, out)
        total = sum(piece.weight for piece in pieces) / unit
        if total != 1.0:
            np.multiply(out, np.float32(1.0 / total), out=out)


class ScaledSum:
    """sum(w_m x_m), with a factor for each contribution from the hub. A SliceRule.

    With factors 1/n of n contributions it is their mean, with the bits of `Mean`.
    """

    keeps_late = True

    def merge(self, pieces: Sequence[Piece], out: Vector) -> None:
        """See SliceRule. Equal factors cost no multiplication of each."""
        unit = pieces[0].weight
        pieces[0].read(out)
        for piece in pieces[1:]:
            piece.add(piece.weight / unit, out)
        if unit != 1.0:
            np.multiply(out, np.float32(unit), out=out)
