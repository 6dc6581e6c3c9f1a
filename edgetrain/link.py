"""A member's half of the protocol: joining, handing contributions over, waiting for replies.

It speaks messages over a transport and knows codecs; it knows no model and no strategy. The clock
is passed in. One thread uses it; only `join` and `replies` wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgetrain import codecs
from edgetrain import layout as layouts
from edgetrain.buffers import Vectors
from edgetrain.checksum import Vector
from edgetrain.codecs import Codec, Feedback
from edgetrain.codecs.base import check_length
from edgetrain.errors import BadMessage, Diverged, HubUnreachable, Refused
from edgetrain.hub import base_parts, parts_of
from edgetrain.messages import (
    PROTOCOL,
    Base,
    Beat,
    Buffer,
    Contribute,
    Join,
    Leave,
    Message,
    Refuse,
    Reply,
    Start,
    Welcome,
    pack,
    unpack,
)
from edgetrain.transport import MemberTransport

log = logging.getLogger("edgetrain")

SILENT_BEATS = 20
"""Beats of silence after which a hub that does not answer counts as lost (at least 20 s)."""


@dataclass(frozen=True)
class Request:
    """What a member says of itself when it joins."""

    model: str
    name: str = ""
    weight: float = 1.0
    job: str = ""
    layout: bytes = b""
    """What `model` is the digest of; without it no codec that looks at tensors can be used."""


@dataclass
class _Arrival:
    """The parts of one round's reply so far. Where decoding does not make it larger it is decoded
    as it arrives, into `vector`: the transport's buffer is free for the next part at once."""

    head: Reply
    vector: Vector | None
    at: float = 0.0
    parts: int = 0
    payloads: list[Buffer] = field(default_factory=list)


@dataclass(frozen=True)
class Merged:
    """A whole reply, decoded, and what the hub said with it."""

    round: int
    members: int
    delay: int
    checksum: int
    arrived: float
    """When its last part was taken in, by the link's clock."""
    pieces: Sequence[Vector]
    """Consecutive pieces of the vector."""


class Link:
    """The connection of one member to its hub.

    `params` (float32 [elements]) is read when the hub asks for a base to start from and overwritten
    when the hub sends one; it is not kept.
    """

    def __init__(
        self, transport: MemberTransport, clock: Callable[[], float], patience_s: float = 30.0
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._silence_s = patience_s
        self._heard = clock()
        self._received = 0
        self._arrivals: dict[int, _Arrival] = {}
        self._elements = 0
        self._submitted = -1
        self._members = 1
        self.codec: Codec = codecs.Dense()
        self.reply_codec: Codec = codecs.Dense()
        self._feedback: Feedback | None = None
        self.memory = Vectors(0)
        """Where replies are put, once it has joined. Contributions made in it need no more than
        that: what has been sent is free when the reply comes."""

    def join(self, request: Request, params: Vector, checksum: int) -> tuple[Welcome, Start]:
        """Ask to be let in and wait for the start, however long the others take.

        Afterwards `params` is the base. Raises Refused, HubUnreachable.
        """
        self._elements = params.size
        self._send(
            Join(
                protocol=PROTOCOL,
                job=request.job,
                model=request.model,
                elements=params.size,
                name=request.name,
                weight=float(request.weight),
                checksum=checksum,
                payload=request.layout,
            )
        )
        welcome: Welcome | None = None
        parts = list(base_parts(params.size))
        while True:
            match self._next():
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
                case Start() as start if welcome is not None:
                    return welcome, start
                case Beat():
                    pass
                case other:
                    raise BadMessage(f"the hub sent {type(other).__name__} before the start")

    def _settle(self, welcome: Welcome, request: Request) -> None:
        layout = layouts.read(request.layout, self._elements) if request.layout else ()
        self.codec = codecs.bound(codecs.parse(welcome.codec), layout)
        self.reply_codec = codecs.bound(codecs.parse(welcome.reply_codec), layout)
        self._feedback = None
        self._members = welcome.members
        self.memory = Vectors(self._elements)
        self._silence_s = max(20.0, SILENT_BEATS * welcome.beat_s)
        log.info(
            "joined as %s; %s, every %d, %d members",
            welcome.name, welcome.strategy, welcome.every, welcome.members,
        )  # fmt: skip

    def factors(self) -> codecs.PowerSGD | None:
        """What makes the contributions of a job whose codec sends them in two trips; else None."""
        return self.codec.factors() if isinstance(self.codec, codecs.BoundTwoTrips) else None

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
        self._submitted = round
        payloads, read = self._encoded(contribution, rest_later)
        for part, payload in enumerate(payloads):
            self._send(
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
            )
        return read

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
        read = self.memory.take()
        parts = parts_of(self._elements, self.codec.part_elements)
        for here, payload in zip(parts, payloads, strict=True):
            self.codec.decode(payload, read[here])
        return payloads, read

    def wait(self, round: int) -> Merged:
        """The reply of a round, waiting for it if it is not here yet.

        Raises HubUnreachable after a silence, Refused when the hub says no, BadPayload.
        """
        parts = -(-self._elements // self.reply_codec.part_elements)
        while (arrival := self._arrivals.get(round)) is None or arrival.parts < parts:
            self._take(self._next())
        del self._arrivals[round]
        head = arrival.head
        pieces = self._decoded(arrival)
        return Merged(round, head.members, head.delay, head.checksum, arrival.at, pieces)

    def poll(self) -> None:
        """Take in what has arrived, without waiting: replies are timed by when they are taken.

        Raises what `wait` does, but for the silence.
        """
        while (frames := self._transport.receive(0.0)) is not None:
            self._take(self._read(frames))

    def _take(self, message: Message) -> None:
        if isinstance(message, Beat):
            return
        if not isinstance(message, Reply):
            raise BadMessage(f"the hub sent {type(message).__name__} during training")
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

    def _place_for(self, round: int) -> Vector | None:
        """Where to decode a reply's parts as they arrive; None: keep the payloads until the last.

        That is for payloads that are small, and for a socket that still holds the contribution of a
        synchronous round: its memory and a new vector would be more than the payloads take.
        """
        if not self.reply_codec.lossless:
            return None
        return self.memory.take_spare() if round == self._submitted else self.memory.take()

    def _decoded(self, arrival: _Arrival) -> list[Vector]:
        """All pieces, before any is used: a bad part must leave the member unchanged."""
        if arrival.vector is not None:
            return [arrival.vector]
        parts = list(parts_of(self._elements, self.reply_codec.part_elements))
        if isinstance(self.reply_codec, codecs.Dense):
            for here, payload in zip(parts, arrival.payloads, strict=True):
                check_length("fp32", memoryview(payload).nbytes, 4 * (here.stop - here.start))
            return [np.frombuffer(payload, np.float32) for payload in arrival.payloads]
        vector = self.memory.take()
        for here, payload in zip(parts, arrival.payloads, strict=True):
            self.reply_codec.decode(payload, vector[here])
        return [vector]

    def leave(self, reason: str) -> None:
        """Say that this member is done, and let go. Works twice, and with no hub there."""
        self._send(Leave(reason))
        self._transport.close()

    def _send(self, message: Message) -> None:
        self._transport.send(pack(message))

    def _next(self) -> Message:
        """The next message; a refusal and a silence are raised."""
        while (frames := self._transport.receive(1.0)) is None:
            received = self._transport.received_bytes()
            if received != self._received:  # on a slow link one frame can take minutes
                self._received, self._heard = received, self._clock()
            silent_s = self._clock() - self._heard
            if silent_s > self._silence_s:
                raise HubUnreachable(
                    f"the hub has been silent for {silent_s:.0f} s",
                    "is it running, and does it run the same edgetrain?",
                )
        return self._read(frames)

    def _read(self, frames: Sequence[Buffer]) -> Message:
        self._heard = self._clock()
        message = unpack(frames)
        if isinstance(message, Refuse):
            if message.code == "diverged":
                raise Diverged(message.reason, "stop this run: its replicas are not equal")
            raise Refused(message.code, f"the hub refused: {message.code}: {message.reason}")
        return message
