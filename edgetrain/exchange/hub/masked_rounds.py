"""When a hub closes rounds whose contributions are masked: who is waited for, who is asked, when a
round is given up.

Between the hub, which knows who is in and what came, and the aggregator, which knows masks. Pure:
no socket, no clock, and no cryptography is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.messages import MAX_BLOCK_ROUNDS, Masking
from edgetrain.vectors.vector import Buffer

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing, Sum

ROUNDS_IN_BLOCK = 16
"""Rounds, at least, whose masks are set up in one go."""


@dataclass(frozen=True)
class Situation:
    """What the hub knows at one moment."""

    round: int
    """The oldest open one."""
    in_flight: int
    """Rounds that a member may be ahead of its replies."""
    members: Members
    given: Mapping[int, tuple[float, Collection[str]]]
    """Of open rounds that someone gave to: when they were opened, and who has given."""
    expected: Callable[[int], set[str]]
    """Members that a round waits for, masks apart."""


class MaskedRounds:
    """The rounds of one job under masks, as the hub asks about them."""

    def __init__(self, masks: Aggregator, quorum: int, patience_s: float) -> None:
        self._masks = masks
        self._quorum = max(quorum, masks.terms.threshold)
        self._patience_s = patience_s

    @property
    def terms(self) -> MaskTerms:
        """What members are told in their welcome."""
        return self._masks.terms

    @property
    def next_first(self) -> int:
        """The first round that a newcomer can take part in."""
        return self._masks.next_first

    def settle(self, elements: int, epoch: int) -> None:
        """Training begins, or a restored hub goes on, which knows no masks."""
        self._masks.settle(elements, epoch)

    def take(self, name: str, message: Masking) -> None:
        """What a member said about masks; BadMessage."""
        self._masks.take(name, message)

    def again(self, name: str) -> Outgoing:
        """What a member that is back may have missed."""
        return self._masks.again(name)

    def forget(self, name: str) -> None:
        """A member of this name has started anew."""
        self._masks.forget(name)

    def add(self, name: str, round: int, payloads: Sequence[Buffer]) -> None:
        """A whole contribution, which `why_not` had nothing against."""
        self._masks.add(name, round, payloads)

    def done(self, round: int) -> None:
        """A round has been answered."""
        self._masks.done(round)

    def reach(self, round: int) -> int:
        """How many rounds ahead of the oldest open one a member's keys may begin."""
        return max(0, self._masks.next_first - round)

    def skips(self, member: MemberRecord, round: int, oldest: int) -> bool:
        """Whether a member goes on with `round` because it can give to none of those between: its
        keys came too late, or they were closed without it, and it knows. Rounds before `oldest`
        are closed."""
        most = self.reach(oldest) + MAX_BLOCK_ROUNDS
        if not 0 < round - max(member.next_round, oldest) <= most:
            return member.next_round < round <= oldest
        return self._masks.may_skip(member.name, max(member.next_round, oldest), round)

    def why_not(
        self, member: MemberRecord, round: int, size: int, expected: int
    ) -> tuple[str, str] | None:
        """What is wrong with a part of a contribution, if anything."""
        if member.name not in (self._masks.contributors(round) or ()):
            return "masks", f"it has no part in the masks of round {round}"
        if size != expected:
            return "size", f"{size} bytes of masked elements, which take {expected}"
        return None

    def is_too_late(self, round: int, oldest: int) -> bool:
        """Whether a contribution is dropped: there is no other round that it could join."""
        return round < oldest or self._masks.is_closed(round)

    def advance(self, now_is: Situation, now: float) -> tuple[Outgoing, list[str]]:
        """All that can go on: keys for later rounds, rounds to be unmasked, in whatever order they
        become whole. Messages to members, and remarks for people."""
        masks, members = self._masks, now_is.members
        out: Outgoing = []
        if masks.wants_block(now_is.round) and members and not any(p.returning for p in members):
            out += self._begin(now_is, now)
        out += masks.step(members.names, self._patience_s, now)
        for round in sorted({*now_is.given, now_is.round}):
            if not masks.is_closed(round) and self._is_whole(now_is, round, now):
                out += masks.close(round, now)
        remarks, masks.remarks = masks.remarks, []
        return out, remarks

    def _begin(self, now_is: Situation, now: float) -> Outgoing:
        """Have keys made by all who are there: for more rounds where more are in flight, so that
        the set-up is done before the first of them begins."""
        there = {p.name: p.weight for p in now_is.members if p.state in ("training", "late")}
        rounds = min(max(ROUNDS_IN_BLOCK, 4 * now_is.in_flight), MAX_BLOCK_ROUNDS)
        return self._masks.begin(there, now_is.round, rounds, now)

    def end_of(self, round: int, now: float) -> Sum | None:
        """What became of a round, if it can be answered."""
        return self._masks.end_of(round, self._patience_s, now)

    def lacking(self, now_is: Situation, round: int) -> set[str]:
        """Members that a round waits for, of those who can give to it."""
        able = self._masks.contributors(round) or frozenset()
        _, given = now_is.given.get(round, (0.0, ()))
        return (now_is.expected(round) & able) - set(given)

    def _is_whole(self, now_is: Situation, round: int, now: float) -> bool:
        """Whether nothing more is waited for; an empty round is, if nobody will ever give to it."""
        if self._masks.contributors(round) is None or not now_is.members:
            return False
        if not self.lacking(now_is, round):
            return True
        opened, given = now_is.given.get(round, (now, ()))
        return now - opened >= self._patience_s and len(given) >= self._quorum
