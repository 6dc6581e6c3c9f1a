"""The rounds of a job at its hub: contributions come in, replies go out.

`Rounds.accept` takes one part of a contribution and says what became of it:

==========  =====================================================================================
partial     it is kept; more parts of the same contribution are to come
complete    it is kept, and with it the contribution is whole; a round may be due now
duplicate   it was here before the member came back: nothing changes, it counts once
gap         something that was sent before it is missing: nothing changes, the member is astray
fault       it breaks a rule: nothing changes, the member is to be expelled
==========  =====================================================================================

Rounds close in order. `find_due` gives the oldest open one if it can be closed, `close` merges it,
writes it to the journal and answers it; with a spoilt contribution it raises Spoilt and leaves the
round open. Who joins, is expelled or is given up is decided in `membership` and `protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Literal, NamedTuple

from edgetrain.codecs import Codec
from edgetrain.errors import Diverged
from edgetrain.exchange.hub.checksums import BaseChecksums
from edgetrain.exchange.hub.contributions import BatchMean, Contribution
from edgetrain.exchange.hub.delay import AgreedDelay, Wish
from edgetrain.exchange.hub.effects import Closed, Effect, Note, Send, Write, replies_of
from edgetrain.exchange.hub.members import AWAY, MemberRecord, Members
from edgetrain.exchange.hub.merger import Merger, RoundResult
from edgetrain.exchange.hub.open_rounds import OpenRound, OpenRounds, counted
from edgetrain.exchange.hub.records import Round, Sent, State
from edgetrain.exchange.messages import NO_WEIGHT, Contribute
from edgetrain.strategies.closing import ClosingRule
from edgetrain.vectors.vector import Buffer, Vector

if TYPE_CHECKING:
    from edgetrain.exchange.hub.density import AgreedDensity
    from edgetrain.exchange.hub.masked_rounds import MaskedRounds
    from edgetrain.exchange.masks.aggregator import Aggregator, Outgoing, Sum

REMEMBERED = 4096
"""Checksums of base that are kept to compare members with."""

BEHIND_BYTES = 1 << 28
"""Replies that may wait for a member that does not take them, in bytes."""


@dataclass(frozen=True)
class Expulsion:
    """A member to be expelled, with the code and reason of the refusal."""

    member: MemberRecord
    code: str
    reason: str


class Accepted(NamedTuple):
    """The result of accepting one part of a contribution: see the module's table."""

    outcome: Literal["partial", "complete", "duplicate", "gap", "fault"]
    faults: tuple[Expulsion, ...] = ()
    """Members to be expelled: the sender if it is at fault, and members whose base is found to be
    wrong by what the sender said of its own. What the latter gave to open rounds is dropped."""
    reason: str = ""
    """Reason of a gap."""
    remarks: Sequence[Effect] = ()
    may_be_due: bool = False
    """Whether a round may be due now: worth a look."""


@dataclass(frozen=True)
class Due:
    """The oldest open round, which can be closed."""

    entry: OpenRound
    missing: tuple[str, ...]
    end: Sum | BatchMean | None = None
    """The sum of its contributions, where they are masked; or what its slices came to."""


FoundDue = tuple[list[Effect], Due | None]
"""What is to be said before a round closes, and the one that may close now; None: none."""


class Rounds:
    """The rounds of one job, in order. Owns everything about them; `members` is the hub's.

    `closing` decides when the oldest open round closes. With `masks` contributions cannot be read;
    `patience_s`: seconds that members have for each step of masking.
    """

    def __init__(
        self,
        members: Members,
        merger: Merger,
        delay: AgreedDelay,
        closing: ClosingRule,
        masks: Aggregator | None,
        patience_s: float,
    ) -> None:
        self.started = False
        """Whether training has begun."""
        self.round = 0
        """The oldest open round, which is also the number of rounds merged."""
        self.checksums = BaseChecksums()
        self.delay = delay
        self.merger = merger
        self.open_rounds = OpenRounds(members, closing)
        self.masks: MaskedRounds | None = None
        if masks is not None:
            from edgetrain.exchange.hub.masked_rounds import MaskedRounds

            self.masks = MaskedRounds(masks, members, self.open_rounds, closing, patience_s)
        self.arrivals: ArrivalRounds | None = None
        if hasattr(closing, "weight"):
            from edgetrain.exchange.hub.arrival_rounds import ArrivalRounds

            self.arrivals = ArrivalRounds(closing, members)
        """Where members are out of step, what closes rounds; None: they are in step."""
        self.density = _density_of(merger.reply_codec)
        """With `codec = "auto"`: how dense replies are, and with them contributions."""
        self._members = members
        self._reply_bytes = 0
        """Bytes of the newest reply."""

    @property
    def base(self) -> Vector | None:
        """The parameters that all replies so far lead to, [elements]; None if the hub has none."""
        return self.merger.base

    @property
    def ended_short(self) -> str:
        """Why the job ended before its last round; "": it did not."""
        return "" if self.masks is None else self.masks.ended_short

    @property
    def collecting(self) -> int:
        """The oldest round that contributions may still join."""
        return self.round

    @property
    def oldest_number(self) -> int:
        """The lowest number of a contribution that a round may still wait for."""
        return self.collecting if self.arrivals is None else self.arrivals.complete

    @property
    def slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind."""
        most = self.delay.slack
        return most if self.masks is None else most + self.masks.reach(self.round)

    # -- beginning ----------------------------------------------------------------------------

    def set_base(self, base: Vector) -> None:
        """All members start from this base, which belongs to the hub from now on."""
        self.checksums.add_known(0, self.merger.start(base))

    def start(self, epoch: int) -> None:
        """Training begins, or goes on after the hub was restored for the `epoch`-th time."""
        self.started = True
        if self.masks is not None:
            self.masks.aggregator.start_masks(epoch)

    def restore(self, state: State) -> None:
        self.merger.restore(state)
        self.round = state.round
        self.delay.restore(state.delay, state.local_steps)
        self.delay.merged_steps = state.steps or state.round * self.delay.local_steps
        for applied, checksum in state.checksums:
            self.checksums.add_known(applied, checksum)

    def replay(self, record: Round) -> None:
        """Merge the next round as a journal has it. Diverged if that contradicts itself."""
        checksum = self.merger.replay_round(record)
        if checksum != record.checksum:
            raise Diverged(
                f"after round {record.round} of the journal the base has checksum {checksum:016x}, "
                f"its record says {record.checksum:016x}"
            )
        if record.before:
            self.checksums.add_known(record.round, record.before)
        self._advance(record.round, checksum)
        self.delay.replay(record.round, record.delay, record.local_steps)
        if self.arrivals is not None:
            self.arrivals.complete = record.complete or 0

    def replay_sent(self, record: Sent) -> None:
        """A journal says that this went to the hub above, or that its products went to the lead."""
        if not self.merger.offer(record.vector):
            raise Diverged(f"the journal is a gateway's: round {record.round} went to a hub above")

    def steps_before(self, round: int) -> int:
        """Steps of the run before this round: those of open rounds, too."""
        if self.arrivals is not None:
            return round * self.delay.local_steps
        entries = (self.open_rounds.get(each) for each in range(self.round, round))
        applied = (self.round if entry is None else entry.applied for entry in entries)
        return self.delay.merged_steps + sum(map(self.delay.length_after, applied))

    def _advance(self, round: int, checksum: int) -> None:
        """This round is merged, and leads to a base with this checksum (0: not known)."""
        self.round = round + 1
        if checksum:
            self.checksums.add_known(self.round, checksum)
        self.checksums.forget_base(self.round - REMEMBERED)

    # -- a contribution comes -----------------------------------------------------------------

    def accept(self, member: MemberRecord, message: Contribute, now: float) -> Accepted:
        """Take one part of a member's contribution; see the module's table for the outcomes."""
        if not self.started:
            early = Expulsion(member, "order", f"round {message.round} came before the start")
            return Accepted("fault", (early,))
        if member.resumed and message.round < member.next_round:
            return Accepted("duplicate")
        due = member.next_round
        if message.round != due and _may_skip_to(self, member, message.round):
            due = message.round
        if message.round != due:
            return Accepted("gap", reason=f"round {message.round} came when {due} was due")
        if message.part != len(member.incoming):
            parts = f"part {message.part} of a contribution came when {len(member.incoming)}"
            return Accepted("gap", reason=f"{parts} was due")
        problem = self._why_not(member, message)
        if problem is not None:
            return Accepted("fault", (Expulsion(member, *problem),))
        outvoted = self._compare_bases(member, message)
        if outvoted and any(fault.member is member for fault in outvoted):
            return Accepted("fault", outvoted)
        if due != member.next_round:
            member.skip_to(due)
        if message.part + 1 < message.parts:
            member.add_part(message.payload, message.applied)
            is_synchronous = self.masks is None and self.arrivals is None
            if is_synchronous and not member.behind and message.round == self.collecting:
                _merge_early(self, self._members, message.part)
            return Accepted("partial", outvoted)
        remarks, may_be_due = self._add_contribution(member, message, now)
        return Accepted("complete", outvoted, remarks=remarks, may_be_due=may_be_due)

    def _why_not(self, member: MemberRecord, message: Contribute) -> tuple[str, str] | None:
        if message.round > self.round and self.arrivals is None:
            # A member may begin where it was told to, however far ahead that is.
            most = max(self.slack, member.first_round - self.round)
            if message.round - self.round > most:
                return "order", f"round {message.round} is more than {most} ahead of {self.round}"
        if message.applied > self.round:
            return "order", f"{message.applied} replies applied, {self.round} were sent"
        sizes = self.merger.sizes(message.round, member.behind > 0)
        if message.parts != len(sizes):
            return "order", f"{message.parts} parts came where a contribution has {len(sizes)}"
        if problem := _why_no_site(member, message, self.merger.strategy.weighted):
            return problem
        most = sizes[message.part]
        size = memoryview(message.payload).nbytes
        if self.masks is not None and message.round >= self.round:
            problem = self.masks.why_not(member, message.round, size, most)
            if problem is not None:
                return problem
        if size > most:
            name = self.merger.codec.name
            return "size", f"{size} bytes for a part of a contribution, {name} needs {most}"
        return None

    def _compare_bases(self, member: MemberRecord, message: Contribute) -> tuple[Expulsion, ...]:
        """Compare the member's base with the others'. Returns the members that are now known to
        have another one, and drops what they gave to open rounds, which was made from that."""
        applied = message.applied
        if applied <= self.round - REMEMBERED or not message.checksum:
            return ()  # too long ago to compare, and to be remembered again
        names = self.checksums.add_report(
            member.name, applied, message.checksum, len(self._members)
        )
        if not names:
            return ()
        found = [other for name in names if (other := self._members.named(name)) is not None]
        faults, agrees = [], next((m for m in self._members if m.name not in names), None)
        for other in found:
            if self.masks is None:  # nothing can be taken out of a masked sum
                self.open_rounds.withdraw(other.name)
            theirs = f"{message.checksum:016x}" if other is member else "another"
            reason = (
                f"after {applied} replies the base has checksum {self.checksums[applied]:016x}, "
                f"the member's {theirs}{_unlike(other, agrees)}"
            )
            faults.append(Expulsion(other, "diverged", reason))
        return tuple(faults)

    def _add_contribution(
        self, member: MemberRecord, message: Contribute, now: float
    ) -> tuple[list[Effect], bool]:
        """Keep a whole contribution. Returns remarks, and whether a round may be due."""
        payloads = member.complete_contribution(message.payload, message.applied)
        if self.arrivals is not None:
            given = _contribution(member, message, payloads, now, self.masks is not None, 1)
            self.open_rounds.add(self.round, member, message.round, given, now)
            return [], True
        meant_for, open = message.round, self.collecting
        round = self.merger.ranges.next_alike(meant_for, open)
        if self._is_dropped(meant_for):
            member.mark_merged(meant_for, 0)
            remark = f"round {meant_for} had closed; its part is dropped"
            return [Note("late", member.name, remark)], False
        remarks: list[Effect] = []
        if meant_for < open:
            remark = f"round {meant_for} had closed; counts in {round}"
            remarks.append(Note("late", member.name, remark))
        if self.masks is not None:
            self.masks.aggregator.add_contribution(member.name, meant_for, payloads)
            payloads = ()
        count = member.count_in(meant_for, message.members)
        if count < message.members:
            remark = (
                f"{message.members} contributions in one of its site, which has {count} to give"
            )
            remarks.append(Note("refused", member.name, f"round {meant_for}: {remark}"))
        contribution = _contribution(member, message, payloads, now, self.masks is not None, count)
        # A late one may wait for the next round of its range, which begins with those meant for it.
        opens = round in (meant_for, open)
        added = self.open_rounds.add(round, member, meant_for, contribution, now, opens=opens)
        return remarks, added

    def _is_dropped(self, round: int) -> bool:
        if self.masks is not None:
            return self.masks.is_too_late(round, self.round)
        return round < self.collecting and not self.merger.keeps_late

    # -- a round closes -----------------------------------------------------------------------

    def find_due(self, now: float) -> FoundDue:
        """The oldest open round, if it can be closed. Where contributions are masked, keys are made
        and sums unmasked on the way; that is what the effects are for."""
        if self.masks is not None:
            # Rounds are answered in order, as their sums become known
            masks = self.masks
            outgoing, remarks = masks.advance(self.round, self.delay, now)
            effects = self._to_members(outgoing)
            effects += [Note("late", "hub", remark) for remark in remarks]
            end = masks.unmask(self.round, now)
            if end is None:
                return effects, None
            if end.reason:
                effects.append(Note("late", "hub", f"round {self.round} is given up: {end.reason}"))
            missing = tuple(sorted(masks.find_missing(self.round)))
            return effects, Due(self.open_rounds.get(self.round) or OpenRound(now), missing, end)
        if self.arrivals is not None:
            entry = self.arrivals.find_due(self.open_rounds.get(self.round), now)
            return [], None if entry is None else Due(entry, ())
        due = self.open_rounds.check(self.collecting, now)
        return [], None if due is None else Due(*due)

    def _to_members(self, outgoing: Outgoing) -> list[Effect]:
        """Messages to members by name; a member that is away gets its own when it is back."""
        found = [(self._members.named(name), message) for name, message in outgoing]
        return [Send(member.sender, message) for member, message in found if member is not None]

    def end_if_short(self, now: float, *patience_s: float) -> list[Effect]:
        return [] if self.masks is None else self.masks.end_if_short(self.round, now, *patience_s)

    def messages_missed(self, name: str) -> list[Effect]:
        """Messages, apart from replies, that a returning member may have missed."""
        missed = [] if self.masks is None else self.masks.aggregator.messages_missed(name)
        return self._to_members(missed)

    def close(self, due: Due, now: float) -> list[Effect]:
        """Merge and answer a round. Raises Spoilt, and leaves it open, for a bad contribution."""
        rung = None if self.density is None else self.density.next_rung
        round, entry = self.round, due.entry
        ages = () if self.arrivals is None else self.arrivals.weigh(entry, round)
        by_key = entry.by_key
        given = [*by_key.values()]
        whole = _weight_of_all(self._members, given) if self.merger.strategy.has_variates else 0.0
        result = self.merger.close_round(round, given, due.end, rung, whole)
        before = self.checksums.get(round)
        self.open_rounds.remove(round, len(due.missing))
        effects = mark_late(self._members, round, due.missing)
        wishes = self.delay.known(c.wish for c in result.counted)
        if told := self.delay.agree(round, wishes, now):
            effects.append(Note("pace", "hub", told))
        codec, remarks = _agree_on_density(self, round, wishes, result, now)
        effects += remarks
        self._advance(round, result.checksum)
        if self.masks is not None:
            self.masks.aggregator.forget_round(round)
        entry.mark_merged()
        # A masked round that is given up has contributions of which none is counted.
        is_given_up = due.end is not None and not result.counted
        merged = {} if is_given_up else by_key
        once, names = counted(merged), tuple(name for name, _ in merged)
        reply, delay, steps = tuple(result.payloads), self.delay.delay, self.delay.local_steps
        complete = None if self.arrivals is None else self.arrivals.close()
        without = sum(c.members for c in given if c.weight == NO_WEIGHT)
        count = sum(c.members for c in result.counted) + without if result.counted else 0
        count = self.merger.lot or count
        has_sites = any(c.is_exact for c in given)
        record = Round(
            round, once, delay, before, result.checksum, reply, result.inputs,
            self.delay.to_keep()[0], complete, count if has_sites else 0,
        )  # fmt: skip
        effects.append(Write(record))
        effects += self._answer(record, count)
        weight = sum(c.weight for c in result.counted)
        open_s = max(0.0, now - entry.opened)
        cuts, last, missing = result.cuts, self.delay.is_final_sync, due.missing
        effects.append(
            Closed(round, names, missing, weight, open_s, delay, cuts, steps, codec, last, ages)
        )
        return effects

    def _answer(self, record: Round, count: int) -> list[Effect]:
        """The reply to a round of this many contributions, to all members that have a part in it.
        Equal messages follow each other, because each is packed once."""
        told = [member for member in self._members if member.is_told(record.round)]
        first = self.merger.stretch.turn(len(told))
        told = told[first:] + told[:first]
        if record.complete is None:
            settled = all(map(methodcaller("has_settled", record.round), told))
        else:
            settled = all(member.merged == record.complete > 0 for member in told)
        replies = list(replies_of(record, count, settled, self.delay.local_steps))
        self._reply_bytes = sum(memoryview(payload).nbytes for payload in record.reply)
        return [Send(member.sender, reply) for reply in replies for member in told]

    def drop_contribution(self, contribution: Contribution) -> MemberRecord:
        """Drop one from the oldest open round, which may lack a quorum now. Its sender."""
        return self.open_rounds.drop_contribution(self.collecting, contribution)

    def find_behind(self) -> tuple[int, list[MemberRecord]]:
        """How many replies may wait for a member, and the members for which more are waiting."""
        most = max(self.slack, BEHIND_BYTES // max(self._reply_bytes, 1))
        return most, [m for m in self._members if self.round - m.applied > most and m.follows]


def _may_skip_to(rounds: Rounds, member: MemberRecord, round: int) -> bool:
    """Whether a member may leave rounds out: it was told to, or masks go without it."""
    if member.may_skip_to(round):
        return True
    return rounds.masks is not None and rounds.masks.may_skip_to(member, round, rounds.round)


def _merge_early(rounds: Rounds, members: Members, part: int) -> None:
    """Merge a part of the oldest open round once it is here from all members, while their other
    parts are on the way. A part that is never here from all at once is merged at the end."""
    open, merger = rounds.collecting, rounds.merger
    if not merger.count_part(part, len(members)):
        return
    entry = rounds.open_rounds.get(open)
    chosen = []
    for member in sorted(members, key=attrgetter("name")):
        whole = entry and entry.contributions.get((member.name, open))
        payloads = whole.payloads if whole else tuple(member.incoming)
        if len(payloads) <= part or (whole is None and member.next_round != open):
            return
        chosen.append(Contribution(member.name, member.weight, payloads))
    merger.merge_early(open, part, chosen)


def _contribution(
    member: MemberRecord,
    message: Contribute,
    payloads: tuple[Buffer, ...],
    now: float,
    masked: bool,
    count: int,
) -> Contribution:
    """A whole contribution, whose last part is `message`, with its parts' payloads. count: of the
    contributions that it says are in it; its weight is cut with their number."""
    sent = sum(memoryview(payload).nbytes for payload in payloads)
    wish = Wish(member.name, message.wanted_delay, message.step_s, message.applied, now, sent)
    is_empty = message.weight == NO_WEIGHT and not masked  # masked: in the sum already
    weight = message.weight if member.behind else member.weight
    if count < message.members:
        weight *= count / message.members
    return Contribution(
        member.name, NO_WEIGHT if is_empty else weight, payloads, wish, count, member.behind > 0
    )


def _unlike(member: MemberRecord, other: MemberRecord | None) -> str:
    """What is known of two members' optimizers that makes their steps differ."""
    theirs = "" if other is None else other.optimizer
    words = zip(member.optimizer.split(), theirs.split(), strict=False)
    differ = [f"{own} (another member: {its})" for own, its in words if own != its]
    return f"; its optimizer joined with {', '.join(differ)}" if differ else ""


def _why_no_site(
    member: MemberRecord, message: Contribute, weighted: bool
) -> tuple[str, str] | None:
    """What is wrong with what a message says of a site: (code, reason)."""
    count, is_empty = message.members, message.weight == NO_WEIGHT
    if not member.behind:
        return ("order", "only a gateway says how many contributions are in one") if count else None
    if not (count or is_empty):
        return "order", f"{count} contributions in one of a site of {member.behind}"
    if not weighted and not is_empty and message.weight > count:
        return "order", f"a weight of {message.weight:g} of {count} contributions"
    return None


def mark_late(members: Members, round: int, missing: tuple[str, ...]) -> list[Effect]:
    """The oldest open round closes without these members."""
    effects: list[Effect] = []
    for member in members if missing else ():
        if member.state == "training" and member.name in missing:
            member.mark_late()
            remark = f"round {round} closed at its deadline without it"
            effects.append(Note("late", member.name, remark))
    return effects


def _weight_of_all(members: Members, given: Sequence[Contribution]) -> float:
    """Of those that are in or have left what is `given`, and of the newest that may come back, as
    many as there are places for."""
    most, known = members.away.most // AWAY, [*members, *reversed([*members.away])]
    weights = {member.name: member.weight for member in known[: max(most, len(members))]}
    return sum(({each.member: each.weight for each in given} | weights).values())


def _density_of(codec: Codec) -> AgreedDensity | None:
    if not codec.adapts:
        return None
    from edgetrain.codecs.auto import Auto
    from edgetrain.exchange.hub.density import AgreedDensity

    return AgreedDensity(codec.floor) if isinstance(codec, Auto) else None


def _agree_on_density(
    rounds: Rounds, round: int, wishes: Sequence[Wish], result: RoundResult, now: float
) -> tuple[str, list[Effect]]:
    """With `codec = "auto"`: how this reply was encoded, and what is said of the next one."""
    adaptive = rounds.merger.adaptive
    if rounds.density is None or adaptive is None:
        return "", []
    rung, delay = adaptive.rung, rounds.delay
    then, told = rounds.density.agree(
        round,
        wishes,
        now,
        rung=rung,
        elements=rounds.merger.ranges.size(round),
        reply_bytes=sum(memoryview(payload).nbytes for payload in result.payloads),
        local_steps=delay.local_steps,
        most_delay=delay.most,
    )
    from edgetrain.codecs.auto import RUNGS  # of this codec alone

    if then != rung:
        # Then the first contribution on this rung has its reply.
        delay.agree_again(round + 2 * delay.in_flight + 2)
    return RUNGS[rung].name, [Note("codec", "hub", told)] if told else []
