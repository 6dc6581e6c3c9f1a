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
    + c_i), in displacements. With x = base, raw_i what the optimizer of member i did in a round and
    R the sum of the learning rates of that round's steps::

        a step          y_i <- (the optimizer's step) + rate / R' v_i     R', v_i of the last round
        a round's end   contribute raw_i = y_i - x - (sum of rate / R') v_i
        the reply       x <- x + reply,  v_i <- reply - raw_i,  R' <- R

    v_i / R' is the paper's c_i - c, so nothing but the contribution and its reply is sent. With
    plain SGD, all members in each round and one learning rate it is the paper's. Differences:

    - The variates change where a member's gradients are taken, not its contribution: raw_i, without
      them. They add up to nothing over the members of a round, so the mean is the paper's; and if
      members are missing, what is left of the sum moves nobody's base.
    - The optimizer does not see them. Added to the gradient, as the paper does, they would build up
      in momentum, and mean nothing to AdamW. After the step they take out what this member's last
      round had that the fleet's had not, whatever optimizer made it. With plain SGD both are equal.
    - The learning rate may change, within a round as well: variates grow and shrink with it.
    - A round whose reply was lost leaves none; the next round goes without.

    With a lossy codec raw_i and the reply are what others read. The mean is weighted as FedAvg's.
    One vector of memory, float32 [elements]: `variates`, owned here.
    """

    moves_within = True

    def __init__(self, params: Vector, every: int = 1, memory: VectorPool | None = None) -> None:
        super().__init__(params, every, 0, memory)
        self.variates: Vector = zeros(params.size)
        """v_i; while a reply is awaited, minus the contribution that it replies to."""
        self._of_rates = 0.0
        """R', the sum of learning rates that the variates are of; 0: there are none."""
        self._awaited: int | None = None
        """The round whose reply makes the variates."""
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
        if self._added:
            self._add(-self._added)
        own = super()._submit()
        self._awaited, self._of_rates, self._rates = self.round - 1, self._rates, 0.0
        self._added = np.float32(0)
        np.negative(own, out=self.variates)
        return own

    def sent(self, vector: Vector) -> None:
        """See MemberHalf: the variates are of what others read, too."""
        super().sent(vector)
        np.negative(vector, out=self.variates)

    def apply(self, reply: Iterable[Vector]) -> None:
        """As Displacement, and learn the variates of the next round."""
        pieces = list(reply)
        if self.applied == self._awaited:
            start = 0
            for piece in pieces:
                for tile in tiles(piece.size):
                    self._learn_tile(slice(start + tile.start, start + tile.stop), piece[tile])
                start += piece.size
            self._awaited = None
        super().apply(pieces)

    def _learn_tile(self, here: slice, reply: Vector) -> None:
        variates, least = self.variates[here], self._tile[: reply.size]
        variates += reply
        np.multiply(np.abs(reply, out=least), ROUNDING, out=least)
        variates[np.abs(variates) <= least] = 0

    def rebase(self, base: Vector, applied: int) -> None:
        """See MemberHalf. A reply that will not come leaves no variates."""
        super().rebase(base, applied)
        if self._awaited is not None and self._awaited < applied:
            self._awaited, self._of_rates = None, 0.0

    def rest(self) -> Vector | None:
        """See MemberHalf: the steps of this round without their corrections."""
        rest = super().rest()
        if rest is not None and self._added:
            for here in tiles(rest.size):
                rest[here] -= self.variates[here] * self._added
        return rest

    def restore_rest(self, rest: Vector, local_steps: int = 0) -> None:
        """See MemberHalf: the steps of this round, with their corrections again."""
        super().restore_rest(rest, local_steps)
        if local_steps:
            self._rates, share = self._saved
            self._add(share)

    def learned(self) -> dict[str, NDArray[Any]]:
        if not self._of_rates:
            return super().learned()
        rates = np.array([self._of_rates, self._rates, float(self._added)])
        return super().learned() | {"variates": self.variates, "rates": rates}

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        super().restore_learned(state)
        variates, rates = state.get("variates"), state.get("rates")
        if variates is None and rates is None:
            return
        size = self.variates.shape
        if variates is None or rates is None or variates.shape != size or rates.shape != (3,):
            raise BadMessage(f"the checkpoint's variates are not {self.variates.size} elements")
        if not (np.isfinite(rates).all() and (rates >= 0).all()):
            raise BadMessage(f"the checkpoint's variates are of the rates {rates.tolist()}")
        self.variates[:] = variates
        self._of_rates, self._saved = float(rates[0]), (float(rates[1]), np.float32(rates[2]))
