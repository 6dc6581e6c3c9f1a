"""A hub whose rounds have a sample of the members each: who is drawn, and what they are sent.

Who is drawn follows from the job alone (`strategies/cohort.py`), so that nothing of it is kept or
sent; or from who is there when the round opens, too. Then the first of them is told to evaluate, as
no member knows who else is drawn, and after a restart the hub draws anew, of those that are back. A
member has a part in the rounds that it is drawn for, and in no others:

=========================================  =======================================================
a member that is drawn                     is sent
=========================================  =======================================================
and was in the round before                that round's reply
and was not                                the base, and where the fleet stands (`Start`): it goes
                                           on from there, whatever it missed
and is still busy with an earlier round    nothing: what it gives counts late, as ever
and is not there                           the same, if it comes while the round is open
not, and was in the round before           a beat: its contribution is merged, it waits
not                                        nothing
=========================================  =======================================================

Behind the last round all are sent the base, so that they end. A round waits for the members that
are in it. If none of those that were drawn is there, it stays open for one that comes, as long as
for late members, and is then over without a contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from edgetrain.exchange.hub.base_transfer import base_messages
from edgetrain.exchange.hub.effects import Effect, Note, Send, refusal
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.open_rounds import OpenRound, expected
from edgetrain.exchange.hub.protocol import FindDue, GoOn, Hub, HubPart, Records, Restore
from edgetrain.exchange.hub.records import State
from edgetrain.exchange.hub.rounds import Due, FoundDue
from edgetrain.exchange.messages import (
    Base,
    Beat,
    Contribute,
    Evaluate,
    Join,
    Message,
    Reply,
    Start,
)
from edgetrain.strategies.cohort import AVAILABLE, Cohort
from edgetrain.vectors.noise import Source, chosen, system

NONE = -1
"""In place of a round's number: a member that is drawn for none."""


class CohortPart(HubPart):
    """Draws the members of each round, and lets no others begin. Attached before anyone joins."""

    def __init__(self, cohort: Cohort, source: Source | None = None) -> None:
        """`source`: what secret draws are made of; None: the system's."""
        self.cohort, self._source = cohort, source or system
        self.fetch: Callable[[Sequence[int]], Sequence[tuple[bytes, Join]]] | None = None
        """Brings members of these numbers that are not here: their connections, and what they join
        with. Then a member goes when a round of its is over and it is not in the next. None: all
        come by themselves, and stay."""
        self._roster: tuple[int, frozenset[int]] = NONE, frozenset()
        self._alone: tuple[int, float] = NONE, math.inf
        """The newest round that nobody was there for, and since when."""

    def attach(self, hub: Hub) -> Hub:
        hub.membership.draws = True
        hub.membership.draw, hub.membership.are_to_come = self._draw, self._are_to_come
        if (masks := hub.rounds.masks) is not None:
            masks.drawn_for = self._drawn_here
        if self.cohort.extra or self.cohort.is_secret:  # no others than those of a round count
            hub.rounds.merger.keeps_late = False
        return super().attach(hub)

    # -- who is drawn -------------------------------------------------------------------------

    def roster(self, round: int) -> frozenset[int]:
        """The numbers of the members that are drawn for a round. As long as nobody is there that
        could be, it is not drawn yet."""
        if self._roster[0] == round:
            return self._roster[1]
        if self.cohort.is_secret:
            drawn = tuple(chosen(self.cohort.members, self.cohort.share, self._source).tolist())
        elif not self.cohort.at_hub:
            drawn = self.cohort.drawn(round, self._samples())
        elif there := {self._number(m): m.weight for m in self.hub.members if _is_there(m)}:
            numbers = sorted(there)
            drawn = self.cohort.drawn_of(round, numbers, [there[each] for each in numbers])
        else:
            return frozenset()
        self._roster = round, frozenset(drawn)
        return self._roster[1]

    def _samples(self) -> Sequence[float]:
        if self.cohort.sampling != "weighted":
            return ()
        known = {self._number(m): m.weight for m in [*self.hub.members.away, *self.hub.members]}
        return [known.get(number, 1.0) for number in range(self.cohort.members)]

    def _number(self, member: MemberRecord) -> int:
        """Its place in the job, which the members of a job have in their names."""
        digits = member.name.removeprefix("m")
        is_place = digits.isdecimal() and member.name == f"m{digits}" and len(digits) < 10
        return int(digits) if is_place else member.index

    @property
    def _is_over(self) -> bool:
        """Whether the last round of the run is merged."""
        rounds = self.hub.rounds
        return rounds.started and rounds.delay.end_after(rounds.round) <= rounds.round

    def _is_in(self, member: MemberRecord, round: int) -> bool:
        return self._is_over or self._number(member) in self.roster(round)

    def _drawn_here(self, round: int) -> list[MemberRecord]:
        return [m for m in self.hub.members if m.is_waited_for(round) and m.drawn == round]

    def _draw(self, member: MemberRecord) -> bool:
        """Whether a member that could begin has a part in the open round; it has, from now on."""
        round = self.hub.rounds.round
        before = self.hub.members.away.get(member.name) or member
        is_in = self._is_in(member, round) and (before.next_round <= round or self._is_over)
        member.draw(round if is_in and not self._is_over else NONE)
        return is_in

    def _are_to_come(self) -> bool:
        return self.fetch is not None and self.hub.started and not self._is_over

    # -- around the hub -----------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        if isinstance(message, Contribute) and self._is_over and message.round >= self.hub.round:
            steps = self.hub.terms.steps
            said = f"the job's {steps:,} steps are over: step while member.progress < {steps}"
            return [refusal(sender, "ended", said)]
        was_started, effects = self.hub.started, go_on()
        return effects if was_started or not self.hub.started else self._ask() + effects

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        effects, has_rounds = go_on(), self.hub.started and not self._is_over
        return effects + (self._draw_more() if self.cohort.at_hub and has_rounds else [])

    def _draw_more(self) -> list[Effect]:
        """Draw of those that have come while a round is open that found too few, or nobody."""
        round, before = self.hub.round, self._roster
        roster = self.roster(round)
        lacks = self.cohort.wanted - len(roster) if self.cohort.sampling == AVAILABLE else 0
        if lacks and roster:
            free = {self._number(m) for m in self.hub.members if _is_there(m)} - roster
            more = self.cohort.drawn_of(round, sorted(free), ())[:lacks]
            self._roster = round, roster.union(more)
        if self._roster == before:
            return []
        called = self._call({m.sender for m in self.hub.members if m.drawn == round})
        return (self._ask() if before[0] != round else []) + called

    def _ask(self) -> list[Effect]:
        """The first of those that are in the open round evaluates; behind the last, of all."""
        found = [m for m in self.hub.members if self._is_in(m, self.hub.round) and _is_there(m)]
        if not self.cohort.at_hub or self.cohort.is_secret or not found:
            return []
        return [Send(min(found, key=self._number).sender, Evaluate())]

    def find_due(self, now: float, go_on: FindDue) -> FoundDue:
        if self.cohort.is_secret:
            self._drop_others()
        effects, due = go_on()
        rounds, round = self.hub.rounds, self.hub.round
        if due is not None or self._is_over:
            return effects, due
        if (masks := rounds.masks) is not None:
            few = len(self._drawn_here(round)) < masks.terms.threshold
            if few and masks.aggregator.next_first <= round and self._may_pass(round, now):
                end = masks.passed()
                remark = Note("late", "hub", f"round {round} is given up: {end.reason}")
                return [*effects, remark], Due(OpenRound(now), (), end)
            return effects, None
        entry = rounds.open_rounds.get(round)
        missing = expected(self.hub.members, round)
        if entry is not None and self.cohort.extra:
            there = {name for name, meant_for in entry.contributions if meant_for == round}
            if len(there) >= self.cohort.size:
                return effects, Due(entry, ())
            entry.lacks = min(entry.lacks, self.cohort.size - len(there))
        if entry is None and not missing and self._may_pass(round, now):
            return effects, Due(OpenRound(now), ())
        return effects, None

    def _drop_others(self) -> None:
        """Drop what the open round has of members that are not drawn, as after a restart others may
        be: each member is in a round with the chance that is accounted."""
        if (entry := self.hub.rounds.open_rounds.get(self.hub.round)) is None:
            return
        for key, member in [*entry.senders.items()]:
            if self._number(member) not in self.roster(self.hub.round):
                self.hub.rounds.drop_contribution(entry.contributions[key])
                member.mark_merged(key[1], 0)

    def _may_pass(self, round: int, now: float) -> bool:
        """Whether a round that nobody is there for is over."""
        if self._alone[0] != round:
            self._alone = round, now
        has_waited = now - self._alone[1] >= self.hub.policy.deadline_s
        roster, is_drawn = self.roster(round), self._roster[0] == round
        is_anyone = bool(self.hub.members) or self.fetch is not None
        return is_anyone and is_drawn and (has_waited or not roster)

    def close(self, effects: list[Effect], now: float) -> list[Effect]:
        """Let the next round begin: the reply goes to who has a part in both."""
        round, members = self.hub.round, self.hub.members
        before = [m for m in members if m.drawn == round - 1 and m.trains and not m.returning]
        goes = {member.sender for member in before if not self._is_in(member, round)}
        effects = [
            each
            for each in effects
            if not (isinstance(each, Send) and isinstance(each.message, Reply) and each.to in goes)
        ]
        for member in before:
            if member.sender in goes:
                effects.append(Send(member.sender, Beat(self.hub.epoch, member.merged)))
                member.draw(NONE)
                if self.fetch is not None and member.merged >= round:
                    member.depart(left=True)
                    members.remove(member, may_return=False)
            else:
                member.draw(NONE if self._is_over else round)
                member.mark_applied(round)
        called = self._call({member.sender for member in before} - goes)
        return self._ask() + effects + called

    def _call(self, told: set[bytes]) -> list[Effect]:
        """Let all but these begin the open round that are drawn for it."""
        hub, effects = self.hub, list[Effect]()
        rounds, base = hub.rounds, list[Base]()
        for member in [*hub.members]:
            is_called = self._is_in(member, hub.round) and member.sender not in told
            if not is_called or member.returning or member.standing == "astray":
                continue
            if member.state == "waiting":
                effects += hub.membership.admit(member)
            elif (member.state == "training" or self._is_over) and not self._has_ended(member):
                assert rounds.base is not None
                base = base or base_messages(rounds.base.copy())
                effects += [Send(member.sender, part) for part in base]
                effects.append(Send(member.sender, self._start(member)))
        return effects + self._fetched()

    def _fetched(self) -> list[Effect]:
        """Let those begin that are drawn and not here; at the end the first, who evaluates."""
        hub = self.hub
        if self.fetch is None:
            return []
        wanted = [0] if self._is_over else sorted(self.roster(hub.round))
        lacking = [number for number in wanted if hub.members.named(f"m{number}") is None]
        if not lacking:
            return []
        joins = self.fetch(lacking)
        assert hub.rounds.base is not None
        hub.membership.base_sent = base_messages(hub.rounds.base.copy())
        effects = [each for one in joins for each in hub.membership.join(*one)]
        hub.membership.base_sent = ()
        return [each for each in effects if isinstance(each, Send)]

    def _start(self, member: MemberRecord) -> Start:
        """What draws a member that has begun for the open round, behind the base."""
        rounds, round = self.hub.rounds, self.hub.round
        member.begin_at(round, member.next_round)
        member.mark_applied(round)
        member.draw(NONE if self._is_over else round)
        return Start(
            round, round, rounds.delay.delay, rounds.checksums[round], keep=False, resend=round,
            local_steps=rounds.delay.local_steps, steps=rounds.steps_before(round),
            fixed=self.hub.membership.fixed.digest,
        )  # fmt: skip

    def _has_ended(self, member: MemberRecord) -> bool:
        """Whether it was sent what came of the last round."""
        return self._is_over and member.applied >= self.hub.rounds.delay.end_after(self.hub.round)

    def state(self, state: State) -> State:
        """Without members that have not begun: after a restart they join."""
        waiting = {member.name for member in self.hub.members if member.state == "waiting"}
        return replace(state, seats=tuple(s for s in state.seats if s.name not in waiting))

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        go_on(records)
        for member in self.hub.members:
            self._draw(member)


def _is_there(member: MemberRecord) -> bool:
    """Whether it could begin a round now, as far as the hub knows."""
    can = member.state in ("waiting", "training") and member.standing == "in step"
    return can and member.unreachable_since is None
