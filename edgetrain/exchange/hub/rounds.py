"""The rounds of a job at its hub: contributions come in, and the reply to them goes out.

Says what is wrong with a contribution, and what is sent and written when a round closes; carries
out what `secure.rounds` says of masked ones. Who is in, and what becomes of a member that is at
fault, is the hub's: nobody joins, is expelled or is given up here.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from edgetrain.errors import Diverged
from edgetrain.exchange.hub.checksums import BaseChecksums
from edgetrain.exchange.hub.contributions import Contribution
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.exchange.hub.effects import Closed, Effect, Note, Send, Write
from edgetrain.exchange.hub.masked_rounds import MaskedRounds, Situation
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.merger import Merger, RoundResult
from edgetrain.exchange.hub.open_rounds import OpenRound, OpenRounds
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.messages import Contribute, Reply

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Outgoing, Sum

REMEMBERED = 4096
"""Checksums of base that are kept to compare members against."""

BEHIND_BYTES = 1 << 28
"""Replies that may wait for a member that does not take them."""


@dataclass(frozen=True)
class Due:
    """The oldest open round, which can be closed."""

    entry: OpenRound
    missing: tuple[str, ...]
    end: Sum | None = None
    """What became of its contributions, where they are masked."""


class Rounds:
    """The rounds of one job, in order. Shares `members` with the hub."""

    def __init__(
        self,
        members: Members,
        checksums: BaseChecksums,
        merger: Merger,
        delay: AgreedDelay,
        open_rounds: OpenRounds,
        masks: MaskedRounds | None,
    ) -> None:
        self.round = 0
        """The oldest open one, which is also the number of rounds merged."""
        self._members, self._checksums = members, checksums
        self._merger, self._delay = merger, delay
        self._open_rounds, self._masks = open_rounds, masks
        self._reply_bytes = 0
        """Of the newest reply."""

    @property
    def slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind."""
        most = self._delay.slack
        return most if self._masks is None else most + self._masks.reach(self.round)

    # -- a contribution comes -----------------------------------------------------------------

    def has(self, member: MemberRecord, message: Contribute) -> bool:
        """Whether this is here already, from before the member came back: it counts once."""
        return member.resumed and message.round < member.next_round

    def gap(self, member: MemberRecord, message: Contribute) -> str | None:
        """What shows that something this member sent before has not come. It may leave out rounds
        that it was told to leave out."""
        if member.next_round < message.round == member.first_round:  # it was told to skip to it
            member.next_round = message.round
        if self._masks is not None and self._masks.skips(member, message.round, self.round):
            member.next_round = message.round
        if message.round != member.next_round:
            return f"round {message.round} came when {member.next_round} was due"
        if message.part != len(member.incoming):
            return f"part {message.part} of a contribution came when {len(member.incoming)} was due"
        return None

    def why_not(self, member: MemberRecord, message: Contribute) -> tuple[str, str] | None:
        """What is wrong with a part of a contribution that is next in line: (code, reason)."""
        most = max(self.slack, member.first_round - self.round)  # it begins where it was told to
        if message.round - self.round > most:
            return "order", f"round {message.round} is more than {most} ahead of {self.round}"
        if message.applied > self.round:
            return "order", f"{message.applied} replies applied, {self.round} were sent"
        parts = self._merger.parts
        if message.parts != parts:
            return "order", f"{message.parts} parts came where a contribution has {parts}"
        elements, most = self._merger.expected(message.part)
        size = memoryview(message.payload).nbytes
        if self._masks is not None and message.round >= self.round:
            problem = self._masks.why_not(member, message.round, size, most)
            if problem is not None:
                return problem
        if size > most:
            name = self._merger.codec.name
            return "size", f"{size} bytes for {elements} elements, {name} needs {most}"
        return None

    def hear(self, member: MemberRecord, message: Contribute) -> tuple[str, ...]:
        """Compare the base that a member has with the others': the names of those who have another
        one, as is known now."""
        if message.applied <= self.round - REMEMBERED:
            return ()  # too long ago to compare, and to be remembered again
        return self._checksums.hear(
            member.name, message.applied, message.checksum, len(self._members)
        )

    def take_back(self, name: str) -> None:
        """What a member gave to open rounds does not count; of masked ones nothing can be taken
        out."""
        if self._masks is None:
            self._open_rounds.take_back(name)

    def take_part(self, member: MemberRecord, message: Contribute) -> None:
        """A part that is as it should be, and not the last one."""
        member.applied = message.applied
        member.incoming.append(message.payload)
        if message.round == self.round and self._masks is None:
            self._merge_early(message.part)

    def take_last(
        self, member: MemberRecord, message: Contribute, now: float
    ) -> tuple[list[Effect], bool]:
        """The last part: the contribution is whole. What is to be told of it, and whether a round
        may be whole now, too."""
        member.applied = message.applied
        payloads, member.incoming = (*member.incoming, message.payload), []
        member.next_round += 1
        meant_for = message.round
        if self._is_dropped(meant_for):
            member.merged = member.next_round
            remark = f"round {meant_for} had closed; its part is dropped"
            return [Note("late", member.name, remark)], False
        effects: list[Effect] = []
        if meant_for < self.round:
            effects.append(
                Note("late", member.name, f"round {meant_for} had closed; counts in {self.round}")
            )
        if self._masks is not None:
            self._masks.add(member.name, meant_for, payloads)
            payloads = ()
        contribution = Contribution(member.name, member.weight, message.wanted_delay, payloads)
        open_round = max(meant_for, self.round)
        return effects, self._open_rounds.give(open_round, member, meant_for, contribution, now)

    def _is_dropped(self, round: int) -> bool:
        """Whether a contribution to this round has come too late for any."""
        if self._masks is not None:
            return self._masks.is_too_late(round, self.round)
        return round < self.round and not self._merger.keeps_late

    def _merge_early(self, part: int) -> None:
        """Merge a part of the oldest open round once it is here from everyone, while the others are
        still on their way. A part that is never seen whole here is merged at the close.
        """
        if not self._merger.hears(part, len(self._members)):
            return
        entry = self._open_rounds.get(self.round)
        chosen = []
        for member in sorted(self._members, key=attrgetter("name")):
            whole = entry and entry.contributions.get((member.name, self.round))
            payloads = whole.payloads if whole else tuple(member.incoming)
            if len(payloads) <= part or (whole is None and member.next_round != self.round):
                return
            chosen.append(Contribution(member.name, member.weight, 0, payloads))
        self._merger.merge_early(part, chosen)

    # -- a round closes -----------------------------------------------------------------------

    def next(self, now: float) -> tuple[list[Effect], Due | None]:
        """The oldest open round, if it is whole, or overdue with a quorum; before that, what masks
        need said."""
        if self._masks is not None:
            return self._next_masked(self._masks, now)
        due = self._open_rounds.due(self.round, now)
        return [], None if due is None else Due(*due)

    def _next_masked(self, masked: MaskedRounds, now: float) -> tuple[list[Effect], Due | None]:
        """Rounds are answered in their order, as their sums become known."""
        given = {round: (entry.opened, set(entry.members)) for round, entry in self._open_rounds}
        in_flight, expected = self._delay.in_flight, self._open_rounds.expected
        situation = Situation(self.round, in_flight, self._members, given, expected)
        outgoing, remarks = masked.advance(situation, now)
        effects = self._to_members(outgoing)
        effects += [Note("late", "hub", remark) for remark in remarks]
        end = masked.end_of(self.round, now)
        if end is None:
            return effects, None
        if end.reason:
            effects.append(Note("late", "hub", f"round {self.round} is given up: {end.reason}"))
        missing = tuple(sorted(masked.lacking(situation, self.round)))
        return effects, Due(self._open_rounds.get(self.round) or OpenRound(now), missing, end)

    def _to_members(self, outgoing: Outgoing) -> list[Effect]:
        """Messages to members by name; those that are not there are sent it when they are back."""
        found = [(self._members.named(name), said) for name, said in outgoing]
        return [Send(member.sender, said) for member, said in found if member is not None]

    def again(self, name: str) -> list[Effect]:
        """What a member that is back may have missed, replies apart."""
        return [] if self._masks is None else self._to_members(self._masks.again(name))

    def close(self, due: Due, now: float) -> list[Effect]:
        """Merge a round and answer it. Raises Spoilt, and leaves it open, if a contribution has to
        be left out."""
        merged = self._merger.close(due.entry.in_order, due.end)
        round, before, entry = self.round, self._checksums.get(self.round), due.entry
        self._open_rounds.done(round)
        effects = self._miss(due.missing)
        self._delay.measure(round, (c.wanted_delay for c in merged.counted))
        self._settle(round, merged.checksum)
        if self._masks is not None:
            self._masks.done(round)
        entry.settle()
        # A masked round that is given up has contributions of which none is counted.
        counted, names = (entry.counted(), entry.members) if merged.counted else ((), ())
        reply, inputs, delay = tuple(merged.payloads), merged.inputs, self._delay.delay
        effects.append(Write(Round(round, counted, delay, before, merged.checksum, reply, inputs)))
        effects += self._answer(round, merged)
        weight = sum(c.weight for c in merged.counted)
        open_s = now - entry.opened
        effects.append(Closed(round, names, due.missing, weight, open_s, delay, merged.cuts))
        return effects

    def _miss(self, missing: tuple[str, ...]) -> list[Effect]:
        """The oldest open round closes without these."""
        effects: list[Effect] = []
        for member in self._members:
            if member.name in missing and member.state == "training":
                member.state = "late"
                effects.append(
                    Note(
                        "late", member.name, f"round {self.round} closed at its deadline without it"
                    )
                )
        return effects

    def _answer(self, round: int, merged: RoundResult) -> list[Effect]:
        """The reply to a round, to all who train: equal messages after each other, for each is
        packed once."""
        told = [member for member in self._members if member.state in ("training", "late")]
        settled = all(max(member.merged, member.first_round) > round for member in told)
        members, parts, delay = len(merged.counted), len(merged.payloads), self._delay.delay
        replies = [
            Reply(round, part, parts, members, delay, merged.checksum, settled, payload)
            for part, payload in enumerate(merged.payloads)
        ]
        self._reply_bytes = sum(memoryview(payload).nbytes for payload in merged.payloads)
        return [Send(member.sender, reply) for reply in replies for member in told]

    def leave_out(self, contribution: Contribution) -> MemberRecord:
        """Drop a contribution to the oldest open round, which stays open and may lack a quorum now;
        who gave it."""
        return self._open_rounds.leave_out(self.round, contribution)

    def behind(self) -> tuple[int, list[MemberRecord]]:
        """Members that take no replies, so that nothing more is to be kept for them; and how many
        may wait for one."""
        most = max(self.slack, BEHIND_BYTES // max(self._reply_bytes, 1))
        training = (member for member in self._members if member.state in ("training", "late"))
        return most, [member for member in training if self.round - member.applied > most]

    def _settle(self, round: int, checksum: int) -> None:
        self.round = round + 1
        if checksum:
            self._checksums.know(self.round, checksum)
        self._checksums.forget(self.round - REMEMBERED)

    # -- the same again -----------------------------------------------------------------------

    def replay(self, record: Round) -> None:
        """A round that a journal tells of, which is the next one. Raises Diverged where it
        contradicts itself."""
        checksum = self._merger.replay(record)
        if checksum != record.checksum:
            raise Diverged(
                f"after round {record.round} of the journal the base has checksum {checksum:016x}, "
                f"its record says {record.checksum:016x}"
            )
        if record.before:
            self._checksums.know(record.round, record.before)
        self._settle(record.round, checksum)
        self._delay.delay = record.delay
