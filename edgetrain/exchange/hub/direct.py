"""The hub that all join where members host the reducers: it has no range, or all of them.

Who reduces what is known once members have tried each other, and a hub's stretch is what it is
made with. So nobody is welcomed before that: then the hub is made anew, with its stretch, and all
joins are handled again. It reduces everything itself, as in a star, where fewer than two members
can be reached by all others.

A member that has left may reduce on for those that have not: its place stays in the map. One that
is given up, or expelled, does not: another member takes over its stretch. The hub asks all where
they are there, lets one with the most replies host a reducer in its place, and hands out a map
with that (`Takeover`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.exchange.further_messages import Reached, Takeover
from edgetrain.exchange.hub.effects import Effect, Note, Save, Send, Write, refusal
from edgetrain.exchange.hub.evaluators import DONE
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.places import LEAD, Assign, Places, Reach
from edgetrain.exchange.hub.protocol import GoOn, Hub, HubPart, Records, Restore
from edgetrain.exchange.hub.records import Charted, Record, State, pack_state
from edgetrain.exchange.messages import CODES, Join, Leave, Map, Message, Resume, Welcome
from edgetrain.vectors.ranges import Stretch

if TYPE_CHECKING:
    from edgetrain.strategies.closing import ClosingRule

FEWEST_REDUCERS = 2
"""One member that reduces everything would be a star with a slower hub."""


def share_out(
    reach: Reach, ranges: int, rates: Mapping[str, float] | None = None
) -> dict[str, tuple[int, int]]:
    """Consecutive ranges, 0 to `ranges`, for the members that all others have reached: equally, or
    in proportion to their `rates`, as whole ranges allow. All for the hub where there are too few.
    """
    names = reach.reached_by_all()[:ranges]
    if len(names) < FEWEST_REDUCERS:
        return {LEAD: (0, ranges)}
    weights = [1.0 if rates is None else rates.get(name, 0.0) for name in names]
    total, so_far, borders = sum(weights), 0.0, [0]
    for weight in weights:
        so_far += weight
        borders.append(round(ranges * so_far / total))
    borders[-1] = ranges
    spans = zip(names, borders, borders[1:], strict=False)
    return {name: (first, end) for name, first, end in spans if first < end}


@dataclass
class Orphan:
    """A stretch whose reducer is lost."""

    asked: dict[str, bytes] = field(default_factory=dict)
    """The members that were asked where they are, and over which connection."""
    answers: dict[str, Takeover] = field(default_factory=dict)
    heir: str = ""
    """Name of the successor; "": none yet."""


class MappedPart(HubPart):
    """The part of a hub with `places`: training begins once all members have tried to reach each
    other.

    A member that can neither be reached nor dial is refused. After the start a message or a tick
    that changes who is in is followed by a new map to all.
    """

    def __init__(self, assign: Assign) -> None:
        """`assign` decides who reduces what."""
        self.places = Places(assign)

    def attach(self, hub: Hub) -> Hub:
        super().attach(hub)
        hub.membership.is_ready = lambda: self.places.is_settled
        return hub

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        if isinstance(message, Join | Resume) and not message.address:
            return turn_away(sender, message.name, "peers", CODES["peers"])
        if not isinstance(message, Join | Resume | Leave | Reached):
            return go_on()
        member = self.hub.members.get(sender)
        if member is not None and isinstance(message, Reached):
            member.mark_heard()
            self.places.accept(member, message)
            return self._update_map(now)
        effects = go_on()
        if isinstance(message, Leave):  # the next tick tells the others
            return effects
        told = self._update_map(now)
        member = self.hub.members.get(sender)
        knows = any(_is_map(effect) for effect in told) or self.places.state == "gathering"
        if member is not None and not knows:
            told = [self.places.map_to(member)]
        return told + effects  # so that who is told to start knows the others

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        return go_on() + self._update_map(now)

    def _update_map(self, now: float) -> list[Effect]:
        """Tell all members where the others are, if that has changed; start if that was missing."""
        hub = self.hub
        full = len(hub.members) >= hub.policy.members
        told = self.places.update(hub.members, hub.epoch, full=full, started=hub.started, now=now)
        return told + hub.start_if_ready(now)


def _is_map(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Map)


class DirectPart(MappedPart):
    """The part of a hub whose stretch follows from the map."""

    def __init__(self, assign: Assign) -> None:
        super().__init__(assign)
        self._joins: dict[bytes, Join] = {}
        """The `Join` of each member not welcomed yet."""
        self._is_welcoming = False
        self._done: dict[str, int] = {}
        """Replies held by each member that left after its last step."""
        self._chart = b""
        """The map as it was last written to the journal."""
        self._orphans: dict[tuple[int, int], Orphan] = {}
        self._present: set[str] = set()
        """The members that were in when the hub last looked."""

    def attach(self, hub: Hub) -> Hub:
        super().attach(hub)
        self._whole = hub.terms.stretch
        return hub

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        return self._charted(self._handle(sender, message, now, go_on))

    def _handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        if isinstance(message, Join) and not self._is_welcoming:
            self._joins[sender] = message
        member = self.hub.members.get(sender)
        if member is not None and isinstance(message, Leave) and message.reason == DONE:
            self._done[member.name] = member.next_round
        if member is not None and isinstance(message, Takeover):
            member.mark_heard()
            told = self._hear(member, message)
            return told + self._update_map(now) + self._take_over(now)
        if self.hub.started and isinstance(message, Join | Resume):
            # A member comes, or comes back: what it was asked may be lost with its connection
            name = message.name
            for orphan in self._orphans.values():
                orphan.asked.pop(name, None)
                orphan.answers.pop(name, None)
                orphan.heir = "" if orphan.heir == name else orphan.heir
        if self.hub.started:
            return super().handle(sender, message, now, go_on) + self._take_over(now)
        return self._held_back(super().handle(sender, message, now, go_on), now)

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        if self.hub.started:
            return self._charted(super().tick(now, go_on) + self._take_over(now))
        return self._charted(self._held_back(super().tick(now, go_on), now))

    # -- what survives a restart ---------------------------------------------------------------

    def state(self, state: State) -> State:
        return replace(state, chart=self.places.chart(self._done, self._orphans))

    def _charted(self, effects: list[Effect]) -> list[Effect]:
        """The same, and if the map has changed it is in the journal before anyone is told."""
        chart = self.places.chart(self._done, self._orphans) if self.hub.started else self._chart
        if chart == self._chart:
            return effects
        self._chart = chart
        saved = 1 + max((n for n, each in enumerate(effects) if isinstance(each, Save)), default=-1)
        return [*effects[:saved], Write(Charted(chart)), *effects[saved:]]

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        """Reducers go on meanwhile: they are with the members."""
        if not state.chart:
            raise ConfigError("the journal has no map: it is of a job whose members do not reduce")
        last = [state.chart]

        def noted() -> Iterator[Record]:
            for record in records:
                if isinstance(record, Charted):
                    last[0] = record.chart
                yield record

        self.places.restore(state.chart, self.hub.members)
        self._become_reducer_of(self.places.stretches.get(LEAD, (0, 0)))
        go_on(noted())
        self._done, lost = self.places.restore(last[0], self.hub.members)
        self._orphans = {span: Orphan() for span in lost}

    # -- a reducer is lost ---------------------------------------------------------------------

    def _take_over(self, now: float) -> list[Effect]:
        effects = self._warn_early()
        for span, name in self.places.holders().items():
            lost = self.hub.members.named(name) is None and name not in self._done
            if lost and span not in self._orphans:
                self._orphans[span] = Orphan()
                first, end = span
                told = f"{name}, which reduces ranges {first} to {end - 1}, is lost"
                effects.append(Note("map", "hub", f"{told}; {self._lost_with_it()}"))
        for span, orphan in self._orphans.items():
            effects += self._go_on(span, orphan)
        return effects

    def _warn_early(self) -> list[Effect]:
        """If a member is lost before a round is over: reducers may wait for it, for ever, so that
        members which have not begun there have to join anew. Those that have go on."""
        before, self._present = self._present, {member.name for member in self.hub.members}
        if self.hub.round or before <= self._present | self._done.keys():
            return []
        return [Send(member.sender, Takeover(0, 0, 0)) for member in self.hub.members]

    def _lost_with_it(self) -> str:
        merger = self.hub.rounds.merger
        lost = [] if merger.reply_codec.lossless else ["what its replies left out"]
        lost += [] if merger.outer is None else ["what the outer rule remembers there"]
        return f"lost with it: {' and '.join(lost)}" if lost else "nothing is lost with it"

    def _go_on(self, span: tuple[int, int], orphan: Orphan) -> list[Effect]:
        """Ask whoever has not been asked; once all have answered, let one of them take over."""
        effects: list[Effect] = []
        members = [member for member in self.hub.members if member.trains]
        for member in members:
            if orphan.asked.get(member.name) != member.sender:
                orphan.asked[member.name] = member.sender
                effects.append(Send(member.sender, Takeover(0, *span)))
        there = {member.name: member for member in members}
        if (
            effects
            or not there
            or orphan.heir in there
            or not there.keys() <= orphan.answers.keys()
        ):
            return effects
        able = [name for name in there if orphan.answers[name].hosts]
        most = max((orphan.answers[name].applied for name in able), default=0)
        alone = [name for name, applied in self._done.items() if applied > most]
        if not able or alone:
            return effects + self._give_up(span, alone)
        load = Counter(self.places.holders().values())
        orphan.heir = min(able, key=lambda name: (-orphan.answers[name].applied, load[name], name))
        applied = orphan.answers[orphan.heir].applied
        seats = tuple(member.seat() for member in self.hub.members if not member.ends)
        state = replace(
            self.hub.state(), seats=seats, base=None, memory={}, outer={}, fixed=(), chart=b""
        )
        heir = there[orphan.heir]
        effects.append(Send(heir.sender, Takeover(2, *span, applied, payload=pack_state(state))))
        return effects

    def _give_up(self, span: tuple[int, int], alone: list[str]) -> list[Effect]:
        """Nobody can reduce these ranges from a base that all have: send home whoever is here."""
        first, end = span
        why = (
            f"only {', '.join(alone)} had the last replies" if alone else "no member can be reached"
        )
        reason = f"nobody can reduce ranges {first} to {end - 1}: {why}"
        effects: list[Effect] = [Note("map", "hub", reason)]
        for member in [*self.hub.members]:
            effects += [refusal(member.sender, "session", reason)]
            effects += self.hub.membership.remove(member, "refused", reason)
        return effects

    def _hear(self, member: MemberRecord, message: Takeover) -> list[Effect]:
        span = message.first, message.end
        orphan = self._orphans.get(span)
        if orphan is None:
            return []
        if message.stage == 1:
            orphan.answers[member.name] = message
        elif message.stage == 3 and orphan.heir == member.name and message.address:
            del self._orphans[span]
            self.places.move(span, member, message.address)
            first, end = span
            return [
                Note("reducers", "hub", f"{member.name} reduces ranges {first} to {end - 1} now")
            ]
        elif message.stage == 3 and orphan.heir == member.name:
            orphan.answers[member.name] = replace(orphan.answers[member.name], hosts=False)
            orphan.heir = ""
        return []

    def _held_back(self, effects: list[Effect], now: float) -> list[Effect]:
        """What the hub wants done, without welcomes until the map is settled."""
        if self._is_welcoming:
            lost = self._lost([name for name in self.places.stretches if name != LEAD], effects)
            return effects + self._begin_again(lost[0]) if lost else effects
        rest = [effect for effect in effects if not _is_welcome(effect)]
        return rest + self._welcome_all(now) if self.places.is_settled else rest

    def _lost(self, names: Sequence[str], effects: Sequence[Effect]) -> list[str]:
        """Those of these members that are not here, or were not while these effects came about."""
        notes = [effect for effect in effects if isinstance(effect, Note)]
        went = {note.member for note in notes if note.event in ("gone", "left")}
        return [name for name in names if name in went or self.hub.members.named(name) is None]

    def _welcome_all(self, now: float) -> list[Effect]:
        members = sorted(self.hub.members, key=lambda member: member.index)
        joins = [(m.sender, self._joins[m.sender]) for m in members]
        self._become_reducer_of(self.places.stretches.get(LEAD, (0, 0)))
        effects: list[Effect] = [Note("reducers", "hub", self._words())]
        for sender, join in joins:
            welcomed = self.hub.take_in(sender, join, now)
            effects += [effect for effect in welcomed if not isinstance(effect, Note)]
        return effects

    def _become_reducer_of(self, span: tuple[int, int], closing: ClosingRule | None = None) -> None:
        """Let the hub be made anew, as that of this stretch, without members."""
        self._become(Stretch(self._whole.count, *span), closing)
        self._is_welcoming = True

    def _become(self, stretch: Stretch, closing: ClosingRule | None = None) -> None:
        self.hub.become(stretch, closing=closing)
        MappedPart.attach(self, self.hub)
        self._joins = {}

    def _begin_again(self, lost: str) -> list[Effect]:
        """A reducer was lost before training began: nothing is lost, and all have to join anew."""
        reason = f"{lost}, which the others need, was lost before training began: join again"
        effects: list[Effect] = [Note("map", "hub", reason)]
        effects += [refusal(member.sender, "session", reason) for member in self.hub.members]
        self._become(self._whole)
        self._is_welcoming = False
        return effects

    def _words(self) -> str:
        places, ranges = self.places, self.hub.terms.stretch.count
        if LEAD not in places.stretches:
            whom = ", ".join(places.stretches)
            return f"direct: {whom} reduce {ranges} ranges"
        reached = ", ".join(places.reach.reached_by_all()) or "no member"
        return f"star: the hub reduces, because all others reach only {reached}"


def _is_welcome(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Welcome)
