"""The part of a member's parameters that is not local progress: base and rounds in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.strategies.drift import Drift, Shares
from edgetrain.vectors.blocks import (
    BLOCK,
    Flags,
    are_few,
    block_count,
    has_negative_zero,
    move_sums,
    places,
    read_blocks,
    touched_blocks,
    union_of,
    write_blocks,
)
from edgetrain.vectors.vector import TILE, Vector, all_finite, checksum, tiles


def add_reply(
    base: Vector,
    reply: Vector,
    touched: Flags,
    sums: list[int],
    params: Vector,
    rounds: tuple[Vector | None, Sequence[Vector]] | None,
) -> None:
    """base += reply in the blocks `touched`, with the `sums` of its tiles. The same sums in the
    same order as on whole tiles, so numbers in these blocks get the same bits.

    `rounds`: the one replied to, and those still in flight; `params` keep what they are beyond base
    and all of these. None: they become the base.
    """
    for place in places(touched, reply.size):
        old = read_blocks(base, place)
        new = old + read_blocks(reply, place)
        move_sums(sums, place, old, new)
        write_blocks(base, place, new)
        if rounds is not None:
            answered, flying = rounds
            owns = [read_blocks(own, place) for own in flying]
            if answered is not None:
                old += read_blocks(answered, place)
            local = read_blocks(params, place)
            local -= _add_all(old, owns)
            new = _add_all(new, owns)
            new += local
        write_blocks(params, place, new)


def subtract_blocks(
    base: Vector, params: Vector, own: Vector, few: Flags, flying: Sequence[Vector], settle: bool
) -> bool:
    """own = params - base - those `flying`, in the blocks `few`; if `settle`, params = that sum.

    Returns whether all of it is finite.
    """
    for place in places(few, own.size):
        expected = _add_all(read_blocks(base, place), (read_blocks(own, place) for own in flying))
        rest = read_blocks(params, place)
        rest -= expected
        write_blocks(own, place, rest)
        if settle:
            expected += rest
            write_blocks(params, place, expected)
        if not all_finite(rest.reshape(-1)):
            return False
    return True


def _add_all(total: Vector, others: Iterable[Vector]) -> Vector:
    """total += each of the others, in order."""
    for other in others:
        total += other
    return total


SPAN = 4 * TILE
"""Elements examined together for touched blocks."""

SAMPLE = 8 * BLOCK
"""One element in this many is looked at first: each costs a cache line."""


@dataclass(frozen=True)
class Flight:
    """A round that was submitted and not yet replied to."""

    round: int
    step: int
    own: Vector | None
    """The contribution; None: `params` does not contain it (a newcomer's gap, or `at_once`)."""
    at_once: bool = False
    """Whether the reply overwrites `params` before anything reads them again."""
    partial: bool = False
    """Whether `own` is only the part that a lossy codec sent; the rest is in `params`."""
    predicted: Vector | None = None
    """Sample of the gap when the round was submitted: see Drift."""
    left_out: Vector | None = None
    """Sample of what a lossy contribution left out: see Unsent.sample."""
    touched: Flags | None = None
    """Blocks in which the contribution may differ from zero; None: not known."""

    def may_be_few(self) -> bool:
        """Whether it is known to touch few blocks. A round without `own` touches none."""
        if self.touched is None:
            return self.own is None and not self.at_once
        return are_few(self.touched)


class Expected:
    """The base and the rounds in flight: expected = base + own_1 + ... + own_n, oldest first.

    With a `drift`, each own_r is replaced by its predicted reply. `params`, float32
    [elements], is the caller's, and is `expected` plus local progress. `base` is owned here.

    Where rounds touch few blocks (vectors/blocks.py), only these are worked on. The base gets the
    bits that work on all tiles would give it, because members may choose differently.
    """

    def __init__(self, params: Vector, drift: Drift | None) -> None:
        self.params = params
        self.drift = drift
        self.base: Vector = params.copy()
        self.flights: deque[Flight] = deque()
        """The rounds in flight, oldest first."""
        self.sums: list[int] = []
        """Checksum of each tile of `base`; empty: not known."""
        self._is_plain = False
        """Whether they are known, and no element of `base` is -0.0, which changes when 0 is added
        to it. Sums of others than -0.0 are never -0.0."""

    def restart(self) -> int:
        """Take `params` for the base, with nothing in flight. Returns the base's checksum."""
        self.base[:] = self.params
        if (stayed := self.stayed) is not None:
            self.params += stayed
        self.flights.clear()
        self.sums, self._is_plain = [], False
        return checksum(self.base)

    @property
    def stayed(self) -> Vector | None:
        """float32 [elements] that `params` have besides, and never contribute; see Leaving."""
        return None if self.drift is None else self.drift.stayed

    def settle(self, here: slice) -> None:
        """Let `params` be the base in these elements."""
        self.params[here] = self.base[here]
        if (stayed := self.stayed) is not None:
            stayed[here] = 0

    def owns(self) -> list[Vector]:
        """Contributions that `params` contain, one for each round in flight, oldest first."""
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

    # -- a contribution --------------------------------------------------------------------------

    def subtract(self, own: Vector, settle: bool) -> tuple[bool, Flags | None]:
        """own = params - expected. If `settle`, `params` become expected + what stands for own.

        Returns whether own is finite (if not, only a part of it was written), and the blocks in
        which it may be other than zero, if known.
        """
        before, scratch = self.owns(), np.empty(min(TILE, own.size), np.float32)
        if not settle and (stayed := self.stayed) is not None:  # the reply is waited for
            self.params -= stayed
            stayed[:] = 0
        if self.drift is not None:
            flying = [*before, own]
            for here in tiles(own.size):
                finite = self._subtract_tile(own, here, before, scratch, settle)
                if settle:
                    self.params[here] = self.over(here, scratch, flying)
                if not finite:
                    return False, None
            return True, None
        touched = union_of((f.touched for f in self.flights if f.own is not None), own.size)
        few = np.zeros(touched.size, np.bool_)
        for start in range(0, own.size, SPAN):
            stop = min(start + SPAN, own.size)
            blocks = slice(start // BLOCK, block_count(stop))
            flags = touched[blocks]
            if are_few(flags) and not self._differs_much(start, stop):
                progress = np.subtract(
                    self.params[start:stop], self.base[start:stop], out=own[start:stop]
                )
                flags |= touched_blocks(progress)
                if are_few(flags):
                    few[blocks] = flags
                    continue
            flags[:] = True
            for here in tiles(stop, start):
                if not self._subtract_tile(own, here, before, scratch, settle):
                    return False, None
        return subtract_blocks(self.base, self.params, own, few, before, settle), touched

    def _differs_much(self, start: int, stop: int) -> bool:
        """Whether a sample of the parameters differs from the base in every second element."""
        sampled = slice(start, stop, SAMPLE)
        differ = np.count_nonzero(self.params[sampled] != self.base[sampled])
        return 2 * int(differ) > -(-(stop - start) // BLOCK)

    def _subtract_tile(
        self, own: Vector, here: slice, before: Sequence[Vector], scratch: Vector, settle: bool
    ) -> bool:
        """`subtract` over one tile. Returns whether own is finite there."""
        expected = self.over(here, scratch, before) if settle else self.base[here]
        np.subtract(self.params[here], expected, out=own[here])
        if settle and self.drift is None:  # the same sum, without walking the others again
            np.add(expected, own[here], out=self.params[here])
        return all_finite(own[here])

    # -- a reply ---------------------------------------------------------------------------------

    def few_touched(self, flight: Flight, reply: Sequence[Vector]) -> Flags | None:
        """The blocks that this reply to `flight` changes, where they are few and known."""
        if self.drift is not None or not flight.may_be_few():
            return None
        touched = np.concatenate([touched_blocks(piece) for piece in reply])
        if flight.touched is not None:
            touched |= flight.touched
        return touched if are_few(touched) else None

    def add_blocks(
        self, flight: Flight, reply: Sequence[Vector], touched: Flags, keep: bool
    ) -> bool:
        """Let a reply, in pieces of whole tiles, replace the round `flight`, no longer in flight,
        in these blocks; it does not change the others. `keep`: local progress stays; else `params`
        become the base.

        Returns False if nothing was done: the reply has to be added to all tiles.
        """
        if not self._is_plain:
            return False
        owns, start = self.owns(), 0
        for piece in reply:
            here = slice(start, start + piece.size)
            blocks = slice(start // BLOCK, block_count(here.stop))
            answered = None if flight.own is None else flight.own[here]
            rounds = (answered, [own[here] for own in owns]) if keep else None
            sums = self.sums[start // TILE :]
            add_reply(self.base[here], piece, touched[blocks], sums, self.params[here], rounds)
            self.sums[start // TILE :], start = sums, here.stop
        return True

    def keep_sums(self, sums: list[int], touched: Flags | None) -> None:
        """A reply was added to all tiles of the base, which have these sums now.

        `touched`: see few_touched. In other blocks the reply was 0, and a sum with 0 is not -0.0.
        """
        self.sums = sums
        self._is_plain = touched is not None and not has_negative_zero(self.base, touched)

    def replace_base(self, base: Vector, applied: int, finished: bool) -> int:
        """Take `base` for the base, which answers all rounds in flight before round `applied`.

        Local progress stays, unless training has `finished` and nothing else is in flight. Returns
        the base's checksum.
        """
        scratch = np.empty(min(TILE, self.params.size), np.float32)
        before, at_once = self.owns(), any(flight.at_once for flight in self.flights)
        self.flights = deque(flight for flight in self.flights if flight.round >= applied)
        self.sums, self._is_plain = [], False
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
        return checksum(self.base)
