"""The member's half of strategies whose members are out of step: each takes the replies that are
there, at the ends of its own rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from edgetrain.strategies.displacement import Displacement
from edgetrain.strategies.expected import Flight
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import TILE, Vector, combine, tile_sum, tiles


class OutOfStep(Displacement):
    """Every `local_steps` steps submit what the optimizer did; take in the replies that are there.

    Two numbers. A contribution has this member's own (`round`), a reply the hub's (`applied`). A
    reply says below which own number this member's contributions are in it, or in earlier ones
    (`merged`), and below which number all members' are (`complete`)::

        parameters = base + stand_in(own_1) + ... + stand_in(own_n) + steps since

    over the contributions in flight, those from `merged` on. Replies are applied in the hub's
    order, so `base` is equal on all members after the same reply, bit for bit.

    A member waits only
    - `delay` steps after a contribution, for the reply that has it. 0: at once.
    - if it is more than `lead` rounds ahead of the slowest member, for the others: no step is taken
      on a base that lacks a contribution numbered below `round` - `lead` (Ho et al., NeurIPS 2013,
      section 3).

    `stands_in`: own progress stays in the parameters until a reply has it. Otherwise the parameters
    are the base alone at the beginning of a round, as in the papers (Dean et al., 2012; Nguyen et
    al., 2022), whose members download the server's model.

    With `fetch` > 0 replies are taken every `fetch` steps, not at the ends of rounds (Downpour's
    n_fetch; `local_steps` is its n_push).
    """

    def __init__(
        self,
        params: Vector,
        local_steps: int = 1,
        delay: int = 0,
        memory: VectorPool | None = None,
        *,
        lead: float = math.inf,
        fetch: int = 0,
        stands_in: bool = True,
    ) -> None:
        self.lead, self.fetch, self.stands_in = lead, fetch, stands_in
        self._merged = self._complete = 0
        """Numbers below which this member's contributions, and those of all members, are in `base`,
        or will be with the next reply."""
        super().__init__(params, local_steps, delay, memory)
        self.keeps_rest = stands_in

    def start(self, applied: int, round: int) -> None:
        """Begin from `params` after `applied` replies; `round` is this member's next."""
        super().start(applied, applied)
        self.round = round

    def note_merged(self, merged: int, complete: int) -> None:
        self._merged = max(self._merged, merged)
        self._complete = max(self._complete, complete)

    def quiet_steps(self) -> int:
        """See Displacement; and replies are not taken after these steps."""
        quiet = super().quiet_steps()
        return min(quiet, self.fetch - self._steps % self.fetch - 1) if self.fetch else quiet

    def due(self, ready: int = 0) -> int | None:
        """See MemberHalf, and the class for when a reply is due."""
        flights = self.expected.flights
        late = bool(flights) and self._steps - flights[0].step >= self.delay
        ahead = self.round - self.lead > self._complete and not self._finished
        takes = self._steps % self.fetch if self.fetch else self._steps_taken
        there = self.applied < ready and (not takes or self._finished)
        return self.applied if late or ahead or there else None

    def apply(self, reply: Iterable[Vector]) -> None:
        """Apply the next reply, which replaces the contributions that it has. See Displacement."""
        pieces, flights = list(reply), self.expected.flights
        before = self.expected.owns()
        at_once = any(flight.at_once for flight in flights)
        while flights and flights[0].round < self._merged:
            flight = flights.popleft()
            if flight.left_out is not None:
                self.unsent.learn(pieces, flight.left_out)
        rest = self._steps_taken or (self._partial and not self._finished)
        keep = not at_once and bool(flights or rest)
        sums = self._add_reply(pieces, before if keep else None)
        self.expected.keep_sums(sums, None)
        self.checksum = combine(sums)
        self.applied += 1

    def _add_reply(self, reply: list[Vector], before: list[Vector] | None) -> list[int]:
        """Add a reply to the base; returns the sums of its tiles. `before`: what stood in so far,
        if local progress stays; None: the parameters become the base."""
        owns = self.expected.owns()
        scratch, local = np.empty((2, min(TILE, self.params.size)), np.float32)
        sums, start = [], 0
        for piece in reply:
            for tile in tiles(piece.size):
                here = slice(start + tile.start, start + tile.stop)
                params, base = self.params[here], self.base[here]
                if before is not None:
                    expected = self.expected.over(here, scratch, before)
                    np.subtract(params, expected, out=local[: params.size])
                base += piece[tile]
                sums.append(tile_sum(base))
                if before is None:
                    params[:] = base
                else:
                    expected = self.expected.over(here, scratch, owns)
                    np.add(expected, local[: params.size], out=params)
            start += piece.size
        return sums

    def rebase(self, base: Vector, applied: int) -> None:
        self.checksum = self.expected.replace_base(base, self._merged, self._finished)
        self.applied = applied

    def skip_to(self, round: int) -> None:
        """Give the next contribution this number: the others have come that far."""
        self.round = max(self.round, round)

    def _submit(self) -> Vector:
        own = super()._submit()
        flight = self.expected.flights[-1]
        if not self.stands_in and flight.own is not None:
            self.params[:] = self.base
            self.expected.flights[-1] = Flight(flight.round, flight.step, None)
        return own
