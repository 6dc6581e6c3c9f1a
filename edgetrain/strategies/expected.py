"""What a member's parameters are expected to hold beside its local progress.

Pure: float32 vectors in and out. No socket, no clock, no thread, no codec, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.strategies.drift import Drift, Shares
from edgetrain.vectors.vector import TILE, Vector, all_finite, tiles


@dataclass(frozen=True)
class Flight:
    """A round that was submitted and not yet replied to."""

    round: int
    step: int
    own: Vector | None
    """None: nothing that `params` has to be freed of (a newcomer's gap, or `at_once`)."""
    at_once: bool = False
    """The reply comes before anyone looks at `params` again, and overwrites them."""
    partial: bool = False
    """`own` is what a lossy codec let through; the rest is in `params`."""
    foretold: Vector | None = None
    """See Drift."""
    left_out: Vector | None = None
    """Of a lossy contribution: see Unsent.sample."""


class Expected:
    """The base and the rounds in flight: expected = base + own_1 + ... + own_n, oldest first.

    With a `drift`, what that foretells the reply to be stands for each own_r. `params`, float32
    [elements], is the caller's, and is `expected` plus local progress. `base` is owned here.
    """

    def __init__(self, params: Vector, drift: Drift | None) -> None:
        self.params = params
        self.drift = drift
        self.base: Vector = params.copy()
        self.flights: deque[Flight] = deque()
        """The rounds in flight, oldest first."""

    def owns(self) -> list[Vector]:
        """What `params` have to be freed of, one vector for each round in flight, oldest first."""
        return [flight.own for flight in self.flights if flight.own is not None]

    def over(
        self, here: slice, scratch: Vector, owns: Sequence[Vector], shares: Shares | None = None
    ) -> Vector:
        """base + what stands for these rounds, over one tile, in `scratch`; always added in the
        same order. `shares`: of a drift, if not those in force."""
        expected = scratch[: here.stop - here.start]
        expected[:] = self.base[here]
        if self.drift is not None:
            self.drift.add_stand_ins(expected, here, owns, shares or self.drift.shares)
            return expected
        for own in owns:
            expected += own[here]
        return expected

    def subtract(self, own: Vector, settle: bool) -> bool:
        """own = params - expected. If `settle`, `params` become expected + what stands for own.

        Returns whether own is finite; if not, only a part of it was written.
        """
        scratch = np.empty(min(TILE, own.size), np.float32)
        before = self.owns()
        after = [*before, own]
        for here in tiles(own.size):
            expected = self.over(here, scratch, before) if settle else self.base[here]
            np.subtract(self.params[here], expected, out=own[here])
            if self.drift is not None and settle:
                self.params[here] = self.over(here, scratch, after)
            elif settle:  # the same sum, without walking the others again
                np.add(expected, own[here], out=self.params[here])
            if not all_finite(own[here]):
                return False
        return True

    def replace_base(self, base: Vector, applied: int, finished: bool) -> None:
        """Take `base` for the base, which answers all rounds in flight before round `applied`.

        Local progress stays, unless training has `finished` and nothing else is in flight.
        """
        scratch = np.empty(min(TILE, self.params.size), np.float32)
        before, at_once = self.owns(), any(flight.at_once for flight in self.flights)
        self.flights = deque(flight for flight in self.flights if flight.round >= applied)
        after = self.owns()
        base_only = at_once or (finished and not self.flights)
        for here in tiles(self.params.size):
            params = self.params[here]
            if not base_only:
                params -= self.over(here, scratch, before)
            self.base[here] = base[here]
            if base_only:  # nothing is there but what the base takes the place of
                params[:] = self.base[here]
            else:
                params += self.over(here, scratch, after)
