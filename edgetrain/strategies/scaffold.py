"""The member's half of SCAFFOLD: FedAvg whose local steps are corrected by control variates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import TILE, Vector, tiles, zeros

LEAP = 100.0
"""A step whose learning rate is more than this many times the sum of the last round's is taken
without variates: what is left of a round that hardly moved is rounding."""

ROUNDING = np.float32(2**-20)
"""A variate smaller than this share of the reply is none: a mean of equal numbers is rounded, and
members that do the same would otherwise be corrected by its last bits."""


class Scaffold(Displacement):
    """FedAvg in which every member takes its steps where the whole fleet's would lead.

    SCAFFOLD (Karimireddy et al., ICML 2020, algorithm 1, option II: c_i <- (x - y_i) / (K lr) - c
    + c_i), in displacements. With x = base, raw_i what the optimizer of member i did in a round, R
    the sum of the learning rates of that round's steps, and p the share of the members whose
    contributions are in a reply::

        a step          y_i <- (the optimizer's step) + rate / R' v_i     R', v_i of the last round
        a round's end   contribute y_i - x;  F <- F R / R',  v_i <- F - raw_i,  R' <- R
        a reply         x <- x + reply;  v_i <- v_i + p (reply - F),  F <- F + p (reply - F)

    F / R' is the paper's -c and v_i / R' its c_i - c, so nothing but the contribution and its reply
    is sent. With plain SGD and one learning rate it is the paper's. Differences:

    - p counts members, of the most that a round had, and not their weights.
    - The optimizer does not see them. Added to the gradient, as the paper does, they would build up
      in momentum, and mean nothing to AdamW. After the step they take out what this member's last
      round had that the fleet's had not, whatever optimizer made it. With plain SGD both are equal.
    - The learning rate may change, within a round as well: variates grow and shrink with it.
    - Where replies were lost, the mean way of the base in those rounds stands for each of them.

    With a lossy codec y_i - x and the reply are what others read. The mean is weighted as FedAvg's.
    Two vectors of memory, float32 [elements], `variates` and `fleet`, owned here.
    """

    moves_within = True

    def __init__(self, params: Vector, every: int = 1, memory: VectorPool | None = None) -> None:
        super().__init__(params, every, 0, memory)
        self.variates: Vector = zeros(params.size)
        """v_i"""
        self.fleet: Vector = zeros(params.size)
        """F: the way that the whole fleet would go in a round."""
        self._of_rates = 0.0
        """R', the sum of learning rates that the variates are of; 0: there are none."""
        self._share = np.float32(1)
        """p of the next reply."""
        self._own: Vector | None = None
        """The contribution of which a codec may say what others read."""
        self._rate = self._rates = 0.0
        self._added = np.float32(0)
        """The share of the variates that is in `params`."""
        self._saved = (0.0, np.float32(0))
        """`_rates` and `_added` of the round that a checkpoint was written in."""
        self._tile: Vector = np.empty(min(TILE, params.size), np.float32)

    def note_rate(self, rate: float) -> None:
        super().note_rate(rate)
        self._rate = rate
        self._rates += rate

    def after_step(self) -> Vector | None:
        """Correct the step, then as Displacement."""
        rate, self._rate = self._rate, 0.0
        if not self._of_rates and self.fleet.any():  # it has heard replies, and sent nothing yet
            self._of_rates = self.every * rate
        if rate and self._of_rates and rate <= LEAP * self._of_rates:
            self._add(np.float32(rate / self._of_rates))
        return super().after_step()

    def _add(self, share: np.float32) -> None:
        for here in tiles(self.params.size):
            self.params[here] += np.multiply(
                self.variates[here], share, out=self._tile[: here.stop - here.start]
            )
        self._added += share

    def quiet_steps(self) -> int:
        """None while there are variates: every step is corrected."""
        return 0 if self._of_rates else super().quiet_steps()

    def _submit(self) -> Vector:
        own = self._own = super()._submit()
        grown = self._rates <= LEAP * self._of_rates
        scale = np.float32(self._rates / self._of_rates if grown and self._of_rates else 0)
        for here in tiles(own.size):
            variates, fleet = self.variates[here], self.fleet[here]
            variates *= self._added
            fleet *= scale
            variates += fleet
            variates -= own[here]
        self._of_rates, self._rates, self._added = self._rates, 0.0, np.float32(0)
        return own

    def sent(self, vector: Vector) -> None:
        """See MemberHalf: the variates are of what others read, too."""
        super().sent(vector)
        assert self._own is not None
        self.variates += self._own
        self.variates -= vector

    def note_merged(self, merged: int, complete: int, share: float = 1.0) -> None:
        self._share = np.float32(min(share, 1.0))

    def apply(self, reply: Iterable[Vector]) -> None:
        """As Displacement, and learn how the whole fleet goes."""
        pieces, start = list(reply), 0
        for piece in pieces:
            for tile in tiles(piece.size):
                here = slice(start + tile.start, start + tile.stop)
                self._learn_tile(here, piece[tile], self._share)
            start += piece.size
        self._own, self._share = None, np.float32(1)
        super().apply(pieces)

    def _learn_tile(self, here: slice, way: Vector, share: np.float32) -> None:
        variates, fleet, moved = self.variates[here], self.fleet[here], self._tile[: way.size]
        np.subtract(way, fleet, out=moved)
        moved *= share
        variates += moved
        fleet += moved
        np.multiply(np.abs(fleet, out=moved), ROUNDING, out=moved)
        variates[np.abs(variates) <= moved] = 0

    def rebase(self, base: Vector, applied: int) -> None:
        """See MemberHalf. The mean way of the base stands for each reply that will not come."""
        if applied > self.applied:
            for here in tiles(base.size):
                way = (base[here] - self.base[here]) / np.float32(applied - self.applied)
                self._learn_tile(here, way, np.float32(1))
        super().rebase(base, applied)

    def restore_rest(self, rest: Vector, local_steps: int = 0) -> None:
        """See MemberHalf: the steps of this round have their corrections."""
        super().restore_rest(rest, local_steps)
        if local_steps:
            self._rates, self._added = self._saved

    def learned(self) -> dict[str, NDArray[Any]]:
        if not self._of_rates:
            return super().learned()
        rates = np.array([self._of_rates, self._rates, float(self._added)])
        vectors = {"variates": self.variates, "fleet": self.fleet}
        return super().learned() | vectors | {"rates": rates}

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        super().restore_learned(state)
        variates, rates = state.get("variates"), state.get("rates")
        if variates is None and rates is None:
            return
        size, fleet = self.variates.shape, state.get("fleet")
        if (
            variates is None or fleet is None or rates is None
            or not variates.shape == fleet.shape == size or rates.shape != (3,)
        ):  # fmt: skip
            raise BadMessage(f"the checkpoint's variates are not {self.variates.size} elements")
        if not (np.isfinite(rates).all() and (rates >= 0).all()):
            raise BadMessage(f"the checkpoint's variates are of the rates {rates.tolist()}")
        self.variates[:], self.fleet[:] = variates, fleet
        self._of_rates, self._saved = float(rates[0]), (float(rates[1]), np.float32(rates[2]))
