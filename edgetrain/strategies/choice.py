"""Which correction stands for a round in flight, chosen from a member's first rounds.

Pure: float32 vectors in and out. docs/decisions/027 has the figures behind the two constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage
from edgetrain.strategies.unsent import sampled, stride_of
from edgetrain.vectors.blocks import FEW, block_count, touched_blocks
from edgetrain.vectors.vector import Vector

ROUNDS = 3
"""Rounds, and their replies, from which it is chosen."""

APART = 1.25
"""Data count as unequal from where a member's first rounds led this far from the fleet, in squared
lengths of the way that the fleet itself went."""

SENT = 0.9
"""A contribution of which a codec sent less (of its squared length) is not evidence: what it left
out differs from member to member on equal data, too."""


class FirstRounds:
    """Judges from a member's first rounds whether its data differ from the fleet's.

    ::

        apart = |sum(own_r) - sum(reply_r)|^2 / |sum(reply_r)|^2    over the first ROUNDS rounds

    Write a round as own = mean + d + e, d the drift of the member's data, e the noise of its
    batches. Noise points elsewhere in each round and adds up slowly; drift adds up as fast as the
    way of all does. So `apart` says both how much of a contribution is not the fleet's, and whether
    that repeats. It is measured on at most 16,384 elements. The default of DGA takes `predict` from
    APART on. Below it takes `decay`, since members swing. `paper`, which costs nothing,
    where a round touched few blocks of the vector: with it alone a reply costs only these. A round
    in which the member did not move says nothing of its data, and is none of them.

    Each member chooses for itself, since a stand-in is its own affair: the base never sees it. So
    nothing is sent or agreed on, and a member whose data are like all data keeps its own progress
    among others that do not.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._touches_many = True
        self._touched = 0
        """Blocks that the round in progress touches."""
        self._stride = stride_of(elements)
        self._ways = np.zeros((2, len(range(0, elements, self._stride))))
        """Sums of own contributions and of their replies, float64 [2, sampled elements]."""
        self._way = np.zeros_like(self._ways)
        """Those of the round in progress."""
        self.rounds = 0

    def add_tile(self, here: slice, own: Vector, reply: Vector) -> None:
        """Add a tile of a round: `own` is the whole contribution, `reply` the tile."""
        for way, piece in zip(self._way, (own[here], reply), strict=True):
            place, elements = sampled(piece, here.start, self._stride)
            way[place] = elements
        self._touched += int(np.count_nonzero(touched_blocks(own[here])))

    def end_round(self) -> None:
        if not self._touched:
            return
        self.rounds += 1
        self._ways += self._way
        self._touches_many &= FEW * self._touched > block_count(self._elements)
        self._touched = 0

    @property
    def is_made(self) -> bool:
        return self.rounds >= ROUNDS

    @property
    def divergence(self) -> float:
        """How far the rounds so far led from the fleet; 0: the fleet has not moved yet."""
        own, reply = self._ways
        length = float(np.sum(reply * reply))
        return float(np.sum((own - reply) ** 2)) / length if length > 0 else 0.0

    @property
    def is_divergent(self) -> bool:
        return self.divergence >= APART

    @property
    def chosen(self) -> str:
        return "predict" if self.is_divergent else "decay" if self._touches_many else "paper"

    @property
    def reason(self) -> str:
        """The choice, its reason and its cost."""
        memory = "no" if self.chosen == "paper" else f"{4 * self._elements / 1e6:.3g} MB of"
        data = "at least 1.25: unequal data" if self.is_divergent else "below 1.25: similar data"
        return (
            f"{self.chosen}: divergence from the fleet over {self.rounds} rounds is "
            f"{self.divergence:.2g} ({data}); {memory} memory"
        )

    def state(self) -> dict[str, NDArray[Any]]:
        return {"ways": self._ways, "rounds": np.array([float(self.rounds)])}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        ways, rounds = state["ways"], state.get("rounds")
        good = ways.shape == self._ways.shape and rounds is not None and rounds.shape == (1,)
        if not (good and np.isfinite(ways).all() and 0 <= rounds[0] < ROUNDS):  # type: ignore[index]
            raise BadMessage("the checkpoint's first rounds are none that a choice is made from")
        self._ways[:] = ways
        self.rounds = int(rounds[0])  # type: ignore[index]
