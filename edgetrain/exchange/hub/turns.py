"""Rounds that members average among themselves: vote, run, commit.

A contribution to such a round is a vote, without a vector: its member has one. Once a round is due,
its members are told to run; once all have said that they have the mean, with equal checksums, it
counts, and is closed like any other. A turn is one attempt:

=======  ============================================  =======  ===================================
state    what happens                                  next     what the hub says
=======  ============================================  =======  ===================================
idle     a round is due                                running  RunRound, to all that train
running  somebody has gone, or has come back           running  one with a higher number, to all
running  a member says that its connection to another  running  the same, around the two if that can
         one broke                                              be; the second time in a round the
                                                                lost one is expelled
running  all have answered, some that another one was  running  the same, around those that came
         silent                                                 least far and whom they waited for
running  all have the mean, checksums are equal        agreed   the round's replies
running  all have the mean, checksums differ           running  the same; at the third the job ends
agreed   another round is due                          running  RunRound
=======  ============================================  =======  ===================================

A member keeps its contribution until the round's reply is there, and runs again from it; what a
member that has gone gave to a round that does not count yet is dropped. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.exchange.hub.effects import Effect, Note, Send
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.places import Reach
from edgetrain.exchange.messages import Ran, RunRound
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
class _Wanted:
    """What a turn is for."""

    round: int
    is_base: bool
    weights: Mapping[str, float]


class Turns:
    """The turns of a job's rounds. `members` is the hub's; only read here."""

    def __init__(self, topology: str, members: Members, reach: Callable[[], Reach]) -> None:
        self.topology = topology
        self.why_not = ""
        """Why no round can be run any more; "": it can."""
        self._members, self._reach = members, reach
        self._wanted: _Wanted | None = None
        self._number = 0
        self._is_over = True
        """Whether the turn came to nothing, or there was none."""
        self._ran: dict[str, int] = {}
        """Checksums of the means that members have."""
        self._silent: dict[str, tuple[int, str]] = {}
        """How far members came that wait in vain, and for whom. One silence makes all wait: only
        who came least far has lost somebody."""
        self._different = 0
        self._lost: Counter[str] = Counter()
        """Turns of this round in which others have lost each member."""
        self._cut: set[frozenset[str]] = set()
        """Pairs of which one has lost the other."""
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
        wanted = _Wanted(round, is_base, dict(weights))
        if self._wanted != wanted:
            if self._wanted is None or (self._wanted.round, self._wanted.is_base) != (
                round,
                is_base,
            ):
                self._different, self._lost = 0, Counter()
            self._wanted, self._is_over = wanted, True
        if not self._is_over:
            return [], self._is_agreed()
        return self._begin(wanted), False

    def accept(self, member: MemberRecord, message: Ran) -> str:
        """What has become of a member's turn. Answers to earlier ones count for nothing. Returns
        the name of a member that others have lost too often, or ""."""
        wanted = self._wanted
        if wanted is None or message.attempt != self._number or self._is_over:
            return ""
        if message.lost and not message.silent:
            return self._part({member.name: message.lost})
        if message.lost:
            self._silent[member.name] = (message.silent, message.lost)
        else:
            self._ran[member.name] = message.checksum
        if self._silent:
            if len(self._silent) + len(self._ran) < len(wanted.weights):
                return ""
            least = min(self._silent.values())[0]
            return self._part({n: lost for n, (at, lost) in self._silent.items() if at == least})
        if len(self._ran) == len(wanted.weights) and len({*self._ran.values()}) > 1:
            self._is_over = True
            self._different += 1
            if self._different >= MOST_DIFFERENT:
                self.why_not = (
                    f"members end with different means of round {wanted.round}: "
                    + ", ".join(f"{name} {sum_:016x}" for name, sum_ in sorted(self._ran.items()))
                )
        return ""

    def _part(self, lost: Mapping[str, str]) -> str:
        """The turn is over, because members have lost these. Returns whom others have lost too
        often, or ""."""
        self._is_over = True
        self._lost.update({*lost.values()})
        self._cut |= {frozenset(pair) for pair in lost.items()}
        return next((name for name in lost.values() if self._lost[name] >= MOST_LOST), "")

    def renew(self) -> None:
        """A member came back over another connection: what was said over the old one is lost."""
        self._is_over = True

    def _is_agreed(self) -> bool:
        assert self._wanted is not None
        return self._ran.keys() == self._wanted.weights.keys()

    def _begin(self, wanted: _Wanted) -> list[Effect]:
        """Another turn, unless somebody may not hear of it: then once that is settled."""
        here = [member for member in self._members if member.name in wanted.weights]
        if any(m.returning or m.unreachable_since is not None for m in here):
            return []
        names = in_places(member.name for member in here)
        can = self._reach().can
        places = places_of(self.topology, names, self._can) or places_of(self.topology, names, can)
        if places is None:
            self.why_not = f"{self.topology}: members cannot connect to those they have to send to"
            return [Note("map", "hub", self.why_not)]
        self._number += 1
        self.count += 1
        self._is_over, self._ran, self._silent = False, {}, {}
        pairs = tuple((name, wanted.weights[name]) for name in places)
        run = RunRound(wanted.round, self._number, self.topology, wanted.is_base, pairs)
        return [Send(member.sender, run) for member in here]

    def _can(self, one: str, other: str) -> bool:
        """Whether a member has reached another one, and neither has lost the other since."""
        return frozenset({one, other}) not in self._cut and self._reach().can(one, other)
