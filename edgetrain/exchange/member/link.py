"""A member's half of the protocol: joining, handing contributions over, waiting for replies; and
coming back when the connection or the hub was lost.

It speaks messages over a transport and knows codecs; it knows no model and no strategy. The clock
is passed in. One thread uses it; only `join` and `replies` wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from edgetrain import codecs
from edgetrain.codecs import Codec, Feedback
from edgetrain.codecs.base import check_length
from edgetrain.errors import BadMessage, ConfigError, Diverged, HubUnreachable, Refused
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Beat,
    Contribute,
    Join,
    KeyList,
    Leave,
    Masking,
    Message,
    Refuse,
    Rekey,
    Reply,
    Resume,
    Shares,
    Start,
    Unmask,
    Welcome,
    pack,
    unpack,
)
from edgetrain.exchange.seam import CatchUp, Past, Request, RoundReply
from edgetrain.exchange.transport import MemberTransport, Reconnecting
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.parts import base_parts, parts_of
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector

if TYPE_CHECKING:
    from edgetrain.exchange.masks.masker import Masker

log = logging.getLogger("edgetrain")

SILENT_BEATS = 20
"""Beats of silence after which a hub that does not answer counts as lost (at least 20 s), over a
transport that cannot connect again."""

QUIET_BEATS = 4
"""Beats of silence, and round trips, after which the connection is made anew; then twice as many,
and so on."""

LONGEST_PAUSE_S = 60.0
"""Between two attempts to connect again."""

OUTAGE_S = 600.0
"""A hub that members trained with may be away for so long."""


@dataclass
class _Arrival:
    """The parts of one round's reply so far. Where decoding does not make it larger it is decoded
    as it arrives, into `vector`: the transport's buffer is free for the next part at once."""

    head: Reply
    vector: Vector | None
    at: float = 0.0
    parts: int = 0
    payloads: list[Buffer] = field(default_factory=list)


def _new_session() -> int:
    # Its highest bit makes all of one length on the wire, and none of them 0.
    return int.from_bytes(os.urandom(8), "little") | 1 << 63


@dataclass(frozen=True)
class _Pending:
    """A contribution that waits for its masks."""

    vector: Vector
    weight: float
    head: Contribute
    """What is to be said with it; its payload is empty."""


class Link:
    """The connection of one member to its hub.

    `params` (float32 [elements]) is read when the hub asks for a base to start from and overwritten
    when the hub sends one; it is not kept. `interrupt` is called at least once a second wherever
    this link waits, between two messages; what it raises ends the wait.
    """

    def __init__(
        self,
        transport: MemberTransport,
        clock: Callable[[], float],
        patience_s: float = 30.0,
        outage_s: float = OUTAGE_S,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._interrupt = interrupt
        # Asked once: what a Protocol holds is found out slowly, and steps are many.
        self._renewable = transport if isinstance(transport, Reconnecting) else None
        self._clock = clock
        self._silence_s = patience_s
        self._outage_s = outage_s
        self._heard = self._asked_at = clock()
        self._beat_s = patience_s / (2 * QUIET_BEATS)
        self._pauses = 0
        self._asked_again = False
        """A Join was sent twice, and may be answered twice."""
        self._request = Request("")
        self.session = 0
        """What this member proves by that it is the same, when it comes back."""
        self._name = ""
        self._epoch = self._asked_epoch = self._attempt = 0
        self._returning = False
        self._kept: dict[int, list[Contribute]] = {}
        self._masker: Masker | None = None
        self._pending: dict[int, _Pending] = {}
        self._told_of_cut = False
        self._next_round = self._applied = self._checksum = 0
        self._parts: list[Buffer] = []
        self._catch_up: CatchUp | None = None
        self._received = self._connections = self._asked_on = 0
        self._arrivals: dict[int, _Arrival] = {}
        self._elements = 0
        self._submitted = -1
        self._members = 1
        self.codec: Codec = codecs.Dense()
        self.reply_codec: Codec = codecs.Dense()
        self._feedback: Feedback | None = None
        self._factors: codecs.PowerSGD | None = None
        self._given = 0
        """The hub has what this member gave to rounds before this one, in a life before this."""
        self.memory = VectorPool(0)
        """Where replies are put, once it has joined. Contributions made in it need no more than
        that: what has been sent is free when the reply comes."""

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> tuple[Welcome, Start]:
        """Ask to be let in and wait for the start, however long the others take.

        Afterwards `params` is the base. With a `past` this member goes on where it was, and where
        it has its base `params` are not touched; Refused with the code "session" means that the hub
        does not know it (any more). Raises Refused, HubUnreachable.
        """
        self._elements, self._request = params.size, request
        self.session = _new_session() if past is None else past.session
        hello = self._join_message(request, checksum) if past is None else self._return_of(past)

        def ask_again() -> None:
            nonlocal hello
            self._asked_again = True
            if past is not None:
                hello = self._return_of(past)
            self._send(hello)

        self._send(hello)
        welcome: Welcome | None = None
        parts = list(base_parts(params.size))
        while True:
            match self._next(ask_again):
                case Welcome() as welcome:
                    self._settle(welcome, request)
                    if welcome.upload:
                        self._upload(params)
                case Base() as base if base.part < len(parts):
                    here = parts[base.part]
                    received = np.frombuffer(base.payload, np.float32)
                    if received.size != here.stop - here.start:
                        raise BadMessage(f"base part {base.part} has {received.size} elements")
                    params[here] = received
                case Start() as start if past is not None and start.attempt != self._attempt:
                    pass  # the answer to what was asked before
                case Start() as start if welcome is not None:
                    self._applied, self._checksum = start.applied, start.checksum
                    self._next_round, self._given = start.round, start.resend
                    return welcome, start
                case Reply() if past is not None:
                    pass  # it comes again, behind the answer to what was asked last
                case Beat() as beat:
                    if welcome is not None and beat.epoch != welcome.epoch:
                        welcome = None  # the hub has restarted, and knows nothing of it
                        ask_again()
                case Refuse(code="unknown") if welcome is not None:
                    welcome = None
                    ask_again()
                case Refuse(code="unknown") if self._asked_again:
                    pass  # more of what was meant for the hub before
                case Refuse() as refuse:
                    self._raise(refuse)
                case other:
                    raise BadMessage(f"the hub sent {type(other).__name__} before the start")

    def _return_of(self, past: Past) -> Resume:
        self._attempt += 1
        return Resume(
            protocol=PROTOCOL,
            model=self._request.model,
            elements=self._elements,
            name=past.name,
            session=past.session,
            applied=past.applied,
            checksum=past.checksum if past.applied else 0,
            submitted=past.round,
            oldest=past.round,
            attempt=self._attempt,
            lacks_base=not past.has_base,
        )

    def _join_message(self, request: Request, checksum: int) -> Join:
        return Join(
            protocol=PROTOCOL,
            job=request.job,
            model=request.model,
            elements=self._elements,
            name=request.name,
            weight=float(request.weight),
            checksum=checksum,
            session=self.session,
            payload=request.layout,
        )

    def _settle(self, welcome: Welcome, request: Request) -> None:
        layout = layouts.read(request.layout, self._elements) if request.layout else ()
        self.codec = codecs.bound(codecs.parse(welcome.codec), layout)
        self.reply_codec = codecs.bound(codecs.parse(welcome.reply_codec), layout)
        self._feedback = None
        self._members = welcome.members
        self.memory = VectorPool(self._elements)
        self._masker = _masker_of(welcome, request, self._elements)
        self._name, self._epoch, self._beat_s = welcome.name, welcome.epoch, welcome.beat_s
        self._silence_s = max(20.0, SILENT_BEATS * welcome.beat_s)
        if self._renewable is not None:
            self._silence_s = max(self._silence_s, self._outage_s)
        log.info(
            "joined as %s; %s, every %d, %d members",
            welcome.name, welcome.strategy, welcome.every, welcome.members,
        )  # fmt: skip

    def factors(self) -> codecs.PowerSGD | None:
        """What makes the contributions of a job whose codec sends them in two trips; else None."""
        two_trips = self.codec if isinstance(self.codec, codecs.BoundTwoTrips) else None
        self._factors = None if two_trips is None else two_trips.factors()
        return self._factors

    def unsent(self) -> dict[str, Vector]:
        """What lossy contributions have left out and this link still has to send, for a checkpoint:
        its own arrays, to be written before the next `submit`."""
        state = self._factors or self._feedback
        return {} if state is None else state.state()

    def take_up(self, unsent: Mapping[str, Vector]) -> None:
        """Go on with what `unsent` gave. ConfigError where it is another codec's."""
        if not unsent:
            return
        if self._factors is not None:
            self._factors.restore(unsent)
            return
        self._feedback = codecs.memory(self.codec, self._elements, self._members)
        self._feedback.restore(unsent)

    def _upload(self, params: Vector) -> None:
        snapshot = params.copy()
        parts = list(base_parts(params.size))
        for part, here in enumerate(parts):
            self._send(Base(part, len(parts), snapshot[here].data.cast("B")))

    def submit(
        self,
        round: int,
        contribution: Vector,
        *,
        weight: float,
        applied: int,
        checksum: int,
        wanted_delay: int,
        rest_later: bool = True,
    ) -> Vector | None:
        """Encode and send a contribution; returns at once. The vector must not change
        afterwards.

        What a lossy codec leaves out goes with a later contribution (`rest_later`); or it is the
        caller's, who gets what the others will read. None: they read all of it, some day.
        """
        self._submitted, self._next_round = round, round + 1
        self._applied, self._checksum = applied, checksum
        if self._masker is not None:
            head = Contribute(round, 0, 1, weight, applied, checksum, wanted_delay, b"")
            self._pending[round] = _Pending(contribution, weight, head)
            self._send_masked(self._masker)
            return None
        payloads, read = self._encoded(contribution, rest_later)
        self._kept[round] = [
            Contribute(
                round=round,
                part=part,
                parts=len(payloads),
                weight=weight,
                applied=applied,
                checksum=checksum,
                wanted_delay=wanted_delay,
                payload=payload,
            )
            for part, payload in enumerate(payloads)
        ]
        # Coming back, all that is kept is sent once the hub has answered.
        if not self._returning and round >= self._given:
            for message in self._kept[round]:
                self._send(message)
        return read

    def _send_masked(self, masker: Masker) -> None:
        """Mask and send what waits for it, in round order, as far as there are masks."""
        from edgetrain.exchange.masks.masker import parts

        for round in sorted(self._pending):
            state = masker.state(round)
            if self._returning or state == "soon":
                return
            waiting = self._pending.pop(round)
            if state == "out":
                log.info("%s has no part in round %d: its keys came too late", self._name, round)
                continue
            masked = self.memory.borrow_vector().view(np.uint32)
            masker.mask(round, waiting.vector, waiting.weight, masked)
            if masker.cut and not self._told_of_cut:
                self._told_of_cut = True
                log.warning(
                    "%s: contributions have elements beyond the range of strategy.span, which are "
                    "cut: raise it, or clip gradients", self._name,
                )  # fmt: skip
            payloads = parts(masked, self.codec.part_elements)
            self._kept[round] = [
                replace(waiting.head, part=part, parts=len(payloads), payload=payload)
                for part, payload in enumerate(payloads)
            ]
            for message in self._kept[round]:
                self._send(message)

    def _take_masking(self, masker: Masker, message: Masking) -> None:
        answer = masker.take(message)
        if answer is not None and not self._returning:
            self._send(answer)
        self._send_masked(masker)

    def _mind_epoch(self, epoch: int) -> bool:
        """Whether the hub was restored: what was masked for the one before can be unmasked by
        nobody, and is given up."""
        if self._masker is None or epoch <= self._masker.epoch:
            return False
        self._masker.restart(epoch)
        self._kept = {}
        return True

    def _encoded(
        self, contribution: Vector, rest_later: bool
    ) -> tuple[list[Buffer], Vector | None]:
        """The payloads, and what they decode to where someone wants to know."""
        if rest_later and not self.codec.lossless:
            if self._feedback is None:
                self._feedback = codecs.memory(self.codec, self._elements, self._members)
            return self._feedback.encode(contribution), None
        payloads = self.codec.encode(contribution)
        if self.codec.lossless:
            return payloads, None
        read = self.memory.borrow_vector()
        parts = parts_of(self._elements, self.codec.part_elements)
        for here, payload in zip(parts, payloads, strict=True):
            self.codec.decode(payload, read[here])
        return payloads, read

    def wait(self, round: int) -> RoundReply | CatchUp:
        """The reply of a round, waiting for it if it is not here yet; or what to do instead of
        applying it. A hub that is away is waited for.

        Raises HubUnreachable when it has been for too long, Refused when it says no, BadPayload.
        """
        parts = -(-self._elements // self.reply_codec.part_elements)
        while (arrival := self._arrivals.get(round)) is None or arrival.parts < parts:
            if self._catch_up is not None:
                found, self._catch_up = self._catch_up, None
                return found
            self._take(self._next(self._again))
        del self._arrivals[round]
        head = arrival.head
        self._applied, self._checksum = round + 1, head.checksum
        pieces = self._decoded(arrival)
        return RoundReply(round, head.members, head.delay, head.checksum, arrival.at, pieces)

    def poll(self) -> None:
        """Take in what has arrived, without waiting: replies are timed by when they are taken.

        Raises what `wait` does, but for the silence.
        """
        while (frames := self._transport.receive(0.0)) is not None:
            self._mind_connection(self._again)
            self._take(self._read(frames))
        if self._renewable is not None:
            self._mind_connection(self._again)
            self._mind_silence(self._again)

    def _again(self) -> None:
        self._come_back(self._epoch)

    def _take(self, message: Message) -> None:
        match message:
            case Beat():
                for round in [r for r in self._kept if r < message.merged]:
                    del self._kept[round]
                asked = self._returning and (
                    message.epoch == self._asked_epoch or 0 < self._asked_on == self._connections
                )
                if message.epoch != self._epoch and not asked:
                    self._come_back(message.epoch)
            case Refuse(code="unknown"):
                if not self._returning:
                    self._come_back(self._epoch)
            case Refuse():
                self._raise(message)
            case Reply():
                if not self._returning:
                    self._take_reply(message)
            case Welcome() if self._attempt:
                self._epoch = message.epoch if self._returning else self._epoch
                if self._mind_epoch(message.epoch):
                    self._come_back(message.epoch)
            case Rekey() | KeyList() | Shares() | Unmask() if self._masker is not None:
                self._take_masking(self._masker, message)
            case Base() if self._attempt:
                self._parts.append(message.payload)
            case Start() if self._attempt:
                if self._returning and message.attempt == self._attempt:
                    self._back(message)
                self._parts = []
            case Welcome() | Base() | Start() if not self._asked_again:
                raise BadMessage(f"the hub sent {type(message).__name__} during training")
            case Welcome() | Base() | Start():
                pass  # the answer to a Join that was sent again
            case _:
                raise BadMessage(f"the hub sent {type(message).__name__} during training")

    def _come_back(self, epoch: int) -> None:
        """Say where this member is; until the answer is here nothing else counts."""
        self._returning, self._asked_epoch, self._asked_on = True, epoch, self._connections
        self._mind_epoch(epoch)
        self._attempt += 1
        self._asked_at = self._clock()
        self._arrivals, self._parts = {}, []
        log.info("%s comes back after %d replies", self._name, self._applied)
        self._send(
            Resume(
                protocol=PROTOCOL,
                model=self._request.model,
                elements=self._elements,
                name=self._name,
                session=self.session,
                applied=self._applied,
                checksum=self._checksum if self._applied else 0,
                submitted=self._next_round,
                oldest=min((*self._kept, *self._pending), default=self._next_round),
                attempt=self._attempt,
            )
        )

    def _back(self, start: Start) -> None:
        """The hub knows this member again: send what it lacks, and note what has changed."""
        self._returning = False
        for round in sorted(self._kept):
            if round >= start.resend:
                for message in self._kept[round]:
                    self._send(message)
        base = None
        if not start.keep:
            base = self._whole_base()
            self._applied, self._checksum = start.applied, start.checksum
            if self._masker is not None:
                self._kept = {r: kept for r, kept in self._kept.items() if r >= start.applied}
                self._pending = {r: p for r, p in self._pending.items() if r >= start.applied}
        if base is not None or start.round > self._next_round:
            self._next_round = max(self._next_round, start.round)
            self._catch_up = CatchUp(start.round, start.delay, start.applied, start.checksum, base)
        if self._masker is not None:
            self._send_masked(self._masker)

    def _whole_base(self) -> Vector:
        here = list(base_parts(self._elements))
        sizes = [memoryview(part).nbytes for part in self._parts]
        if sizes != [4 * (part.stop - part.start) for part in here]:
            raise BadMessage(f"a base of {sizes} bytes for {self._elements} elements")
        base = self.memory.borrow_vector()
        for where, part in zip(here, self._parts, strict=True):
            base[where] = np.frombuffer(part, np.float32)
        return base

    def _take_reply(self, message: Reply) -> None:
        if self._renewable is not None and self._something_lost(message):
            self._again()
            return
        if message.settled:  # else it may still be on its way: kept until the hub has it
            self._kept.pop(message.round, None)  # and its memory is free for the reply
        if self._masker is not None:
            self._pending.pop(message.round, None)
            self._masker.forget(message.round + 1)
        arrival = self._arrivals.get(message.round)
        if arrival is None:
            arrival = _Arrival(message, self._place_for(message.round))
            self._arrivals[message.round] = arrival
        parts = list(parts_of(self._elements, self.reply_codec.part_elements))
        if message.parts != len(parts) or message.part != arrival.parts:
            raise BadMessage(f"part {message.part} of {message.parts} of a reply is out of order")
        if arrival.vector is None:
            arrival.payloads.append(message.payload)
        else:
            self.reply_codec.decode(message.payload, arrival.vector[parts[message.part]])
        arrival.parts += 1
        arrival.at = self._heard

    def _something_lost(self, message: Reply) -> bool:
        """Whether what should have come before it has not: the connection broke meanwhile."""
        newest = max(self._arrivals, default=self._applied - 1)
        if newest not in self._arrivals:
            return message.round > newest + 1 or (message.round > newest and message.part > 0)
        here = self._arrivals[newest]
        if message.round == newest:
            return message.part > here.parts
        if message.round > newest:
            return here.parts < here.head.parts or message.round > newest + 1 or message.part > 0
        return False

    def _place_for(self, round: int) -> Vector | None:
        """Where to decode a reply's parts as they arrive; None: keep the payloads until the last.

        That is for payloads that are small, and for a socket that still holds the contribution of a
        synchronous round: its memory and a new vector would be more than the payloads take.
        """
        if not self.reply_codec.lossless:
            return None
        return (
            self.memory.borrow_spare() if round == self._submitted else self.memory.borrow_vector()
        )

    def _decoded(self, arrival: _Arrival) -> list[Vector]:
        """All pieces, before any is used: a bad part must leave the member unchanged."""
        if arrival.vector is not None:
            return [arrival.vector]
        parts = list(parts_of(self._elements, self.reply_codec.part_elements))
        if isinstance(self.reply_codec, codecs.Dense):
            for here, payload in zip(parts, arrival.payloads, strict=True):
                check_length("fp32", memoryview(payload).nbytes, 4 * (here.stop - here.start))
            return [np.frombuffer(payload, np.float32) for payload in arrival.payloads]
        vector = self.memory.borrow_vector()
        for here, payload in zip(parts, arrival.payloads, strict=True):
            self.reply_codec.decode(payload, vector[here])
        return [vector]

    def leave(self, reason: str) -> None:
        """Say that this member is done, and let go. Works twice, and with no hub there."""
        self._send(Leave(reason))
        self._transport.close()

    def vanish(self) -> None:
        """Let go without a word: the hub keeps this member's place in the rounds for a while."""
        self._transport.close()

    def _send(self, message: Message) -> None:
        self._transport.send(pack(message))

    def _next(self, ask_again: Callable[[], None]) -> Message:
        """The next message. After a while of silence the connection is made anew, and the hub is
        asked again; after a long one HubUnreachable is raised."""
        self._interrupt()
        while (frames := self._transport.receive(min(1.0, 2 * self._beat_s))) is None:
            self._interrupt()
            self._mind_connection(ask_again)
            self._mind_silence(ask_again)
            silent_s = self._clock() - self._heard
            if silent_s > self._silence_s:
                raise HubUnreachable(
                    f"the hub has been silent for {silent_s:.0f} s",
                    "is it running, and does it run the same edgetrain?",
                )
        self._mind_connection(ask_again)
        return self._read(frames)

    def _mind_connection(self, ask_again: Callable[[], None]) -> None:
        """Over another connection than before, ask again: who knows what the old one took along.
        Two may have stood since the last look: only the first of all took nothing."""
        if self._renewable is None or self._renewable.connections == self._connections:
            return
        before, self._connections = self._connections, self._renewable.connections
        if before or self._connections > 1:
            self._asked_at = self._clock()
            ask_again()

    def _mind_silence(self, ask_again: Callable[[], None]) -> None:
        received, now = self._transport.received_bytes(), self._clock()
        if received != self._received:  # on a slow link one frame can take minutes
            self._received, self._heard, self._pauses = received, now, 0
        if self._renewable is None:
            return
        patience_s = QUIET_BEATS * (self._beat_s + self._renewable.traffic().round_trip_s)
        patience_s = min(patience_s * 2**self._pauses, LONGEST_PAUSE_S)
        if now - max(self._heard, self._asked_at) > patience_s:
            self._pauses += 1
            self._asked_at = now
            self._renewable.reconnect()
            self._connections = 0
            ask_again()

    def _read(self, frames: Sequence[Buffer]) -> Message:
        self._heard, self._pauses = self._clock(), 0
        return unpack(frames)

    def _raise(self, refuse: Refuse) -> NoReturn:
        if refuse.code == "diverged":
            raise Diverged(refuse.reason, "stop this run: its replicas are not equal")
        raise Refused(refuse.code, f"the hub refused: {refuse.code}: {refuse.reason}")


def _masker_of(welcome: Welcome, request: Request, elements: int) -> Masker | None:
    """What masks this member's contributions, if the hub says so; Refused where it has to and does
    not, or not as agreed."""
    agreed = MaskTerms(welcome.members, welcome.threshold, welcome.span)
    wanted = request.secure
    if isinstance(wanted, MaskTerms) and wanted != agreed:
        found = "not masked" if not welcome.threshold else f"masked with {agreed}"
        raise Refused(
            "masks", f"contributions to this hub are {found}, this job's are masked with {wanted}",
            "the hub has to run the same job file",
        )  # fmt: skip
    if wanted is True and 2 * welcome.threshold <= welcome.members:
        raise Refused(
            "masks",
            f"the hub's threshold is {welcome.threshold} of {welcome.members} members",
            "start it with strategy.secure=true, or join without secure",
        )
    if not welcome.threshold:
        return None
    if not np.isfinite(welcome.span) or welcome.threshold > welcome.members:
        raise ConfigError(f"the hub wants masks by {agreed}, which cannot be")
    from edgetrain.exchange.masks.terms import require

    require()
    from edgetrain.exchange.masks.masker import Masker

    masker = Masker(agreed, elements)
    masker.epoch = welcome.epoch
    return masker
