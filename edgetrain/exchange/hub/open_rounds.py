"""The rounds that are open: what was given to each, who is missing, which one can close.

Contributions lie here, unread, from when they are whole until they are merged. No vector, no
message, no journal; what becomes of a round that closes is the hub's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edgetrain.exchange.hub.contributions import Contribution
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.records import Counted

Key = tuple[str, int]
"""(member, round it was meant for): what makes each contribution count once."""


@dataclass
class OpenRound:
    """What has been given to one round."""

    opened: float
    """When the first whole contribution came."""
    contributions: dict[Key, Contribution] = field(default_factory=dict)
    givers: dict[Key, MemberRecord] = field(default_factory=dict)
    """Of each contribution; some may have left since, and others have their names."""
    lacks: int = 0
    """Contributions that were missing when last looked: a look at every member costs a large fleet
    more than the rest, and is not worth it before so many have come."""

    @property
    def in_order(self) -> list[Contribution]:
        """All of them, by their members' names: the order does not depend on who came first."""
        return [self.contributions[key] for key in sorted(self.contributions)]

    @property
    def members(self) -> tuple[str, ...]:
        """Who gave, by name; once for each contribution."""
        return tuple(name for name, _ in sorted(self.contributions))

    def counted(self) -> tuple[Counted, ...]:
        """What the journal says of them."""
        return tuple(
            Counted(*key, self.contributions[key].weight) for key in sorted(self.contributions)
        )

    def settle(self) -> None:
        """All of them have been merged, and their givers are told so."""
        for key in sorted(self.givers):
            self.givers[key].merged = key[1] + 1


class OpenRounds:
    """By number. `members` is the hub's, and only looked at."""

    def __init__(self, members: Members, quorum: int, deadline_s: float) -> None:
        self._members = members
        self._quorum = quorum
        self._deadline_s = deadline_s
        self._open: dict[int, OpenRound] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[tuple[int, OpenRound]]:
        """Those that something was given to."""
        return iter(self._open.items())

    def get(self, round: int) -> OpenRound | None:
        """What was given to it, if anything was."""
        return self._open.get(round)

    def give(
        self,
        round: int,
        member: MemberRecord,
        meant_for: int,
        contribution: Contribution,
        now: float,
    ) -> bool:
        """A whole contribution. Whether a look at who is missing is worth it."""
        entry = self._open.get(round)
        if entry is None:
            entry = self._open[round] = OpenRound(now)
        key = member.name, meant_for
        entry.contributions[key], entry.givers[key] = contribution, member
        entry.lacks -= 1
        return entry.lacks <= 0 or now - entry.opened >= self._deadline_s

    def take_back(self, name: str) -> None:
        """Forget what a member gave."""
        for round, entry in list(self._open.items()):
            for key in [key for key in entry.contributions if key[0] == name]:
                del entry.contributions[key], entry.givers[key]
            if not entry.contributions:
                del self._open[round]

    def leave_out(self, round: int, contribution: Contribution) -> MemberRecord:
        """Forget one contribution; who gave it. The round may lack a quorum now, and is to be
        looked at again."""
        entry = self._open[round]
        key = next(key for key, there in entry.contributions.items() if there is contribution)
        del entry.contributions[key]
        if not entry.contributions:
            del self._open[round]
        return entry.givers.pop(key)

    def done(self, round: int) -> None:
        """It has been merged."""
        self._open.pop(round, None)

    def expected(self, round: int) -> set[str]:
        """Members that a round waits for."""
        return {
            member.name
            for member in self._members
            if member.state in ("training", "late")
            and max(member.first_round, member.next_round) <= round
        }

    def due(self, round: int, now: float) -> tuple[OpenRound, tuple[str, ...]] | None:
        """What was given to `round`, the oldest open one, and who is missing: if it is whole, or
        overdue with a quorum."""
        entry = self._at(round, now)
        if entry is None:
            return None
        there = {name for name, meant_for in entry.contributions if meant_for == round}
        missing = self.expected(round) - there
        overdue = now - entry.opened >= self._deadline_s
        if missing and not (overdue and len(entry.contributions) >= self._quorum):
            entry.lacks = len(missing)
            return None
        return entry, tuple(sorted(missing))

    def _at(self, round: int, now: float) -> OpenRound | None:
        """The round, if there is something in it; an empty one if nobody will ever give to it, and
        members wait for its reply all the same."""
        entry = self._open.get(round)
        if entry is not None:
            return entry
        forsaken = self._members and all(member.next_round > round for member in self._members)
        return OpenRound(now) if forsaken else None
