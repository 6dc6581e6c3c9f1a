"""When the hub closes rounds whose contributions are masked: whom a round waits for, who is asked
for shares, when a round is given up.

While fewer members than the threshold are in, nothing can be unmasked. Nobody is asked for keys
then, and at most one round is given up each `patience_s`: those that are in wait for the others to
come back. If all others have left for good, rounds that nobody in is going to contribute to are
given up at once. With enough members in, a round is given up at once if the secrets of its block
are lost: that is bounded by the block's end. Members that came back may have steps left after the
run's last round: no more rounds are given up for them than the run has.

Stands between the rounds, which know members and what has arrived, and the aggregator, which knows
masks. Pure: no socket, no clock; imports no cryptography.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from edgetrain.errors import BadMessage
from edgetrain.exchange.further_messages import MAX_BLOCK_ROUNDS, Advertise, Masking, Reveal, Shares
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.exchange.hub.effects import Effect, refusal
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.open_rounds import OpenRounds, Seen, expected
from edgetrain.exchange.messages import Message
from edgetrain.strategies.closing import ClosingRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing, Sum

ROUNDS_IN_BLOCK = 16
"""Fewest rounds whose masks are set up together."""


class MaskedRounds:
    """The masked rounds of one job. `members` and `open_rounds` are the hub's; only read here.

    `patience_s`: seconds that members have to make keys, or to help with unmasking.
    """

    def __init__(
        self,
        masks: Aggregator,
        members: Members,
        open_rounds: OpenRounds,
        closing: ClosingRule,
        patience_s: float,
    ) -> None:
        self.aggregator, self.terms = masks, masks.terms
        self._members = members
        self._open_rounds = open_rounds
        self._closing = closing
        self._patience_s = patience_s
        self.drawn_for: Callable[[int], list[MemberRecord]] | None = None
        """The members of a round that are there, where each round has its own and keys are made for
        it alone; None: all members are in all rounds."""
        self._short_since: float | None = None
        """When the members became fewer than the threshold; None: they are enough, or none."""
        self.is_over = False
        """Whether too few members were left for too long."""
        self.ended_short = ""
        """The same in words, if it was before the run's last round."""
        self._end = 0
        """The round after the run's last one, as far as it is known."""
        self._given_up = 0
        """Rounds given up since the hub was started."""
        self._doomed: set[int] = set()
        """Those of them that are not answered yet."""
        self._given_up_at = float("-inf")
        """When a round was given up last."""

    # -- looking ------------------------------------------------------------------------------

    def reach(self, round: int) -> int:
        """How many rounds after `round`, the oldest open one, a member's keys may begin."""
        return max(0, self.aggregator.next_first - round)

    def may_skip_to(self, member: MemberRecord, round: int, oldest: int) -> bool:
        """Whether a member may go on with `round` because it cannot contribute to those between:
        its keys came too late, or they were closed without it, and it knows. Rounds before `oldest`
        are closed."""
        most = self.reach(oldest) + MAX_BLOCK_ROUNDS
        if not 0 < round - max(member.next_round, oldest) <= most:
            return member.next_round < round <= oldest
        return self.aggregator.may_skip(member.name, max(member.next_round, oldest), round)

    def why_not(
        self, member: MemberRecord, round: int, size: int, expected: int
    ) -> tuple[str, str] | None:
        """The fault of a contribution's part of `size` bytes: (code, reason)."""
        if member.name not in (self.aggregator.contributors(round) or ()):
            return "masks", f"it has no part in the masks of round {round}"
        if size != expected:
            return "size", f"{size} bytes of masked elements, which take {expected}"
        return None

    def is_too_late(self, round: int, oldest: int) -> bool:
        """Whether a contribution is dropped: masked ones cannot count in another round."""
        return round < oldest or self.aggregator.is_closed(round)

    def find_missing(self, round: int) -> set[str]:
        """The names of the members that a round waits for, of those that can contribute to it."""
        able = self.aggregator.contributors(round) or frozenset()
        entry = self._open_rounds.get(round)
        return (expected(self._members, round) & able) - set(entry.members if entry else ())

    # -- what happens -------------------------------------------------------------------------

    def takes(self, message: Message) -> TypeGuard[Advertise | Shares | Reveal]:
        return isinstance(message, Advertise | Shares | Reveal)

    def accept_message(self, name: str, message: Masking) -> tuple[str, str] | None:
        """A member's message about masks; returns what is wrong with it: (code, reason)."""
        try:
            self.aggregator.accept_message(name, message)
        except BadMessage as error:
            return "masks", str(error)
        return None

    def advance(self, oldest: int, delay: AgreedDelay, now: float) -> tuple[Outgoing, list[str]]:
        """Do all that can be done: set up keys for later rounds, and close rounds, in whatever
        order they become whole. `oldest` is the oldest open round, `delay` the job's. Returns
        messages to members, and remarks for people."""
        masks, members = self.aggregator, self._members
        out: Outgoing = []
        self._end = delay.end_after(oldest)
        few = len(self._members) < self.terms.threshold or self._is_spent(oldest)
        if not (few and self._members):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        enough = members and self._short_since is None
        if self.drawn_for is not None:
            drawn = self.drawn_for(oldest)
            if masks.next_first <= oldest and len(drawn) >= self.terms.threshold:
                out += masks.begin_block({m.name: m.weight for m in drawn}, oldest, 1, now)
        elif enough and masks.wants_block(oldest) and not any(m.returning for m in members):
            out += self._begin_block(oldest, delay.in_flight, now)
        out += masks.advance_blocks(members.names, self._patience_s, now)
        for round in sorted({oldest, *(round for round, _ in self._open_rounds)}):
            if not masks.is_closed(round) and self._is_due(round, now):
                out += masks.close_round(round, now)
        remarks, masks.remarks = masks.remarks, []
        return out, remarks

    def end_if_short(
        self, oldest: int, now: float, patience_s: float, empty_after_s: float
    ) -> list[Effect]:
        """End the job, and refuse its members, if too few have been left for `patience_s`. Their
        places stay as they are: a hub that is restored from the journal waits for them. After the
        run's last round they have `empty_after_s`, because its reply may be long on its way."""
        is_through = oldest >= self._end
        most_s = empty_after_s if is_through else patience_s
        if self._short_since is None or now - self._short_since < most_s:
            return []
        self.is_over = True
        reason = f"{len(self._members)} of at least {self.terms.threshold} members are left"
        self.ended_short = "" if is_through else reason
        code = "ended" if is_through else "few"
        return [refusal(member.sender, code, reason) for member in self._members]

    def _begin_block(self, oldest: int, in_flight: int, now: float) -> Outgoing:
        """Ask all members for keys: for more rounds where more are in flight, so that the set-up is
        done before the first of them begins."""
        there = {m.name: m.weight for m in self._members if m.trains}
        rounds = min(max(ROUNDS_IN_BLOCK, 4 * in_flight), MAX_BLOCK_ROUNDS)
        return self.aggregator.begin_block(there, oldest, rounds, now)

    def _is_due(self, round: int, now: float) -> bool:
        """Whether to close a round: its sum may be unmasked, and nobody is missing or the closing
        rule says so; or it is to be given up, because nobody else can contribute to it."""
        if self.aggregator.contributors(round) is None or not self._members:
            return False
        missing = self.find_missing(round)
        entry = self._open_rounds.get(round)
        if entry is not None and len(entry.contributions) >= self.terms.threshold:
            return not missing or self._closing.due(Seen(entry, lambda: missing), now)
        if missing or not self._may_give_up(round, now):
            return False
        self._given_up_at = now
        self._given_up += 1
        self._doomed.add(round)
        return True

    def _is_spent(self, round: int) -> bool:
        return round >= self._end and self._given_up >= self._end

    def _may_give_up(self, round: int, now: float) -> bool:
        if self._is_spent(round):
            return False
        if self._short_since is None:
            return True
        if not self._members.away and all(m.next_round > round for m in self._members):
            return True
        return now - max(self._short_since, self._given_up_at) >= self._patience_s

    def passed(self) -> Sum:
        """The end of a round of which too few members are there to make keys."""
        from edgetrain.exchange.masks.aggregator import Sum

        return Sum(None, f"fewer than {self.terms.threshold} of the members drawn for it are there")

    def unmask(self, round: int, now: float) -> Sum | None:
        """The sum of a closed round, or that it is given up; None: not enough shares yet."""
        end = self.aggregator.unmask_round(round, self._patience_s, now)
        if end is not None and end.vector is None:
            self._given_up += round not in self._doomed
            self._doomed.discard(round)
        return end
