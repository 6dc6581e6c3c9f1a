"""Closing rules, the part of a strategy that decides when the hub closes a round.

Pure: no socket, no clock (the time is an argument), no thread. The hub asks the rule about its
oldest open round, after each whole contribution to it, each change of the members and several times
per beat, and only as long as members are missing that may still contribute. A round to which
no member can contribute is closed in any case. After closing a round the hub asks about the next.

`QuorumAndDeadline` is the rule of synchronous rounds. `arrivals` has the rules of
members that are out of step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class RoundView(Protocol):
    """A closing rule's view of an open round; it lasts as long as the call."""

    @property
    def opened(self) -> float:
        """When the first whole contribution came, in seconds on the clock of `now`."""

    @property
    def contributions(self) -> int:
        """Number of whole contributions in the round, with those that missed earlier rounds."""

    @property
    def members(self) -> Collection[str]:
        """The names of the members that contributed, once for each contribution."""

    @property
    def missing(self) -> Collection[str]:
        """The names of the members that the round lacks a contribution of. Looks at all members:
        ask for it last."""

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


@dataclass(frozen=True)
class QuorumAndDeadline:
    """A round waits for all members until its deadline, and then for a quorum.

    Backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016) are a quorum of n
    and a deadline of nearly 0: of n + b members the first n count.
    """

    quorum: int
    """Fewest contributions with which a round closes at its deadline."""
    deadline_s: float
    """Seconds after the first whole contribution."""

    def due(self, round: RoundView, now: float) -> bool:
        """See ClosingRule."""
        return round.contributions >= self.quorum and now - round.opened >= self.deadline_s
