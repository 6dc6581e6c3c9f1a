"""A hub of several, each with a stretch of the vector, which may change between two rounds.

What changes is decided by the lead (`lead.py`), which asks with `Handover`. The hub that ranges
move from is the giver, the one they move to is the taker:

=====  ==========================================================================================
stage  what this hub does
=====  ==========================================================================================
0      says which ranges it has, or why it is not a hub of this job
2      journals that it closes no round from `round` on; answers once all before are answered
4      gives a part of its state, of these ranges
6      takes such a part; with the last it goes on with these ranges, too, and journals that
8      goes on without the ranges that it gave, and journals that
10     goes on as it was
=====  ==========================================================================================

Each can be asked again. From 2 on no round of the giver closes before 8, whatever dies: its journal
says so. So from the moment the taker has the ranges in its own journal, it alone can close rounds
of them. A hub whose stretch changes is made anew from its state, as after a restart: members come
back over links that were made by the new map, and what came over others is not heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from edgetrain.errors import BadMessage, ConfigError, EdgetrainError
from edgetrain.exchange.further_messages import Handover
from edgetrain.exchange.hub.cutting import (
    cut,
    from_elsewhere,
    joined,
    why_not_joined,
    why_not_of,
)
from edgetrain.exchange.hub.effects import Effect, Note, Save, Send, Write, refusal
from edgetrain.exchange.hub.members import AWAY
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import FindDue, GoOn, Hub, HubPart, Records, Restore
from edgetrain.exchange.hub.records import (
    Record,
    Sharing,
    State,
    pack_state,
    unpack_state,
)
from edgetrain.exchange.hub.rounds import FoundDue
from edgetrain.exchange.messages import CODES, PROTOCOL, Join, Message, Resume
from edgetrain.vectors.parts import BASE_PART_ELEMENTS
from edgetrain.vectors.ranges import WHOLE, Stretch

PART_BYTES = 4 * BASE_PART_ELEMENTS
"""A state is handed over in parts of this size: no frame is larger than a base's."""

MOST_VECTORS = 4
"""Vectors of a state, as long as its ranges: base, remainder, two of an outer rule."""

ABOUT_BYTES, SEAT_BYTES = 1 << 20, 1024
"""Largest rest of a state, beside its vectors: in all, and for each present or absent member."""


class SharedPart(HubPart):
    """The part of a hub whose stretch may change. `is_lead` says whether a connection is that of
    the lead.

    Where the stretch is empty, and this is not the lead, the hub is a spare: it has no members
    until it is given ranges.
    """

    leads = False

    def __init__(self, is_lead: Callable[[bytes], bool] = lambda sender: True) -> None:
        self.settled = Sharing()
        """The map in force. Only to be looked at."""
        self.pending: Sharing | None = None
        """The hold before the next map; None: there is none. Only to be looked at."""
        self._is_lead = is_lead
        self._waiting: dict[bytes, Handover] = {}
        """Members waiting for an answer to stage 2."""
        self._given = b""
        self._taken: list[bytes] = []

    def attach(self, hub: Hub) -> Hub:
        super().attach(hub)
        own = hub.terms.stretch
        self.settled = replace(self.settled, first=own.first, end=own.end, leads=self.leads)
        return hub

    @property
    def is_spare(self) -> bool:
        own = self.hub.terms.stretch
        return not self.leads and own.first == own.end and not self.hub.started

    @property
    def _oldest_map(self) -> int:
        """Links by maps up to this number are to another stretch."""
        move = self.pending
        has_moved = move is not None and self.settled.since >= move.round
        return move.number if move is not None and has_moved else self.settled.number

    # -- what happens ---------------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        if isinstance(message, Handover):
            if not self._is_lead(sender) or not self._shares_members(message):
                return [refusal(sender, "hub", CODES["hub"])]
            if why := self._why_not_here(message):
                told = replace(message, stage=message.stage | 1, payload=b"")
                return [Send(sender, replace(told, agreed="", why=why))]
            return self._answer(sender, message, now)
        if isinstance(message, Join | Resume) and self.is_spare:
            return turn_away(sender, message.name, "hub", "this hub has no ranges yet")
        if isinstance(message, Resume) and 0 < message.map <= self._oldest_map:
            return []  # it is for ranges that are elsewhere now, and the lead says where
        return go_on() + self._answer_waiting()

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        return go_on() + self._answer_waiting()

    def find_due(self, now: float, go_on: FindDue) -> FoundDue:
        if self.pending is not None and self.hub.round >= self.pending.round:
            return [], None
        return go_on()

    def obey(self, order: Order, now: float, go_on: GoOn) -> list[Effect]:
        """The lead is told, and where it closes no round all others wait."""
        if self.leads:
            return go_on()
        order.refuse(
            f"{' '.join(order.words[:2])}: this hub is not the lead",
            "give it to the lead, in its run folder",
        )
        return []

    # -- the lead's questions ------------------------------------------------------------------

    def _shares_members(self, asked: Handover) -> bool:
        """Whether the one that asks knows a session of this hub's members, as its lead does: what
        shows that without keys, too. A spare has no members, and anyone may ask for ranges."""
        if asked.stage == 0 or self.is_spare:
            return True
        return self.hub.members.in_session(asked.session) is not None

    def _why_not_here(self, asked: Handover) -> str:
        """Why this hub cannot give, or keep, these ranges; "": it can, or is not asked for some."""
        own = self.hub.terms.stretch
        if asked.stage not in (4, 8) or (asked.stage == 8 and self._has(asked)):
            return ""
        is_within = own.first <= asked.first <= asked.end <= own.end or asked.first == asked.end
        if self.hub.membership.model.elements and is_within:
            return ""
        return f"not all ranges from {asked.first} to {asked.end} are here"

    def _answer(self, sender: bytes, asked: Handover, now: float) -> list[Effect]:
        own, told = self.hub.terms.stretch, replace(asked, stage=asked.stage | 1, payload=b"")
        match asked.stage:
            case 0:
                why = self._why_no_hub(asked)
                told = replace(told, first=own.first, end=own.end, agreed="")
                return [Send(sender, replace(told, why=why))]
            case 2:
                effects: list[Effect] = []
                is_news = self.pending is None or self.pending.number != asked.number
                if is_news and self.settled.number < asked.number and not self.is_spare:
                    hold = replace(
                        self.settled, number=asked.number, round=asked.round, pending=True
                    )
                    self.pending = hold
                    effects.append(Write(hold))
                self._waiting[sender] = asked
                return effects + self._answer_waiting()
            case 4:
                return [Send(sender, self._give(told))]
            case 6:
                return self._take(sender, asked, told, now)
            case 8:
                kept = [] if self._has(asked) else self._keep(asked, now)
                return [*kept, Send(sender, told)]
            case 10:
                return [Send(sender, told), *self._release(now)]
        return []

    def shared_terms(self) -> str:
        """The agreement of all hubs of a job, in a journal's words."""
        contributed, replied = self.hub.rounds.merger.codecs
        whole = replace(self.hub.terms, stretch=WHOLE)
        ranges = self.hub.terms.stretch.count
        return f"{whole.agreed(contributed.name, replied.name, False)}, {ranges} ranges"

    def _why_no_hub(self, asked: Handover) -> str:
        if asked.protocol != PROTOCOL:
            return f"it speaks version {PROTOCOL}, the lead {asked.protocol}"
        if asked.agreed != (own := self.shared_terms()):
            return f"it is a hub of another job: {own}; the lead's is {asked.agreed}"[:200]
        return ""

    def _answer_waiting(self) -> list[Effect]:
        pending = self.pending
        if not self._waiting or (pending is not None and self.hub.round < pending.round):
            return []
        waiting, self._waiting = self._waiting, {}
        own = self.hub.terms.stretch
        return [
            Send(sender, replace(asked, stage=3, first=own.first, end=own.end))
            for sender, asked in waiting.items()
        ]

    def _has(self, asked: Handover) -> bool:
        own = self.hub.terms.stretch
        return (own.first, own.end) == (asked.first, asked.end)

    def _give(self, told: Handover) -> Handover:
        if not told.part:
            own = self.hub.terms.stretch
            state = cut(self.hub.state(), own, Stretch(own.count, told.first, told.end))
            self._given = pack_state(replace(state, fixed=()))
        parts = max(1, -(-len(self._given) // PART_BYTES))
        start = told.part * PART_BYTES
        return replace(told, parts=parts, payload=self._given[start : start + PART_BYTES])

    def _take(self, sender: bytes, asked: Handover, told: Handover, now: float) -> list[Effect]:
        if self._has(asked):
            return [Send(sender, told)]
        if why := self._why_not_taken(asked):
            self._taken = []
            return [Send(sender, replace(told, why=why))]
        if not asked.part:
            self._taken = []
        if asked.part == len(self._taken):
            self._taken.append(bytes(asked.payload))
        if len(self._taken) < asked.parts:
            return [Send(sender, told)]
        try:
            more = unpack_state(b"".join(self._taken))
        except BadMessage as error:
            return [Send(sender, replace(told, why=f"what came is no state: {error}"[:200]))]
        self._taken = []
        own, theirs = self.hub.terms.stretch, self._missing(asked)
        span = Stretch(own.count, asked.first, asked.end)
        if why := why_not_of(more, theirs):
            return [Send(sender, replace(told, why=why))]
        if self.is_spare:
            return self._begin_with(more, span, asked, now, told, sender)
        state = self.hub.state()
        if why := why_not_joined(state, more):
            return [Send(sender, replace(told, why=why))]
        state = joined(state, own, more, theirs)
        return [*self._become(state, span, asked, now), Send(sender, told)]

    def _missing(self, asked: Handover) -> Stretch:
        """The ranges it lacks of those it is to have, behind its own. ConfigError: impossible."""
        own = self.hub.terms.stretch
        if not self.is_spare and asked.first != own.first:
            raise ConfigError(f"{own} do not go on with those from {asked.first} on")
        return Stretch(own.count, asked.first if self.is_spare else own.end, asked.end)

    def _why_not_taken(self, asked: Handover) -> str:
        """Why a part of a state is not taken in: before memory is taken for it."""
        try:
            elements = self.hub.membership.model.elements or self.hub.policy.most_elements
            size = self._missing(asked).size(elements)
        except ConfigError as error:
            return error.message[:200]
        seats = (1 + AWAY) * self.hub.policy.members
        most = 4 * MOST_VECTORS * size + ABOUT_BYTES + SEAT_BYTES * seats
        if asked.parts > -(-most // PART_BYTES) or memoryview(asked.payload).nbytes > PART_BYTES:
            return f"a state of {asked.parts:,} parts: these ranges take {most:,} bytes at most"
        return "" if asked.part < asked.parts else f"part {asked.part:,} of {asked.parts:,}"

    def _begin_with(
        self, given: State, span: Stretch, asked: Handover, now: float, told: Handover, to: bytes
    ) -> list[Effect]:
        """A spare goes on from this state, or stays a spare if it is of another job."""
        seats, away = from_elsewhere(given.seats), from_elsewhere(given.away)
        try:
            begun = self._become(replace(given, seats=seats, away=away), span, asked, now)
        except (EdgetrainError, KeyError) as error:
            self.hub.become(Stretch(span.count, 0, 0))
            return [Send(to, replace(told, why=f"no state of this job: {error}"[:200]))]
        return [*begun, Send(to, told)]

    def _keep(self, asked: Handover, now: float) -> list[Effect]:
        own = self.hub.terms.stretch
        kept = Stretch(own.count, asked.first, asked.end)
        self._given = b""
        return self._become(cut(self.hub.state(), own, kept), kept, asked, now)

    def _become(self, state: State, own: Stretch, asked: Handover, now: float) -> list[Effect]:
        """Be the hub of another stretch, from this state on, and journal that."""
        spare, round = self.is_spare, asked.round
        course = self.hub.steering.course
        self.hub.become(own)
        # The epoch stays: nothing was lost that members would have to send again.
        state = replace(state, agreed=self.hub.agreed(), epoch=state.epoch - 1, course=course)
        self.hub.go_on_from(state, now)
        self.oldest_reply = round
        self.settled = replace(self.settled, first=own.first, end=own.end, since=round)
        if not self.leads:  # the lead goes by the new map once all others do
            self.settled = replace(self.settled, number=asked.number, round=round)
            self.pending = None
        begins = Note("started" if spare else "map", "hub", f"has {own} from round {round} on")
        return [Save(self.hub.state()), begins]

    def _release(self, now: float) -> list[Effect]:
        if self.pending is None:
            return []
        given_up, self.pending = replace(self.pending, round=0), None
        return [Write(given_up), *self.hub.close_rounds(now)]

    # -- what survives a restart ---------------------------------------------------------------

    def state(self, state: State) -> State:
        known = [self.settled] if self.settled.number or self.pending is not None else []
        known += [] if self.pending is None else [self.pending]
        return replace(state, partitions=tuple(known))

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        """The journal says which stretch it has."""
        if state.partitions:
            self.settled, *pending = state.partitions
            if self.settled.leads != self.leads:
                role = "the lead" if self.settled.leads else "not the lead"
                raise ConfigError(
                    f"the journal is of a hub that is {role} of its job",
                    "resume it with --number N or --spare, as it was started",
                )
            self.pending = pending[0] if pending else None
            count = self.hub.terms.stretch.count
            self.hub.become(Stretch(count, self.settled.first, self.settled.end))
        go_on(self._noting(records))
        self.oldest_reply = self.settled.since

    def _noting(self, records: Records) -> Iterator[Record]:
        for record in records:
            if isinstance(record, Sharing) and record.pending:
                self.pending = record if record.round else None
            elif isinstance(record, Sharing):
                self.settled, self.pending = record, None
            yield record
