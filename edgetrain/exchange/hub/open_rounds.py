"""The open rounds: contributions to each, who is missing, and whether one can close.

Contributions are kept here, encoded, from when they are whole until they are merged. Knows neither
vectors nor messages nor the journal. What happens to a round that closes is `rounds`' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from edgetrain.exchange.hub.contributions import Contribution
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.records import CountedOnce
from edgetrain.strategies.closing import ClosingRule, LearningRule

Key = tuple[str, int]
"""(member's name, round that it contributed to): each contribution counts once."""


@dataclass
class OpenRound:
    opened: float = math.inf
    """When the first whole contribution came, apart from late ones that came before the round's
    turn; infinity: there are only such ones."""
    contributions: dict[Key, Contribution] = field(default_factory=dict)
    senders: dict[Key, MemberRecord] = field(default_factory=dict)
    """Sender of each contribution. Some may have left since, and their names may be reused."""
    begun: float | None = None
    """When the first whole contribution came that was meant for this round; None: none has."""
    waited_s: list[float] = field(default_factory=list)
    """Seconds after that of the others that were meant for it."""
    lacks: int = 0
    """Contributions missing at the last check. Checking all members is slow in a large fleet, so
    check again only after this many have arrived."""

    @property
    def in_order(self) -> list[Contribution]:
        """All contributions, by their members' names: the order of arrival does not matter."""
        return [*self.by_key.values()]

    @property
    def by_key(self) -> dict[Key, Contribution]:
        """The same by their keys."""
        return {key: self.contributions[key] for key in sorted(self.contributions)}

    @property
    def applied(self) -> int:
        """Replies that members had applied as they contributed; the least of them."""
        return min((c.wish.applied for c in self.in_order if c.wish is not None), default=0)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(name for name, _ in sorted(self.contributions))

    def mark_merged(self) -> None:
        """Note in their senders' records that all of these contributions are merged."""
        for key in sorted(self.senders, key=itemgetter(1)):
            self.senders[key].mark_merged(key[1], self.contributions[key].members)


def counted(by_key: Mapping[Key, Contribution]) -> tuple[CountedOnce, ...]:
    """These contributions as a journal has them."""
    return tuple(CountedOnce(*key, each.weight, each.members) for key, each in by_key.items())


class Seen(NamedTuple):
    """An open round as a closing rule sees it (`closing.RoundView`)."""

    entry: OpenRound
    find_missing: Callable[[], Collection[str]]

    @property
    def opened(self) -> float:
        return self.entry.opened

    @property
    def begun(self) -> float | None:
        """When the first of them came that did not miss its own round."""
        return self.entry.begun

    @property
    def in_time(self) -> int:
        """How many of them did not."""
        return 0 if self.entry.begun is None else 1 + len(self.entry.waited_s)

    @property
    def contributions(self) -> int:
        """How many there are; those in a gateway's one by one."""
        return sum(each.members for each in self.entry.contributions.values())

    @property
    def members(self) -> Collection[str]:
        """Names, once for each contribution."""
        return self.entry.members

    @property
    def missing(self) -> Collection[str]:
        """The names of the members that have not contributed."""
        return self.find_missing()

    @property
    def lacks_nobody(self) -> bool:
        """Whether there is no such member."""
        return not self.find_missing()

    @property
    def advances(self) -> bool:
        """In step a reply says no more than that its round is merged."""
        return False


def expected(members: Members, round: int) -> set[str]:
    """The names of the members that a round waits for, or would if it had no contributions."""
    return {member.name for member in members if member.is_waited_for(round)}


class OpenRounds:
    """The open rounds by number. `members` is the hub's; only read here."""

    def __init__(self, members: Members, closing: ClosingRule) -> None:
        self._members = members
        self._closing = closing
        self._learning = closing if isinstance(closing, LearningRule) else None
        self._open: dict[int, OpenRound] = {}

    def __len__(self) -> int:
        return len(self._open)

    def sizes(self) -> Mapping[int, int]:
        return {round: len(entry.contributions) for round, entry in self._open.items()}

    def __iter__(self) -> Iterator[tuple[int, OpenRound]]:
        return iter(self._open.items())

    def get(self, round: int) -> OpenRound | None:
        """A round, if it has contributions."""
        return self._open.get(round)

    def add(
        self,
        round: int,
        member: MemberRecord,
        meant_for: int,
        contribution: Contribution,
        now: float,
        *,
        opens: bool = True,
    ) -> bool:
        """Add a whole contribution; unless it `opens` the round, the round's time has not come.
        Returns whether the round may be due: worth a check."""
        entry = self._open.setdefault(round, OpenRound())
        if opens:
            entry.opened = min(entry.opened, now)
        key = member.name, meant_for
        entry.contributions[key], entry.senders[key] = contribution, member
        if entry.begun is not None:
            entry.waited_s += [now - entry.begun] if meant_for == round else []
        elif meant_for == round:
            entry.begun = now
        entry.lacks -= 1
        return entry.lacks <= 0 or self._closing.due(self._seen(round, entry), now)

    def withdraw(self, name: str) -> None:
        for round, entry in list(self._open.items()):
            for key in [key for key in entry.contributions if key[0] == name]:
                del entry.contributions[key], entry.senders[key]
            if not entry.contributions:
                del self._open[round]

    def drop_contribution(self, round: int, contribution: Contribution) -> MemberRecord:
        """Drop one; returns its sender. Check the round again: it may lack a quorum."""
        entry = self._open[round]
        key = next(key for key, there in entry.contributions.items() if there is contribution)
        del entry.contributions[key]
        if not entry.contributions:
            del self._open[round]
        return entry.senders.pop(key)

    def carry_over(self, round: int, kept: bool) -> None:
        """Rounds before this one are over: their contributions are late ones of this round; unless
        late ones are `kept`, they are dropped for good."""
        for earlier in sorted(each for each in self._open if each < round):
            entry = self._open.pop(earlier)
            if not kept:
                entry.mark_merged()
                continue
            late = self._open.setdefault(round, OpenRound())
            late.opened = min(late.opened, entry.opened)
            late.contributions |= entry.contributions
            late.senders |= entry.senders

    def remove(self, round: int, missing: int) -> None:
        entry = self._open.pop(round, None)
        if entry is not None and entry.begun is not None and self._learning is not None:
            self._learning.note_round(entry.begun, entry.waited_s, missing)

    def check(self, round: int, now: float) -> tuple[OpenRound, tuple[str, ...]] | None:
        """If `round`, the oldest open one, is due: its contributions, and who is missing."""
        entry = self._open.get(round)
        if entry is None:
            return (OpenRound(now), ()) if self._is_forsaken(round) else None
        missing = self._find_missing(round, entry)
        if missing and not self._closing.due(Seen(entry, lambda: missing), now):
            entry.lacks = len(missing)
            return None
        return entry, tuple(sorted(missing))

    def _seen(self, round: int, entry: OpenRound) -> Seen:
        return Seen(entry, lambda: self._find_missing(round, entry))

    def _find_missing(self, round: int, entry: OpenRound) -> set[str]:
        there = {name for name, meant_for in entry.contributions if meant_for == round}
        return expected(self._members, round) - there

    def _is_forsaken(self, round: int) -> bool:
        return bool(self._members) and all(m.next_round > round for m in self._members)
