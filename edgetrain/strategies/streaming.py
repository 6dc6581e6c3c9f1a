"""Displacement halves over fragments of the parameters, which take turns: a round is of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.ranges import Ranges, TileSums
from edgetrain.vectors.vector import Vector, tile_sum, tiles, zeros


class Fragment(Displacement):
    """Displacements of one fragment of the parameters, `params`, float32 [fragment], a view.

    Its rounds are numbered from 0, its own ones only. It contributes when it is asked to, not by
    itself; a reply is mixed with what it replaces: see Streaming.
    """

    def __init__(self, params: Vector, delay: int, alpha: float) -> None:
        self.alpha = np.float32(alpha)
        self.submitted_at = 0
        """Steps before its last contribution."""
        super().__init__(params, 1, delay)

    @property
    def has_ended(self) -> bool:
        return self._finished

    def has_rest(self, rest: bool) -> bool:
        """Whether steps are in no contribution yet, or with `rest` what a lossy codec left out."""
        return bool(self._steps_taken) or (rest and self._partial)

    def count_step(self) -> None:
        self._steps += 1
        self._steps_taken += 1

    def submit(self) -> Vector:
        self.submitted_at = self._steps
        return self._submit()

    def apply(self, reply: Iterable[Vector]) -> None:
        """Let a reply replace this fragment's contribution, all but the share `alpha` of the
        difference. That share stays with the member, and is in its next contribution."""
        if not self.alpha or self._finished:
            super().apply(reply)
            return
        local = self.params.copy()
        super().apply(reply)
        local -= self.params
        local *= self.alpha
        self.params += local
        self._partial = True


class Streaming:
    """Fragments of the parameters in turn: every `local_steps` a round begins, of the next one.

    Streaming DiLoCo (Douillard et al., 2025): P fragments, each exchanged every H steps, staggered
    so that every H/P steps one of them is sent; a reply takes up to tau steps, and is mixed into
    what the member has by then::

        theta <- alpha theta_local + (1 - alpha) theta_global

    Here `local_steps` = H/P, tau = `delay`, and theta_global keeps what the member did since: it is
    base + (contributions in flight) + (steps since the last one), as in DGA (`Displacement`), so
    alpha = 0 loses no step. In the paper theta_global is the base alone: alpha = 0 there drops the
    steps of the delay, and its default is 1/2. Fragments are ranges of the flat vector, cut between
    blocks and not between layers; the outer optimizer is the hub's. The first round of fragment p
    comes after (p + 1) `local_steps`. At the end each fragment sends what is left of it, the next
    one when a reply is here, and its reply is applied whole.

    With P = 1 and alpha = 0 it is `Displacement`, bit for bit. `params`, float32 [elements], is
    shared with the caller's model; fragments are views of it, so nothing is copied.
    """

    adjusts_gradient = moves_within = False
    moves_params = True
    keeps_rest = True
    tile_sums: Sequence[int] = ()

    def __init__(
        self, params: Vector, count: int, alpha: float, local_steps: int, delay: int
    ) -> None:
        """`count` is P. ConfigError for more fragments than the vector has blocks."""
        self.local_steps = local_steps
        self.ranges = Ranges(params.size, count)
        self.fragments = [Fragment(params[here], delay, alpha) for here in self.ranges]
        self.applied = self.round = self.checksum = 0
        self._delay = delay
        self._sums = TileSums(self.ranges)
        self._steps_taken = self._steps = 0
        self._stepped_at = 0
        """Steps, after the last one that the optimizer took."""
        self._is_ending = self._ends_with_rest = False
        self.start(0, 0)

    @property
    def delay(self) -> int:
        """Steps from a contribution until its reply is applied."""
        return self._delay

    @delay.setter
    def delay(self, delay: int) -> None:
        self._delay = delay
        for fragment in self.fragments:
            fragment.delay = delay

    @property
    def base(self) -> Vector:
        """See MemberHalf: a copy."""
        base: Vector = np.concatenate([fragment.base for fragment in self.fragments])
        return base

    def _of(self, round: int) -> Fragment:
        return self.fragments[round % self.ranges.count]

    # -- a beginning, and lost replies ---------------------------------------------------------

    def start(self, applied: int, round: int) -> None:
        for number, fragment in enumerate(self.fragments):
            before = self.ranges.rounds_before
            fragment.start(before(applied, number), before(round, number))
        self.applied, self.round = applied, round
        self._sum_all()

    def rebase(self, base: Vector, applied: int) -> None:
        for number, (here, fragment) in enumerate(zip(self.ranges, self.fragments, strict=True)):
            fragment.rebase(base[here], self.ranges.rounds_before(applied, number))
        self.applied, self.round = applied, max(self.round, applied)
        self._sum_all()

    def skip_to(self, round: int) -> None:
        for number, fragment in enumerate(self.fragments):
            fragment.skip_to(self.ranges.rounds_before(round, number))
        self.round = max(self.round, round)

    def _sum_all(self) -> None:
        for number in range(self.ranges.count):
            self._sum(number)

    def _sum(self, round: int) -> None:
        here, base = self.ranges.of(round), self._of(round).base
        first = here.start
        pieces = (base[t.start - first : t.stop - first] for t in tiles(here.stop, first))
        self.checksum = self._sums.replace(round, map(tile_sum, pieces))

    # -- steps ---------------------------------------------------------------------------------

    def before_step(self) -> Vector | None:
        """See MemberHalf: displacements do not exist yet."""
        return None

    def note_rate(self, rate: float) -> None:
        self._stepped_at = self._steps + 1
        for fragment in self.fragments:
            fragment.note_rate(rate)

    def after_step(self) -> Vector | None:
        """See MemberHalf: the contribution of the fragment whose turn it is, at a round's end."""
        self._steps += 1
        self._steps_taken += 1
        for fragment in self.fragments:
            fragment.count_step()
        if self._steps_taken < self.local_steps:
            return None
        return self._submitted(self._of(self.round).submit())

    def _submitted(self, own: Vector) -> Vector:
        self.round += 1
        self._steps_taken = 0
        return own

    def quiet_steps(self) -> int:
        quiet = self.local_steps - self._steps_taken - 1
        flights = self._of(self.applied).expected.flights
        if flights:
            quiet = min(quiet, flights[0].step + self._delay - self._steps - 1)
        return max(quiet, 0)

    def sent(self, vector: Vector) -> None:
        self._of(self.round - 1).sent(vector)

    # -- replies -------------------------------------------------------------------------------

    def note_merged(self, merged: int, complete: int) -> None:
        """A reply answers the contribution to its own round."""

    def due(self, ready: int = 0) -> int | None:
        """See MemberHalf: replies are applied in the order of rounds."""
        return None if self._of(self.applied).due() is None else self.applied

    def apply(self, reply: Iterable[Vector]) -> None:
        """See MemberHalf: the pieces are those of the round's fragment."""
        self._of(self.applied).apply(reply)
        self._sum(self.applied)
        self.applied += 1

    # -- the end -------------------------------------------------------------------------------

    def finish(self, rest: bool = True) -> Vector | None:
        """See MemberHalf: what is left of the first fragment; `follow_up` gives the others."""
        self.delay = 0
        self._is_ending, self._ends_with_rest = True, rest
        return self.follow_up()

    def follow_up(self) -> Vector | None:
        """After the last step, what is left of the next fragment. One without a rest is sent if
        another one behind it has some: rounds take turns."""
        if not self._is_ending:
            return None
        if not any(f.has_rest(self._ends_with_rest) for f in self.fragments if not f.has_ended):
            for fragment in self.fragments:
                fragment.finish(rest=False)
            self._is_ending = False
            return None
        fragment = self._of(self.round)
        if fragment.has_ended and fragment.expected.flights:
            return None  # rounds went on without this member: the reply to its last one comes first
        own = None if fragment.has_ended else fragment.finish(rest=self._ends_with_rest)
        fragment.submitted_at = self._steps
        return self._submitted(fragment.submit() if own is None else own)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """See MemberHalf: those of this round."""
        return self._steps_taken

    @property
    def has_steps(self) -> bool:
        return self._of(self.round).submitted_at < self._stepped_at

    def rest(self) -> Vector | None:
        rests = [fragment.rest() for fragment in self.fragments]
        if all(rest is None for rest in rests):
            return None
        whole = zeros(self.ranges.elements)
        for here, rest in zip(self.ranges, rests, strict=True):
            if rest is not None:
                whole[here] = rest
        return whole

    def restore_rest(self, rest: Vector, steps_taken: int = 0) -> None:
        """See MemberHalf. Fragments that have contributed before have steps of earlier rounds."""
        self._steps_taken = steps_taken
        for number, (here, fragment) in enumerate(zip(self.ranges, self.fragments, strict=True)):
            rounds = min((self.round - 1 - number) % self.ranges.count, self.round)
            steps = rounds * self.local_steps + steps_taken
            fragment.restore_rest(rest[here], steps)
            fragment.submitted_at = self._steps - steps

    def take_note(self) -> str:
        """See MemberHalf: it decides nothing."""
        return ""

    def learned(self) -> dict[str, NDArray[Any]]:
        """See MemberHalf: of each fragment, with its number."""
        return {
            f"{name}.{number}": value
            for number, fragment in enumerate(self.fragments)
            for name, value in fragment.learned().items()
        }

    def restore_learned(self, state: Mapping[str, NDArray[Any]]) -> None:
        for number, fragment in enumerate(self.fragments):
            ending = f".{number}"
            mine = {k.removesuffix(ending): v for k, v in state.items() if k.endswith(ending)}
            fragment.restore_learned(mine)
