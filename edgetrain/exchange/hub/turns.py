"""Rounds that members average among themselves: vote, run, commit.

A contribution to such a round is a vote, without a vector: its member has one. Once a round is due,
its members are told to run; once all have said that they have the mean, with equal checksums, it
counts, and is closed like any other. A turn is one attempt:

=======  ============================================  =======  ===================================
state    what happens                                  next     what the hub says
=======  ============================================  =======  ===================================
idle     a round is due                                running  RunRound, to all that train
running  a member's connection to the hub is lost      running  one with a higher number, to the
                                                                others, if they are more than half
running  that member has come back                     running  one with a higher number, to all
running  a member says that its connection to another  running  the same, around the two if that can
         one broke                                              be; the second time in a round the
                                                                lost one is expelled
running  all have answered, some that another one was  running  the same, around those that came
         silent                                                 least far and whom they waited for
running  all have the mean, checksums are equal        agreed   the round's replies
running  all have the mean, checksums differ           running  the same; at the third the job ends
agreed   another round is due                          running  RunRound
=======  ============================================  =======  ===================================

A turn without a member that may come back counts once that is given up: what the others do
meanwhile is done then, so that a lost member costs them no more than the wait for it.

A member keeps its contribution until the round's reply is there, and runs again from it; what a
member that has gone gave to a round that does not count yet is dropped. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.exchange.further_messages import Ran, RunRound
from edgetrain.exchange.hub.effects import Effect, Note, Send
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.places import Reach
from edgetrain.exchange.peers.schedules import places_of

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_DIFFERENT = 3
"""Turns of one round in which members may end with different means: memory that fails, or a
member that lies."""

MOST_LOST = 2
"""Turns of one round in which others may have lost the same member."""


def in_places(names: Iterable[str]) -> list[str]:
    """In the order of places, as far as members can connect so: by name, m2 before m10, so that
    bits do not depend on who joins first."""
    return sorted(names, key=lambda name: (len(name), name))


@dataclass(frozen=True)
class _Goal:
    """The purpose of a turn, and its contributions."""

    round: int
    is_base: bool
    weights: Mapping[str, float]

    def is_of(self, other: _Goal | None) -> bool:
        return other is not None and (self.round, self.is_base) == (other.round, other.is_base)


class Turns:
    """The turns of a job's rounds. `members` is the hub's; only read here."""

    def __init__(self, topology: str, members: Members, reach: Callable[[], Reach]) -> None:
        self.topology = topology
        self.why_not = ""
        """Why no round can be run any more; "": it can."""
        self._members, self._reach = members, reach
        self._goal: _Goal | None = None
        self._number = 0
        self._is_over = True
        """Whether the turn came to nothing, or there was none."""
        self._ran: dict[str, int] = {}
        """Checksums of the means that members have."""
        self._silent: dict[str, tuple[int, str]] = {}
        """How far members came that wait in vain, and for whom. One silence makes all wait: only
        who came least far has lost somebody."""
        self._different = 0
        self._lost: Counter[int] = Counter()
        """Turns of this round in which others have lost each member, by its session."""
        self._cut: set[frozenset[int]] = set()
        """Sessions of pairs of which one has lost the other."""
        self.count = 0
        """Turns since the hub began, or was restored."""

    def start(self, epoch: int) -> None:
        """The hub begins, or was restored for the `epoch`-th time: turns have higher numbers."""
        self._number = (epoch & 0x7FFF) << 16

    def advance(
        self, round: int, weights: Mapping[str, float], is_base: bool = False
    ) -> tuple[list[Effect], bool]:
        """`round` is due, with the samples behind the contribution of each member that trains.
        `is_base`: all are to get the parameters of the members with a weight. Returns what is to be
        said, and whether all have the mean."""
        everyone = [member for member in self._members if member.name in weights]
        here = [member for member in everyone if member.unreachable_since is None]
        if any(member.returning for member in everyone) or 2 * len(here) <= len(everyone):
            return [], False
        goal = _Goal(round, is_base, {member.name: weights[member.name] for member in here})
        if goal == self._goal and not self._is_over:
            return [], len(here) == len(everyone) and self._is_agreed()
        if not goal.is_of(self._goal):
            self._different, self._lost = 0, Counter()
        self._goal = goal
        return self._begin(goal, here), False

    @property
    def is_averaging(self) -> bool:
        goal = self._goal
        is_round = goal is not None and not goal.is_base
        return is_round and not self._is_over and not self._is_agreed()

    def accept(self, member: MemberRecord, message: Ran) -> MemberRecord | None:
        """What has become of a member's turn. Answers to earlier ones count for nothing. Returns
        a member that others have lost too often, or that came and has not got the base; or None."""
        goal = self._goal
        if goal is None or message.attempt != self._number or self._is_over:
            return None
        if message.lost and not message.silent:
            return self._part({member.name: message.lost})
        if message.lost:
            self._silent[member.name] = (message.silent, message.lost)
        else:
            self._ran[member.name] = message.checksum
        if self._silent:
            if len(self._silent) + len(self._ran) < len(goal.weights):
                return None
            least = min(self._silent.values())[0]
            return self._part({n: lost for n, (at, lost) in self._silent.items() if at == least})
        if len(self._ran) == len(goal.weights) and len({*self._ran.values()}) > 1:
            self._is_over = True
            if goal.is_base and (came := [*filter(self._came_late, goal.weights)]):
                return self._members.named(came[-1])
            self._different += 1
            if self._different >= MOST_DIFFERENT:
                self.why_not = (
                    f"members end with different means of round {goal.round}: "
                    + ", ".join(f"{name} {sum_:016x}" for name, sum_ in sorted(self._ran.items()))
                )
        return None

    def _part(self, lost: Mapping[str, str]) -> MemberRecord | None:
        """The turn is over, because members have lost these. Returns whom others have lost too
        often, or that lost others as soon as it came; or None."""
        self._is_over = True
        self._cut |= {self._pair(*pair) for pair in lost.items()}
        names = {name if self._came_late(name) else other for name, other in lost.items()}
        blamed = [member for name in names if (member := self._members.named(name)) is not None]
        self._lost.update(member.session for member in blamed)
        return next((each for each in blamed if self._lost[each.session] >= MOST_LOST), None)

    def renew(self) -> None:
        """A member came back over another connection: what was said over the old one is lost."""
        self._is_over = True

    def _is_agreed(self) -> bool:
        return self._goal is not None and self._ran.keys() == self._goal.weights.keys()

    def _begin(self, goal: _Goal, here: list[MemberRecord]) -> list[Effect]:
        names = in_places(member.name for member in here)
        places = places_of(self.topology, names, self.can) or places_of(
            self.topology, names, self._can_try
        )
        if places is None:
            self.why_not = f"{self.topology}: members cannot connect to those they have to send to"
            return [Note("map", "hub", self.why_not)]
        self._number += 1
        self.count += 1
        self._is_over, self._ran, self._silent = False, {}, {}
        pairs = tuple((name, goal.weights[name]) for name in places)
        run = RunRound(goal.round, self._number, self.topology, goal.is_base, pairs)
        return [Send(member.sender, run) for member in here]

    def can(self, one: str, other: str) -> bool:
        """Whether a member has reached another one, and neither has lost the other since."""
        return self._pair(one, other) not in self._cut and self._can_try(one, other)

    def _can_try(self, one: str, other: str) -> bool:
        """Whether a member has reached another one, or one of them has not tried."""
        return self._reach().can(one, other) or self._came_late(one) or self._came_late(other)

    def _came_late(self, name: str) -> bool:
        """Whether a member came after the start: it has not tried whom it reaches."""
        member = self._members.named(name)
        return member is not None and (member.state == "waiting" or member.first_round > 0)

    def _pair(self, *names: str) -> frozenset[int]:
        """The sessions of members: one that comes again has another one."""
        found = map(self._members.named, names)
        return frozenset(0 if member is None else member.session for member in found)
