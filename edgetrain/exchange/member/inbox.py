"""The replies to a member's rounds, decoded part by part as they arrive. No transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.codecs.base import check_length
from edgetrain.errors import BadMessage
from edgetrain.exchange.messages import Reply
from edgetrain.exchange.seam import RoundReply
from edgetrain.vectors.parts import base_parts
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import Ranges
from edgetrain.vectors.vector import Buffer, Vector


@dataclass
class _Arrival:
    """The parts of one reply so far."""

    head: Reply
    vector: Vector | None
    """What parts are decoded into as they arrive, so that the transport's buffers are free for the
    next ones. None: the payloads are smaller, and are kept until all are there."""
    at: float = 0.0
    parts: int = 0
    payloads: list[Buffer] = field(default_factory=list)
    bytes: int = 0
    decode_s: float = 0.0


class Inbox:
    """Replies in the hub's `codec`, float32 of the elements of their rounds' ranges, put into
    vectors of `memory`.

    `decode_s` is the seconds of `clock` that decoding took so far.
    """

    def __init__(
        self,
        codec: Codec,
        ranges: Ranges,
        memory: VectorPool,
        clock: Callable[[], float],
        name: str = "",
    ) -> None:
        """`name`: the member's, where replies out of step say whose contributions they have; "":
        a reply has those to its own round."""
        self.codec = codec
        self.decode_s = 0.0
        self.rung: int | None = None
        """Density level of the last reply handed out, if the hub's codec is `auto`."""
        self.keeps_payloads = False
        """Whether replies are passed on as they came, and not decoded."""
        self.keeps_frames = False
        """Whether payloads that are the vector itself are handed out, in place of a copy: where the
        memory of a contribution is not free before its reply is given out."""
        self._clock, self._name = clock, name
        self._ranges, self._memory = ranges, memory
        self._arrivals: dict[int, _Arrival] = {}

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of which parts of a reply are here, oldest first."""
        return tuple(sorted(self._arrivals))

    def clear(self) -> None:
        """Drop everything: the hub sends it again."""
        self._arrivals = {}

    def is_gap(self, reply: Reply, applied: int) -> bool:
        """Whether something is missing that has to come before this part, where this many replies
        have been applied: then the connection broke meanwhile."""
        newest = max(self._arrivals, default=applied - 1)
        if newest not in self._arrivals:
            return reply.round > newest + 1 or (reply.round > newest and reply.part > 0)
        here = self._arrivals[newest]
        if reply.round == newest:
            return reply.part > here.parts
        if reply.round > newest:
            return here.parts < here.head.parts or reply.round > newest + 1 or reply.part > 0
        return False

    def add_part(self, reply: Reply, at: float, spare_only: bool) -> None:
        """Take in the next part of a reply, which arrived `at` this time.

        With `spare_only` parts are decoded as they arrive only if that takes no new memory: of a
        synchronous round, whose contribution the socket still holds, the payloads take less.
        Raises BadMessage for a part that is out of order, BadPayload.
        """
        arrival = self._arrivals.get(reply.round)
        if arrival is None:
            arrival = self._arrivals[reply.round] = _Arrival(reply, self._place(reply, spare_only))
        parts = self._parts(reply.round)
        if reply.parts != len(parts) or reply.part != arrival.parts:
            raise BadMessage(f"part {reply.part} of {reply.parts} of a reply is out of order")
        if arrival.vector is None:
            arrival.payloads.append(reply.payload)
        else:
            began = self._clock()
            self.codec.decode(reply.payload, arrival.vector[parts[reply.part]])
            self._add_seconds(arrival, began)
        arrival.bytes += memoryview(reply.payload).nbytes
        arrival.parts += 1
        arrival.at = at

    def is_whole(self, round: int) -> bool:
        arrival = self._arrivals.get(round)
        return arrival is not None and arrival.parts >= len(self._parts(round))

    def ready_after(self, applied: int) -> int:
        """The first round from `applied` on whose reply is not whole."""
        while self.is_whole(applied):
            applied += 1
        return applied

    def pop_reply(self, round: int) -> RoundReply:
        """Hand out a whole reply. Raises BadPayload, before any piece of it is used."""
        arrival = self._arrivals.pop(round)
        head, began = arrival.head, self._clock()
        if self.codec.adapts:
            from edgetrain.codecs.auto import rung_of  # of this codec alone

            self.rung = rung_of(memoryview(arrival.payloads[0]))
        pieces = [] if self.keeps_payloads else self._decoded(arrival)
        self._add_seconds(arrival, began)
        return RoundReply(
            round, head.members, head.delay, head.checksum, arrival.at, pieces, head.local_steps,
            decode_s=arrival.decode_s, received_bytes=arrival.bytes,
            complete=head.complete,
            merged=head.merged_of(self._name) if self._name else round + 1,
            payloads=arrival.payloads if self.keeps_payloads else (),
        )  # fmt: skip

    def _add_seconds(self, arrival: _Arrival, began: float) -> None:
        seconds = self._clock() - began
        arrival.decode_s += seconds
        self.decode_s += seconds

    def _parts(self, round: int) -> list[slice]:
        return self.codec.slices(self._ranges.size(round))

    def _place(self, reply: Reply, spare_only: bool) -> Vector | None:
        if not self.codec.lossless or self.keeps_payloads:
            return None
        if self.keeps_frames and self.codec.verbatim:
            return None
        place = self._memory.borrow_spare() if spare_only else self._memory.borrow_vector()
        return None if place is None else place[: self._ranges.size(reply.round)]

    def _decoded(self, arrival: _Arrival) -> list[Vector]:
        if arrival.vector is not None:
            return [arrival.vector]
        parts = self._parts(arrival.head.round)
        if self.codec.verbatim:
            for here, payload in zip(parts, arrival.payloads, strict=True):
                check_length("fp32", memoryview(payload).nbytes, 4 * (here.stop - here.start))
            return [np.frombuffer(payload, np.float32) for payload in arrival.payloads]
        vector = self._memory.borrow_vector()[: parts[-1].stop]
        for here, payload in zip(parts, arrival.payloads, strict=True):
            self.codec.decode(payload, vector[here])
        return [vector]


def joined_base(payloads: Sequence[Buffer], elements: int, out: Vector) -> Vector:
    """Write the parts of a base into `out`, float32 [elements]. Raises BadMessage."""
    here = list(base_parts(elements))
    sizes = [memoryview(payload).nbytes for payload in payloads]
    if sizes != [4 * (part.stop - part.start) for part in here]:
        raise BadMessage(f"a base of {sizes} bytes for {elements} elements")
    for where, payload in zip(here, payloads, strict=True):
        out[where] = np.frombuffer(payload, np.float32)
    return out
