"""Sending a base, part by part: from the member whose parameters all start from, and to members
that lack it.

Knows no connection, and not who starts: whose base it is, and whether training has begun, is
decided in `membership`.
"""

from __future__ import annotations

import numpy as np

from edgetrain.exchange.hub.contributions import NOT_FINITE
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.messages import Base
from edgetrain.vectors.parts import base_part, base_part_count, base_parts
from edgetrain.vectors.vector import Buffer, Vector, all_finite


def base_messages(base: Vector) -> list[Base]:
    """The messages that send a base to a member. They are views of it."""
    parts = list(base_parts(base.size))
    return [Base(i, len(parts), base[here].data.cast("B")) for i, here in enumerate(parts)]


class FirstBase:
    """The parameters that all members start from: who uploads them, and the parts that are here.

    A member whose connection is replaced while it joins asks again, and is asked for its base
    again. It cannot know which of both answers was lost, so it may upload once for each: what it
    sends twice is dropped.
    """

    def __init__(self) -> None:
        self.uploader: MemberRecord | None = None
        self._payloads: list[Buffer] = []
        self._asked = 0
        """How often the uploader was asked for the base."""
        self._came = 0
        """Parts that the uploader has sent, with those that were dropped."""

    def __len__(self) -> int:
        """Parts that are here."""
        return len(self._payloads)

    def expect_from(self, uploader: MemberRecord | None) -> None:
        """Let this member upload the base, from the beginning."""
        self.uploader = uploader
        self._asked, self._came = 1, 0
        self.drop_parts()

    def expect_again(self) -> None:
        """The uploader asked again, and is asked again for all of the base."""
        self._asked += 1
        self.drop_parts()

    def drop_parts(self) -> None:
        """The parts that are here are not needed any more, or are sent again."""
        self._payloads = []

    def accept_from(
        self, member: MemberRecord, message: Base, elements: int, started: bool
    ) -> tuple[str, str] | None:
        """A part of a vector [elements] that a member sent, perhaps after training has `started`;
        returns what is wrong with it: (code, reason)."""
        uploads = member is self.uploader
        if uploads and self._is_repeated(message, elements, started):
            return None
        if started or not uploads:
            return "order", f"base part {message.part} was not asked for"
        return self.accept_part(message, elements)

    def _is_repeated(self, message: Base, elements: int, started: bool) -> bool:
        """Whether a part is one too many because the base was asked for more than once."""
        self._came += 1
        if self._asked == 1 or self._came > self._asked * base_part_count(elements):
            return False
        return started or message.part != len(self._payloads)

    def accept_part(self, message: Base, elements: int) -> tuple[str, str] | None:
        """The next part of a vector [elements]; returns what is wrong with it: (code, reason)."""
        here = base_part(message.part, elements)
        size = memoryview(message.payload).nbytes
        if message.part != len(self._payloads):
            return "order", f"base part {message.part} was not asked for"
        if message.parts != base_part_count(elements) or size != 4 * (here.stop - here.start):
            return "size", f"part {message.part} of the base has {size} bytes"
        if not all_finite(np.frombuffer(message.payload, np.float32)):
            return "payload", f"the base: {NOT_FINITE}"
        self._payloads.append(message.payload)
        return None

    def is_whole(self, elements: int) -> bool:
        """Whether all parts of a vector [elements] are here."""
        return len(self._payloads) >= base_part_count(elements)

    def messages(self) -> list[Base]:
        """The messages that pass the parts on to other members. Their payloads are those that came,
        which nothing writes to."""
        count = len(self._payloads)
        return [Base(i, count, payload) for i, payload in enumerate(self._payloads)]

    def vector(self, elements: int) -> Vector:
        """The whole base, float32 [elements], in memory of its own."""
        base: Vector = np.empty(elements, np.float32)
        for here, payload in zip(base_parts(elements), self._payloads, strict=True):
            base[here] = np.frombuffer(payload, np.float32)
        return base
