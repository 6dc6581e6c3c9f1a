"""The rounds of a job whose members are out of step: which contributions are in the next reply, and
what the reply says of them.

Two numbers. A contribution has its member's own, which grows by one with each (`next_round`); a
reply has the hub's. Every contribution joins the oldest open round; there is no other. So all that
the hub has of a member is merged when that round closes, and the lowest of the members' next
numbers is then the number below which everybody's contributions are merged: `complete`.

Stands between the rounds, which know what has arrived, and the closing rule, which knows no
members. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgetrain.exchange.hub.effects import Effect, Send
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.open_rounds import OpenRound
from edgetrain.exchange.messages import NO_WEIGHT, Beat
from edgetrain.strategies.arrivals import ArrivalRule
from edgetrain.strategies.closing import ClosingRule


@dataclass(frozen=True)
class _View:
    """An open round as the closing rule sees it (`arrivals.ArrivalView`)."""

    entry: OpenRound
    arrivals: ArrivalRounds

    @property
    def opened(self) -> float:
        return self.entry.opened

    @property
    def begun(self) -> float:
        return self.entry.opened

    @property
    def contributions(self) -> int:
        return len(self.entry.contributions)

    in_time = contributions

    @property
    def members(self) -> tuple[str, ...]:
        return self.entry.members

    @property
    def missing(self) -> set[str]:
        return self.arrivals.find_missing(self.entry)

    @property
    def lacks_nobody(self) -> bool:
        given = self.entry.contributions
        return all((m.name, m.next_round - 1) in given for m in self.arrivals.active())

    @property
    def advances(self) -> bool:
        return self.arrivals.advances


class ArrivalRounds:
    """See the module. `members` is the hub's; only read here."""

    def __init__(self, rule: ClosingRule, members: Members) -> None:
        assert isinstance(rule, ArrivalRule)
        self.complete = 0
        """As the last reply said it."""
        self.said_last = 0
        """Number of replies of which members were told at once that no more come; 0: none yet."""
        self._rule, self._members = rule, members

    def active(self) -> Iterator[MemberRecord]:
        return (member for member in self._members if member.trains and not member.is_done)

    @property
    def advances(self) -> bool:
        """Whether `complete` would be higher if the open round closed now."""
        most = None
        for member in self.active():
            most = member.clock
            if most <= self.complete:
                return False
        return most is not None

    def find_missing(self, entry: OpenRound | None) -> set[str]:
        """The names of the members that have steps left and no contribution in this round."""
        given = set() if entry is None else set(entry.members)
        return {member.name for member in self.active()} - given

    def find_due(self, entry: OpenRound | None, now: float) -> OpenRound | None:
        """The open round if it can be closed; `entry`: None if it has no contributions."""
        entry = entry or OpenRound(now)
        return entry if self._rule.due(_View(entry, self), now) else None

    def weigh(self, entry: OpenRound, round: int) -> tuple[int, ...]:
        ages = []
        given = {m.name for m in self.active()} | set(entry.members)
        counted = {k: c for k, c in entry.contributions.items() if c.weight > NO_WEIGHT}
        for key, each in counted.items():
            age = max(0, round - each.wish.applied) if each.wish is not None else 0
            weight = self._rule.weight(age, len(counted), len(given))
            ages.append(age)
            entry.contributions[key] = each._replace(weight=max(weight, 2 * NO_WEIGHT))
        return tuple(ages)

    def close(self) -> int:
        """The open round is merged: the new `complete`."""
        lowest = min((member.clock for member in self.active()), default=self.complete)
        self.complete = max(self.complete, lowest)
        return self.complete

    def first_number(self, member: MemberRecord) -> int:
        """The number of the first contribution of a member that joins, or comes back from far
        behind: where the slowest of the others is, so that nobody has to wait for it."""
        others = [each.clock for each in self.active() if each is not member]
        away = self._members.away.get(member.name) or member
        return max(min(others, default=self.complete), away.next_round)

    def last_reply(self, round: int) -> int:
        """The number of replies, `round`, once no member has anything left to give; else 0."""
        return 0 if next(self.active(), None) else round

    def say_last(self, round: int, epoch: int) -> list[Effect]:
        """Say at once that there are no more replies, to members that wait for all others."""
        last = self.last_reply(round)
        if last in (0, self.said_last):
            return []
        self.said_last = last
        told = sorted(self._members, key=lambda member: member.merged)
        return [Send(m.sender, Beat(epoch, m.merged, 0, last)) for m in told]
