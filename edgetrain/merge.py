"""Merge rules, the hub's half of a strategy: many contributions in, one merged contribution out.

Pure: no socket, no clock, no membership (the hub decides when a round closes). A rule sees one
slice of the vector at a time, with all members' contributions to it, so that the hub never needs
more than the payloads it has received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgetrain.checksum import Vector


class Piece(Protocol):
    """One member's contribution to one slice, still encoded."""

    @property
    def weight(self) -> float:
        """Positive and finite."""

    def read(self, out: Vector) -> None:
        """Overwrite `out` with the decoded slice."""

    def add(self, weight: float, out: Vector) -> None:
        """out += weight * decoded slice."""


class MergeRule(Protocol):
    """How contributions become one."""

    keeps_late: bool
    """Whether a contribution that missed its round may join the next one."""

    def merge(self, pieces: Sequence[Piece], out: Vector) -> None:
        """Overwrite `out` (float32, shape [slice]) with the merged slice of at least one piece.

        Pieces come in the order of the members' names, so that the result does not depend on the
        order of arrival.
        """


class Mean:
    """The weighted mean of a round: sum(w_m x_m) / sum(w_m).

    FedAvg (McMahan et al., 2017, algorithm 1) with w_m the samples of member m; with equal weights
    the plain mean of DGA, local SGD and synchronous SGD. A lost member needs no branch: the mean
    lacks it.
    """

    def __init__(self, keeps_late: bool = True) -> None:
        self.keeps_late = keeps_late

    def merge(self, pieces: Sequence[Piece], out: Vector) -> None:
        """See MergeRule. Equal weights cost no multiplication."""
        unit = pieces[0].weight
        pieces[0].read(out)
        for piece in pieces[1:]:
            piece.add(piece.weight / unit, out)
        total = sum(piece.weight for piece in pieces) / unit
        if total != 1.0:
            np.multiply(out, np.float32(1.0 / total), out=out)
