"""The lead of several hubs: it tells members where the others are, and moves ranges between hubs
when people order that.

A move is written down as a script, a question after the other (`shared.py` has what each means):

=====================  ===========================================================================
step                   what the lead does
=====================  ===========================================================================
hub is asked (0)       refuses the order if it does not answer, or is no hub of this job
round is chosen        one that no member can have contributed to; journals the move; tells members
                       to contribute to none from it on before the next map
hold (2)               taker and giver close no round from there on
give (4), take (6)     part by part from the giver to the taker
keep (8)               the giver goes on with the rest
settled                journals the new map, and hands it out
=====================  ===========================================================================

Where the taker cannot put both states together (a late contribution is merged at one of them only)
all go on by the old map, and it is tried again some rounds later. A lead that is restored takes up
the move that its journal has, from `hold` on.

A script is a generator that yields (hub, question) and is sent the answer. A question is asked
again until it is answered: the other hub answers it again. No socket here: `connect` makes the ways
to others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from edgetrain.errors import BadMessage, EdgetrainError
from edgetrain.exchange.further_messages import Handover
from edgetrain.exchange.hub.effects import Effect, Note, Send, Write
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import GoOn, Records, Restore
from edgetrain.exchange.hub.records import Sharing, State
from edgetrain.exchange.hub.shared import SharedPart
from edgetrain.exchange.messages import PROTOCOL, Join, Map, Message, Refuse, Resume, pack, unpack
from edgetrain.exchange.transport import MemberTransport
from edgetrain.vectors.ranges import Stretch

Row = tuple[str, str, int, int]
"""A hub: address, public key ("": as members know it, or none), ranges."""

TRIES = 8
"""Times that a move is tried, where late contributions are in the way."""

Script = Generator[tuple[str, Handover], Handover, None]
"""See the module. "" is this hub."""

Connect = Callable[[str], tuple[MemberTransport, str]]
"""A way to the hub at an address, and its public key as text. Raises EdgetrainError."""

PATIENT_BEATS = 8
"""Beats that a hub has to answer the first question, and one that is removed the last."""

AGAIN_BEATS = 4
"""Beats until a question is asked again: the connection, or the hub, may have been lost."""

OWN = b""
"""In place of a connection: this hub asks itself."""


class AskingPart(SharedPart):
    """The part of a hub with a script. Owns its ways to others."""

    def __init__(self, connect: Connect) -> None:
        super().__init__()
        self._connect = connect
        self._ends: dict[str, MemberTransport] = {}
        self._script: Script | None = None
        self._question: tuple[str, Handover] | None = None
        self._asked = self._until = 0.0
        self._asks = 0
        """How often it has asked others."""
        self._said: list[Effect] = []
        """What is to be done next."""
        self._outgoing: list[tuple[str, Handover]] = []
        """Leaves with the next `hear`: what the journal has to have before is there then."""

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        effects = super().handle(sender, message, now, go_on)
        return self._listened(effects, now) + self._drain(now)

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        effects = self._listened(super().tick(now, go_on), now)
        if self._question is None:
            return effects + self._drain(now)
        hub, asked = self._question
        if asked.stage == 0 and now >= self._until:
            self._hear(hub, replace(asked, stage=1, why="it does not answer"), now)
        elif asked.stage == 8 and now >= self._until and not asked.end - asked.first:
            self._hear(hub, replace(asked, stage=9), now)  # a hub that is removed may be gone
        elif now - self._asked >= AGAIN_BEATS * self.hub.policy.heartbeat_s:
            self._ask(now)
        return effects + self._drain(now)

    def hear(self, now: float) -> list[Effect]:
        """Ask other hubs what is to be asked, and take in what they have answered."""
        outgoing, self._outgoing = self._outgoing, []
        for hub, asked in outgoing:
            self._ends[hub].send(pack(asked))
        for hub, end in [*self._ends.items()]:
            while self._ends.get(hub) is end and (frames := end.receive(0.0)) is not None:
                try:
                    message = unpack(frames)
                except BadMessage:
                    continue
                if isinstance(message, Handover):
                    self._hear(hub, message, now)
                elif isinstance(message, Refuse) and self._question is not None:
                    _, asked = self._question
                    if asked.stage == 0:
                        why = f"it refused: {message.reason}"[:200]
                        self._hear(hub, replace(asked, stage=1, why=why), now)
        return self._drain(now)

    def _way_to(self, hub: str) -> str:
        """Connect to a hub. Returns its public key. Raises EdgetrainError."""
        if hub in self._ends:
            self._ends.pop(hub).close()
        self._ends[hub], key = self._connect(hub)
        return key

    def _begin(self, script: Script, now: float) -> None:
        self._script = script
        self._go_on(None, now)

    def _go_on(self, answer: Handover | None, now: float) -> None:
        assert self._script is not None
        try:
            self._question = next(self._script) if answer is None else self._script.send(answer)
        except StopIteration:
            self._script = self._question = None
            return
        self._until = now + PATIENT_BEATS * self.hub.policy.heartbeat_s
        self._ask(now)

    def _ask(self, now: float) -> None:
        assert self._question is not None
        hub, asked = self._question
        self._asked = now
        if not hub:
            self._said += self._answer(OWN, asked, now)
            return
        if hub not in self._ends:
            try:
                self._way_to(hub)
            except EdgetrainError as error:
                self._said.append(Note("map", "hub", f"{hub}: {error.message}"))
                return
        self._asks += 1  # one of them may be so new that the other hub does not know it
        sessions = [member.session for member in self.hub.members if member.session] or [0]
        asked = replace(asked, session=sessions[self._asks % len(sessions)] if asked.stage else 0)
        self._outgoing.append((hub, asked))

    def _hear(self, hub: str, told: Handover, now: float) -> None:
        if self._question is None:
            return
        whom, asked = self._question
        about = whom, asked.stage | 1, asked.number, asked.round, asked.part
        if about == (hub, told.stage, told.number, told.round, told.part):
            self._question = None
            self._go_on(told, now)

    def _listened(self, effects: list[Effect], now: float) -> list[Effect]:
        """What is to be done, without answers of this hub to itself: these are heard."""
        found = []
        for effect in effects:
            told = effect.message if isinstance(effect, Send) and effect.to == OWN else None
            if isinstance(told, Handover):
                self._hear("", told, now)
            else:
                found.append(effect)
        return found

    def _drain(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._said:
            said, self._said = self._said, []
            effects += self._listened(said, now)
        return effects


class LeadPart(AskingPart):
    """The part of the hub that all members join. `address`: its own, where the job says it; `rows`:
    the other hubs as the job begins."""

    leads = True

    def __init__(self, connect: Connect, address: str = "", rows: Sequence[Row] = ()) -> None:
        super().__init__(connect)
        self.settled = replace(self.settled, rows=tuple(rows))
        self._address = address
        self._newest = 0
        """Number of the newest map, pending or not."""
        self._order: Order | None = None

    # -- what happens ---------------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        """A member that comes, or comes back, is told first where the other hubs are."""
        effects = super().handle(sender, message, now, go_on)
        if isinstance(message, Join | Resume):
            return [*(Send(sender, map) for map in self._maps()), *effects]
        return effects

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        if self._script is None and self.pending is not None and self.hub.started:
            self._begin(self._moving(self.pending), now)  # it was restored
        return super().tick(now, go_on)

    def obey(self, order: Order, now: float, go_on: GoOn) -> list[Effect]:
        match order.words:
            case ("hubs",):
                order.answer({"hubs": self.table()})
            case ("hubs", "add" | "remove" as verb, str() as address):
                if why := self._why_not_now():
                    order.refuse(why, "try it again later")
                    return []
                self._order = order
                script = self._adding if verb == "add" else self._removing
                self._begin(script(address), now)
            case _:
                return go_on()
        return self._drain(now)

    def table(self) -> list[dict[str, Any]]:
        """Each hub: address ("": the lead), ranges [first, end), bytes of the vector."""
        own, elements = self.hub.terms.stretch, self.hub.membership.model.elements
        rows: list[Row] = [("", "", own.first, own.end), *self.settled.rows]
        return [
            {
                "address": address, "leads": not number, "first": first, "end": end,
                "bytes": 4 * replace(own, first=first, end=end).size(elements) if elements else 0,
            }
            for number, (address, _, first, end) in enumerate(rows)
        ]  # fmt: skip

    # -- orders --------------------------------------------------------------------------------

    def _why_not_now(self) -> str:
        if self._script is not None or self.pending is not None:
            return "ranges are moving already"
        if self.hub.steering.stands:
            return "people have paused or ended the job"
        if not self.hub.started:
            return "training has not begun: hub.hubs in the job says which hubs begin"
        if self.hub.finished:
            return "the job is over"
        return ""

    def _adding(self, address: str) -> Script:
        rows, count = self.settled.rows, self.hub.terms.stretch.count
        if address in [*(row[0] for row in rows), self._address]:
            return self._refuse(f"{address} is a hub of this job already")
        own = self.hub.terms.stretch
        spans: list[Row] = [("", "", own.first, own.end), *rows]
        giver, _, first, end = max(spans, key=lambda row: row[3] - row[2])
        if end - first < 2:
            return self._refuse(
                f"{len(spans)} hubs share {count} ranges, and each hub needs one",
                f"begin a job with strategy.ranges = {len(spans) + 1} or more",
            )
        middle = (first + end + 1) // 2
        try:
            key = self._way_to(address)
        except EdgetrainError as error:
            return self._refuse(f"{address}: {error.message}", error.hint)
        told = yield address, self._shift(0, 0, agreed=self.shared_terms())
        if told.why:
            return self._refuse(f"{address}: {told.why}", "edgetrain hub JOB --spare serves one")
        if told.first < told.end:
            return self._refuse(
                f"{address} has ranges already", "add a hub that was started with --spare"
            )
        after = [(at, shown, low, middle if at == giver else high) for at, shown, low, high in rows]
        after = sorted([*after, (address, key, middle, end)], key=lambda row: row[2])
        yield from self._moving(self._plan(after, giver, address))

    def _removing(self, address: str) -> Script:
        rows = self.settled.rows
        if address in ("", self._address):
            return self._refuse("the lead cannot be removed", "members join the job there")
        if address not in [row[0] for row in rows]:
            known = ", ".join(row[0] for row in rows) or "none"
            return self._refuse(f"{address} is no hub of this job", f"beside the lead: {known}")
        own = self.hub.terms.stretch
        at = [row[0] for row in rows].index(address)
        # The one before it: so both together are a stretch. There is one, the lead at least.
        taker, _, first, _ = rows[at - 1] if at else ("", "", own.first, own.end)
        end = rows[at][3]
        for hub in (address, taker):
            if not hub:
                continue
            try:
                self._way_to(hub)
            except EdgetrainError as error:
                return self._refuse(f"{hub}: {error.message}", error.hint)
            told = yield hub, self._shift(0, 0, agreed=self.shared_terms())
            if told.why:
                return self._refuse(f"{hub}: {told.why}", "start it again with --resume")
        after = [
            (at, key, first if at == taker else low, end if at == taker else high)
            for at, key, low, high in rows
            if at != address
        ]
        yield from self._moving(self._plan(after, address, taker))

    def _refuse(self, why: str, way_out: str = "") -> None:
        if self._order is not None:
            self._order.refuse(why, way_out)
        self._order = None

    def _plan(self, rows: Sequence[Row], giver: str, taker: str) -> Sharing:
        """Journal a move, and tell members before they can contribute to its round."""
        self._newest = number = max(self._newest, self.settled.number) + 1
        pending = Sharing(
            number, self.hub.round + self.hub.rounds.slack + 2, True, self.settled.first,
            self.settled.end, self.settled.since, tuple(rows), giver, taker, leads=True,
        )  # fmt: skip
        self.pending = pending
        self._said += [Write(pending), *self._to_all(self._map(pending))]
        return pending

    # -- moving --------------------------------------------------------------------------------

    def _moving(self, move: Sharing) -> Script:
        for _ in range(TRIES):
            taken = yield from self._try(move)
            if not taken.why:
                break
            for hub in (move.giver, move.taker):
                yield hub, self._shift(10, move.number)
            self._said.append(Note("map", "hub", f"ranges stay for now: {taken.why}"))
            move = self._plan(move.rows, move.giver, move.taker)
        else:
            yield from self._give_up(move, taken.why)
            return
        first, end = _span_of(move, move.giver, self.hub.terms.stretch)
        yield move.giver, self._shift(8, move.number, move.round, first, end)
        own = self.hub.terms.stretch
        since = self.settled.since
        self.settled = Sharing(move.number, move.round, False, own.first, own.end, since, move.rows)
        self.pending = None
        self._said += [Write(self.settled), *self._to_all(self._map(self.settled))]
        table = "; ".join(
            f"{row['address'] or 'this hub'} ranges {row['first']} to {row['end']}"
            for row in self.table()
        )
        self._said.append(Note("map", "hub", f"from round {move.round} on: {table}"))
        if self._order is not None:
            self._order.answer({"hubs": self.table(), "round": move.round})
        self._order = None

    def _try(self, move: Sharing) -> Generator[tuple[str, Handover], Handover, Handover]:
        """Let taker and giver hold, and hand the ranges over. Returns the taker's last answer."""
        number, round = move.number, move.round
        own = self.hub.terms.stretch
        held = yield move.taker, self._shift(2, number, round)
        yield move.giver, self._shift(2, number, round)
        into = _span_of(move, move.taker, own)
        if (held.first, held.end) == into:  # it has taken them, before this hub was restored
            return held
        before = self._span_before(move.giver)
        kept = _span_of(move, move.giver, own)
        span = (kept[1] if kept[0] < kept[1] else before[0], before[1])
        part, parts = 0, 1
        while part < parts:
            given = yield move.giver, self._shift(4, number, round, *span, part)
            parts = given.parts
            asked = self._shift(6, number, round, *into, part)
            taken = yield move.taker, replace(asked, parts=parts, payload=given.payload)
            if taken.why:
                break
            part += 1
        return taken

    def _span_before(self, hub: str) -> tuple[int, int]:
        own = self.settled
        spans = {row[0]: (row[2], row[3]) for row in own.rows}
        return spans[hub] if hub else (own.first, own.end)

    def _give_up(self, move: Sharing, why: str) -> Script:
        for hub in (move.giver, move.taker):
            if hub:
                yield hub, self._shift(10, move.number)
        self.pending = None
        self.settled = replace(self.settled, number=move.number)
        self._said += [Write(self.settled), *self._to_all(self._map(self.settled))]
        self._refuse(f"ranges cannot move: {why}", "try it again later")

    def _shift(
        self,
        stage: int,
        number: int,
        round: int = 0,
        first: int = 0,
        end: int = 0,
        part: int = 0,
        agreed: str = "",
    ) -> Handover:
        return Handover(PROTOCOL, stage, number, round, first, end, part, agreed=agreed)

    # -- maps ----------------------------------------------------------------------------------

    def _maps(self) -> list[Map]:
        maps = [self._map(self.settled)] if self.settled.rows or self.settled.number else []
        return maps if self.pending is None else [*maps, self._map(self.pending)]

    def _map(self, known: Sharing) -> Map:
        own = self.hub.terms.stretch
        rows = tuple(("", address, key, first, end) for address, key, first, end in known.rows)
        return Map(known.number, known.pending, 0, "", own.first, own.end, rows, known.round)

    def _to_all(self, map: Map) -> list[Effect]:
        return [Send(member.sender, map) for member in self.hub.members]

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        super().restore(state, now, go_on, records)
        self._newest = 0 if self.pending is None else self.pending.number


def _span_of(move: Sharing, hub: str, own: Stretch) -> tuple[int, int]:
    """The ranges of a hub once the move is done; (0, 0): it has none. `own`: the lead's now."""
    if not hub:
        return own.first, min((row[2] for row in move.rows), default=own.count)
    return next(((low, high) for at, _, low, high in move.rows if at == hub), (0, 0))
