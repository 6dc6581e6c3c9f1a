"""Closing rules, the part of a strategy that decides when the hub closes a round.

Pure: no socket, no clock (the time is an argument), no thread. The hub asks the rule about its
oldest open round, after each whole contribution to it, each change of the members and several times
per beat, and only as long as members are missing that may still contribute. A round to which
no member can contribute is closed in any case. After closing a round the hub asks about the next.

`QuorumAndDeadline` is the rule of synchronous rounds. `arrivals` has the rules of
members that are out of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class RoundView(Protocol):
    """A closing rule's view of an open round; it lasts as long as the call."""

    @property
    def opened(self) -> float:
        """When the first whole contribution came, in seconds on the clock of `now`."""

    @property
    def begun(self) -> float | None:
        """When the first whole contribution came that had not missed its own round; None: none."""

    @property
    def in_time(self) -> int:
        """Number of whole contributions that are meant for this round."""

    @property
    def contributions(self) -> int:
        """Number of whole contributions in the round, with those that missed earlier rounds."""

    @property
    def members(self) -> Collection[str]:
        """The names of the members that contributed, once for each contribution."""

    @property
    def missing(self) -> Collection[str]:
        """Members that the round lacks a contribution of. Looks at all: ask for it last."""

    @property
    def lacks_nobody(self) -> bool:
        """Whether no member is missing; stops looking at the first that is."""

    @property
    def advances(self) -> bool:
        """Out of step, whether all members have come further: if the round closes now, the number
        below which every member's contributions are merged is higher than the last reply said."""


class ClosingRule(Protocol):
    """When a round closes although members are missing."""

    def due(self, round: RoundView, now: float) -> bool:
        """Whether to close the round now. Changes nothing."""


@runtime_checkable
class LearningRule(ClosingRule, Protocol):
    """A closing rule that follows from the rounds before."""

    def note_round(self, begun: float, waited_s: Sequence[float], missing: int) -> None:
        """A round has closed that the first of its members had contributed to at `begun`, the
        others `waited_s` later; `missing` members had not."""


LATE_ALONE = 10
"""Deadlines that a round with late contributions alone waits for one of its own."""


def waiting_s(round: RoundView, now: float) -> float:
    """Seconds since the first contribution meant for this round; of late ones alone a share. A
    member back at another time sends its late one in the middle of the others' steps."""
    begun = round.begun
    return (now - round.opened) / LATE_ALONE if begun is None else now - begun


@dataclass(frozen=True)
class QuorumAndDeadline:
    """A round waits for all members until its deadline, and then for a quorum.

    Backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016) are a quorum of n
    and a deadline of nearly 0: of n + b members the first n count.
    """

    quorum: int
    """Fewest contributions with which a round closes at its deadline."""
    deadline_s: float
    """Seconds, as `waiting_s` counts them."""

    def due(self, round: RoundView, now: float) -> bool:
        """See ClosingRule. The time first: counting contributions takes as long as there are."""
        return waiting_s(round, now) >= self.deadline_s and round.contributions >= self.quorum


ROUNDS = 16
"""Rounds that a learned deadline follows from, at most."""

ENOUGH = 5
"""Rounds before there is one."""

SPREADS = 4
"""Median deviations from the median that a contribution may be late by."""

LEAST_S = 0.1
"""Least that a contribution may be late by: what a busy machine takes to answer."""

LEAST_SHARE = 0.1
"""Least that it may be late by, as a share of the time from round to round."""


class LearnedDeadline:
    """A round waits for a quorum, and for as long as contributions usually take.

    The deadline of the next round, in seconds after the first contribution that is meant for it, ::

        median(w) + max(SPREADS median(|w - median(w)|), LEAST_S, LEAST_SHARE of a round)

    w: how long after the first one each other contribution came, in the last ROUNDS rounds. One
    that had not come when its round closed counts as later than any: where that is every second one
    nobody is an outlier, and the deadline is `most_s` again. That is also the most it is, and what
    it is until ENOUGH rounds have closed. The median and the deviations from it do not feel how
    late a few members are. A restarted hub learns it again.
    """

    def __init__(self, quorum: int, most_s: float) -> None:
        self.quorum, self.most_s = quorum, most_s
        self.deadline_s = most_s
        """Deadline of the next round."""
        self._waits: deque[NDArray[np.float64]] = deque(maxlen=ROUNDS)
        self._lengths: deque[float] = deque(maxlen=ROUNDS)
        self._begun: float | None = None
        self._members = 0
        """Members that the last round could have had."""

    def due(self, round: RoundView, now: float) -> bool:
        """See ClosingRule. Until every second member's own contribution is there, a round waits for
        `most_s`: one member that is early would otherwise make all others late."""
        waited = waiting_s(round, now)
        is_over = round.begun is not None and waited >= self.deadline_s
        if not is_over and waited < self.most_s:
            return False  # before contributions are counted, which takes as long as there are
        is_in_time = 2 * round.in_time >= self._members or waited >= self.most_s
        return is_in_time and round.contributions >= self.quorum

    def note_round(self, begun: float, waited_s: Sequence[float], missing: int) -> None:
        if self._begun is not None:
            self._lengths.append(begun - self._begun)
        self._begun = begun
        self._members = 1 + len(waited_s) + missing
        self._waits.append(np.array([*waited_s, *[np.inf] * missing]))
        waits = np.concatenate(self._waits)
        if len(self._waits) < ENOUGH or not waits.size:
            return
        middle = float(np.median(waits))
        if not np.isfinite(middle):
            self.deadline_s = self.most_s
            return
        spread_s = SPREADS * float(np.median(np.abs(waits - middle)))
        least_s = max(LEAST_S, LEAST_SHARE * float(np.median(self._lengths)))
        self.deadline_s = min(middle + max(spread_s, least_s), self.most_s)
