"""The member's half of every strategy that exchanges displacements: FedAvg, local SGD, DGA."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError, Diverged
from edgetrain.strategies.drift import Drift
from edgetrain.strategies.expected import Expected, Flight
from edgetrain.strategies.unsent import Unsent
from edgetrain.vectors.blocks import touched_blocks
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import TILE, Vector, combine, tile_sum, tiles

_TOO_FAST = (
    "training diverged on this member: lower the learning rate, clip gradients, or exchange sooner "
    "(local_steps, delay)"
)

EXPLODED = 100.0
"""A round that moves the parameters this many times farther than the norm of the base, and than any
earlier round at the same learning rate, has diverged. Averaging it in would ruin every other
member. Distances are divided by the round's learning rates: a round after a warm-up, or after a
restart of the rate, is as much longer as its rate is higher."""


def _length(vector: Vector) -> float:
    """Of all elements: a sample of a sparse model's rounds may have none of those that moved. It is
    infinite where squares are beyond float32."""
    with np.errstate(over="ignore"):
        squares = [float(np.dot(vector[here], vector[here])) for here in tiles(vector.size)]
    return math.sqrt(sum(squares))


class Growth:
    """Measures how much farther than others a round moves the parameters: see EXPLODED."""

    def __init__(self) -> None:
        self.rates = 0.0
        """Sum of the learning rates of this round's steps."""
        self._longest = 0.0
        """Length of the longest round so far, divided by its rates."""

    def judge(self, own: Vector, base: Vector) -> float:
        """Length of `own` over that of the base, or of the longest before it at this round's rates
        if that is less; 0: it is the first. The next round begins."""
        length, size = _length(own), _length(base)
        rates, self.rates = self.rates or 1.0, 0.0
        growth = length / max(self._longest * rates, size) if self._longest else 0.0
        self._longest = max(self._longest, length / rates)
        return growth


def _sent_part(flight: Flight, sent: Vector) -> Flight:
    """The flight of a contribution of which only `sent` reaches the others."""
    touched = touched_blocks(sent) if flight.may_be_few() else None
    return replace(flight, own=sent, at_once=False, partial=True, touched=touched)


class Displacement:
    """Every `local_steps` submit what the optimizer did; `delay` steps later take the mean instead.

    Delayed Gradient Averaging (Zhu et al., NeurIPS 2021, algorithm 1). In the paper's symbols
    (w parameters, K = local_steps, D = delay, own_r what this member did in round r, mean_r the
    mean of all members' own_r), D steps after round r was submitted::

        w <- w + mean_r - own_r

    `delay = 0` is local SGD and FedAvg (McMahan et al., 2017). Differences from the paper: the
    sum of all replies so far, `base`, is kept apart, and the parameters are rebuilt from it::

        expected = base + own_1 + ... + own_n       (the rounds in flight, oldest first)
        local    = params - expected                (progress since the last round's end)
        base    += mean_1;  params = base + own_2 + ... + own_n + local

    which is the same algebra, but `base` sees the same additions in the same order on every member
    and is therefore equal bit for bit; added in place, rounding would let the members drift apart.

    With a lossy codec own_r is what was sent, as the others read it (`sent`). What was not stays in
    `params` as local progress, so the next displacement has it in it, and nothing else has to
    remember it. Where that leads away from the fleet, as on unequal data, it waits beside `params`
    instead, own_r is again all of it, and each contribution has it added (`Unsent`;
    docs/decisions/012 says why). It is given up after the last round, when the parameters become
    the base; where it is little, as of dense codecs, there is no round for it alone.

    With a `drift`, the predicted reply stands for a round in flight, not own_r (`Drift`), until
    another correction is chosen. Contributions, replies and base do not change: whatever stands for
    a round is taken out again when its reply comes.

    `params` is shared with the caller's model and mutated in place, by `after_step` by at most one
    rounding (so that `expected` needs no vector of its own) and by `apply`. `base` is owned here.
    Vectors returned as contributions belong to the receiver, and are not written again while a
    reference to one or a view of it exists; `memory` is the pool they come from.
    """

    adjusts_gradient = moves_within = False
    moves_params = True
    keeps_rest = True
    tile_sums: Sequence[int] = ()

    def __init__(
        self,
        params: Vector,
        local_steps: int = 1,
        delay: int = 0,
        memory: VectorPool | None = None,
        drift: Drift | None = None,
    ) -> None:
        if local_steps < 1:
            raise ConfigError(f"local_steps = {local_steps}: a round has at least 1 local step")
        if delay < 0:
            raise ConfigError(f"delay = {delay}: allowed are 0 (wait at once) and more")
        self.params, self.local_steps, self.delay = params, local_steps, delay
        self.expected = Expected(params, drift)
        """The part of `params` that is not local progress."""
        self.base: Vector = self.expected.base
        self.applied = 0
        """Replies applied so far, which is also the number of the next reply."""
        self.round = 0
        """The next round to submit."""
        self.checksum = 0
        """Checksum of `base` after `applied` replies."""
        self._memory = memory or VectorPool(params.size)
        self.drift = drift
        """Prediction of replies; None: each own_r stands for its round."""
        self.unsent = Unsent(params.size)
        """The part of contributions that a lossy codec has not sent yet."""
        self._growth = Growth()
        self._steps = 0
        self._steps_taken = 0
        self._partial = self._finished = False
        self._note = ""
        self.start(0, 0)

    def start(self, applied: int, round: int) -> None:
        """Begin from `params` as they are: `applied` replies are in them, `round` is submitted
        next.

        A newcomer's first round may lie ahead of the next reply; the rounds between are replied to
        without a contribution of its own.
        """
        self.checksum = self.expected.restart()
        self.unsent.beside = None
        self.applied, self.round = applied, round
        self.expected.flights.extend(Flight(r, self._steps, None) for r in range(applied, round))

    def before_step(self) -> Vector | None:
        """Called between backward and the optimizer's step; displacements do not exist yet."""
        return None

    def note_rate(self, rate: float) -> None:
        self._growth.rates += rate

    def after_step(self) -> Vector | None:
        """Called after each optimizer step; returns the contribution at the end of a round."""
        self._steps += 1
        self._steps_taken += 1
        return self._submit() if self._steps_taken >= self.local_steps else None

    def quiet_steps(self) -> int:
        """Steps from now on that neither submit nor wait: nothing reads `params` after them."""
        quiet = self.local_steps - self._steps_taken - 1
        if self.expected.flights:
            oldest = self.expected.flights[0]
            quiet = min(quiet, oldest.step + self._delay_of(oldest.round) - self._steps - 1)
        return max(quiet, 0)

    def finish(self, rest: bool = True) -> Vector | None:
        """See MemberHalf: the unsent local progress, if any."""
        self.delay = 0
        self._finished = True
        if self._steps_taken or (rest and self._partial):
            return self._submit()
        if not self.expected.flights:  # otherwise the last reply does it
            self.expected.settle(slice(None))
        return None

    def sent(self, vector: Vector) -> None:
        """Only `vector` of the last contribution reaches the others; it is kept, not copied, where
        what was not sent stays in `params`."""
        unsent, flight = self.unsent, self.expected.flights.pop()
        self._partial = True
        left_out = unsent.sample(self._whole(flight), vector)
        beside, belongs_beside = unsent.beside, unsent.belongs_beside()
        if beside is None:
            flight = self._leave_in(flight, vector)
        elif not belongs_beside:
            flight = self._take_in(flight, vector)
        else:
            for here in tiles(vector.size):
                beside[here] -= vector[here]
        self.expected.flights.append(replace(flight, left_out=left_out))
        if beside is None and belongs_beside:
            self._take_out()

    def _whole(self, flight: Flight) -> Vector:
        """The sampled elements of what should have been sent with the last contribution."""
        sampled = slice(None, None, self.unsent.stride)
        if self.unsent.beside is not None:
            return self.unsent.beside[sampled]
        if flight.own is not None:
            return flight.own[sampled]
        return self.params[sampled] - self.base[sampled]

    def _leave_in(self, flight: Flight, sent: Vector) -> Flight:
        """Leave the unsent part in `params`: on equal data it is progress that all members share.
        Error feedback beside the model takes gradients without it (docs/decisions/012)."""
        if self.drift is not None:  # what was not sent has no stand-in: it is in `params` itself
            scratch = np.empty(min(TILE, sent.size), np.float32)
            for here in tiles(sent.size):
                params, part = self.params[here], sent[here]
                if flight.own is None:
                    params -= part
                    params += self.drift.stand_in(scratch[: part.size], here, sent)
                else:
                    unsent = np.subtract(flight.own[here], part, out=scratch[: part.size])
                    unsent *= 1 - self.drift.shares[0]
                    params += unsent
        return _sent_part(flight, sent)

    def _take_out(self) -> None:
        """Move the unsent part from `params` to a vector beside them, before any local steps. On
        unequal data it is this member's drift: the more a prototype left inside, the worse."""
        beside = self.unsent.beside = np.empty_like(self.params)
        scratch, owns = np.empty(min(TILE, beside.size), np.float32), self.expected.owns()
        for here in tiles(beside.size):
            expected = self.expected.over(here, scratch, owns)
            np.subtract(self.params[here], expected, out=beside[here])
            self.params[here] = expected
        self.expected.flights = deque(
            replace(flight, partial=False) for flight in self.expected.flights
        )

    def _take_in(self, flight: Flight, sent: Vector) -> Flight:
        """Move the unsent part back into `params`: their replies replace nothing."""
        beside = self.unsent.beside
        assert beside is not None
        self.unsent.beside = None
        self.expected.flights = deque(
            replace(f, own=None, predicted=None, touched=None) for f in self.expected.flights
        )
        scratch = np.empty(min(TILE, sent.size), np.float32)
        for here in tiles(sent.size):
            beside[here] -= sent[here]
            np.add(self.expected.over(here, scratch, [sent]), beside[here], out=self.params[here])
        return _sent_part(flight, sent)

    def follow_up(self) -> Vector | None:
        return None

    @property
    def steps_taken(self) -> int:
        return self._steps_taken

    @property
    def has_steps(self) -> bool:
        return self._steps_taken > 0

    def rest(self) -> Vector | None:
        """float32 [elements] what is in `params` and in no contribution: the steps of this round,
        and what lossy contributions have left there; None: nothing."""
        if not (self._partial or self._steps_taken):
            return None
        rest = self._memory.borrow_vector()
        scratch, owns = np.empty(min(TILE, rest.size), np.float32), self.expected.owns()
        for here in tiles(rest.size):
            np.subtract(self.params[here], self.expected.over(here, scratch, owns), out=rest[here])
            if self.unsent.beside is not None:
                rest[here] += self.unsent.beside[here]
        return rest

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        if not steps_taken and self.unsent.belongs_beside():
            self.unsent.beside = rest.copy()
        else:
            self.params += rest
        self._steps_taken = steps_taken
        self._partial = not steps_taken

    def learned(self) -> dict[str, NDArray[Any]]:
        return self.unsent.state() | ({} if self.drift is None else self.drift.state())

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.unsent.restore(state)
        if self.drift is not None:
            self.drift = self.expected.drift = self.drift.restore(state)

    def take_note(self) -> str:
        note, self._note = self._note, ""
        return note

    def note_merged(self, merged: int, complete: int) -> None:
        """A reply answers the contribution to its own round."""

    def due(self, ready: int = 0) -> int | None:
        """The round whose reply must be applied before the next step; None: there is none."""
        if not self.expected.flights:
            return None
        oldest = self.expected.flights[0]
        is_due = self._steps >= oldest.step + self._delay_of(oldest.round)
        return oldest.round if oldest.at_once or is_due else None

    def _delay_of(self, round: int) -> int:
        return 0 if self.drift is not None and round < self.drift.waits else self.delay

    def apply(self, reply: Iterable[Vector]) -> None:
        """Let the merged contribution of round `applied` replace this member's own.

        `reply`: the vector in consecutive pieces, each (but the last) a multiple of TILE elements.
        """
        pieces = list(reply)
        flight = self.expected.flights.popleft()
        keep = bool(self.expected.owns()) or flight.step != self._steps
        keep = keep or (flight.partial and not self._finished)
        assert not (keep and flight.at_once), "a step was taken before a reply that was due"
        if flight.left_out is not None:
            self.unsent.learn(pieces, flight.left_out)
        touched = None
        if keep or flight.at_once:
            touched = self.expected.few_touched(flight, pieces)
        if touched is None or not self.expected.add_blocks(flight, pieces, touched, keep):
            self.expected.keep_sums(self._add_tiles(flight, pieces, keep), touched)
        self.applied += 1
        self.tile_sums = self.expected.sums
        self.checksum = combine(self.tile_sums)

    def _add_tiles(self, flight: Flight, reply: list[Vector], keep: bool) -> list[int]:
        """Let a reply replace the round `flight` in all tiles. Returns the sums of the base's."""
        owns = self.expected.owns()
        drift = None if flight.own is None else self.drift
        whole = flight.left_out is not None and not flight.partial
        sent = self.unsent.sent_share(flight.own, flight.left_out)
        delay = self._delay_of(flight.round)
        shares = None if drift is None else drift.begin_reply(self.local_steps, delay, whole, sent)
        before = owns if flight.own is None else [flight.own, *owns]
        scratch, local = np.empty((2, min(TILE, self.params.size)), np.float32)
        sums = []
        start = 0
        for piece in reply:
            for tile in tiles(piece.size):
                here = slice(start + tile.start, start + tile.stop)
                params, base = self.params[here], self.base[here]
                if keep:
                    expected = self.expected.over(here, scratch, before)
                    np.subtract(params, expected, out=local[: params.size])
                if drift is not None and flight.own is not None:
                    drift.learn_tile(here, piece[tile], flight.own, flight.predicted)
                base += piece[tile]
                sums.append(tile_sum(base))
                if keep:
                    expected = self.expected.over(here, scratch, owns, shares)
                    np.add(expected, local[: params.size], out=params)
                else:  # nothing is in flight, unsent or new: the base is all there is
                    self.expected.settle(here)
            start += piece.size
        if drift is not None:
            self.drift, note = drift.end_reply()
            if self.drift is not drift and drift.stayed is not None:
                self.params -= drift.stayed  # which another correction knows nothing of
            self.expected.drift, self._note = self.drift, note or self._note
        return sums

    def rebase(self, base: Vector, applied: int) -> None:
        """Take `base` for the base after `applied` replies, which need not have come.

        Rounds in flight before that are answered by it, whatever became of them; local progress and
        later rounds in flight stay. The same as applying the replies, but for rounding.
        """
        self.checksum = self.expected.replace_base(base, applied, self._finished)
        self.applied = applied
        self.round = max(self.round, applied)

    def skip_to(self, round: int) -> None:
        """Contribute to `round` next; those between are replied to without this member."""
        self.expected.flights.extend(Flight(r, self._steps, None) for r in range(self.round, round))
        self.round = max(self.round, round)

    def _submit(self) -> Vector:
        own = self._memory.borrow_vector()
        at_once = self._delay_of(self.round) == 0 and not self.expected.flights
        beside = self.unsent.beside
        whole = own if beside is None or at_once else self._memory.borrow_vector()
        finite, touched = self.expected.subtract(own, settle=not at_once)
        if not finite:
            raise Diverged(f"parameters are not finite after step {self._steps}", _TOO_FAST)
        if (ratio := self._growth.judge(own, self.base)) > EXPLODED:
            raise Diverged(
                f"the round that ended with step {self._steps} led {ratio:.3g} times as far as any "
                "before it",
                _TOO_FAST,
            )
        if beside is not None:
            for here in tiles(own.size):
                beside[here] += own[here]
                whole[here] = beside[here]
        predicted = None if self.drift is None or at_once else self.drift.predicted()
        flying = None if at_once else own
        self.expected.flights.append(
            Flight(self.round, self._steps, flying, at_once, predicted=predicted, touched=touched)
        )
        self.round += 1
        self._steps_taken = 0
        return whole
