"""Sending a base, part by part: from the member whose parameters all start from, and to members
that lack it. Behind it come the values of tensors that are not trained, where the job hands out
those of its first member: bytes that the hub passes on unread.

Knows no connection, and not who starts: whose base it is, and whether training has begun, is
decided in `membership`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.exchange.hub.admission import AgreedModel
from edgetrain.exchange.hub.contributions import NOT_FINITE
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.messages import Base, Fixed
from edgetrain.vectors.blob import blob_digest, blob_part, blob_part_count, blob_parts
from edgetrain.vectors.parts import base_part, base_part_count, base_parts
from edgetrain.vectors.vector import Buffer, Vector, all_finite


def base_messages(base: Vector) -> list[Base]:
    """The messages that send a base to a member. They are views of it."""
    parts = list(base_parts(base.size))
    return [Base(i, len(parts), base[here].data.cast("B")) for i, here in enumerate(parts)]


@dataclass(frozen=True)
class FixedValues:
    """The values of tensors that are not trained, as the first member handed them over: for all
    others, and for those that come late. Never decoded."""

    payloads: tuple[Buffer, ...] = ()
    """In parts as they are sent; (): none are handed out."""
    digest: str = ""

    @classmethod
    def of(cls, payloads: Sequence[Buffer]) -> FixedValues:
        """The values in these parts; none without parts."""
        return cls(tuple(payloads), blob_digest(payloads)) if payloads else cls()

    @classmethod
    def restored(cls, blob: Buffer) -> FixedValues:
        """The values in a blob of all parts, copied."""
        return cls.of(tuple(blob_parts(bytes(blob))))

    @property
    def size(self) -> int:
        return sum(memoryview(payload).nbytes for payload in self.payloads)

    def messages_to(self, digest: str) -> list[Fixed]:
        """The messages to a member whose own values have this digest: none, if it has these."""
        if digest == self.digest:
            return []
        count = len(self.payloads)
        return [Fixed(i, count, payload) for i, payload in enumerate(self.payloads)]


class FirstBase:
    """The parameters that all members start from, and behind them the fixed tensors that all take
    over: who uploads them, and the parts that are here.

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
        return len(self._payloads)

    def expect_from(self, uploader: MemberRecord | None) -> None:
        self.uploader = uploader
        self._asked, self._came = 1, 0
        self.drop_parts()

    def expect_again(self) -> None:
        self._asked += 1
        self.drop_parts()

    def drop_parts(self) -> None:
        """The parts that are here are not needed any more, or are sent again."""
        self._payloads = []

    def accept_from(
        self, member: MemberRecord, message: Base | Fixed, model: AgreedModel, started: bool
    ) -> tuple[str, str] | None:
        """Take a member's part of the base of a `model`; what is wrong with it: (code, reason)."""
        uploads = member is self.uploader
        if uploads and self._is_repeated(message, model, started):
            return None
        if started or not uploads:
            return "order", f"{_shown(message)} was not asked for"
        return self.accept_part(message, model)

    def _is_repeated(self, message: Base | Fixed, model: AgreedModel, started: bool) -> bool:
        """Whether a part is one too many because the base was asked for more than once."""
        self._came += 1
        if self._asked == 1 or self._came > self._asked * _part_count(model):
            return False
        return started or _number(message, model) != len(self._payloads)

    def accept_part(self, message: Base | Fixed, model: AgreedModel) -> tuple[str, str] | None:
        """The next part of a base; returns what is wrong with it: (code, reason)."""
        size = memoryview(message.payload).nbytes
        if isinstance(message, Base):
            here, parts = (
                base_part(message.part, model.base_elements),
                base_part_count(model.base_elements),
            )
            wanted = 4 * (here.stop - here.start)
        else:
            here = blob_part(message.part, model.fixed_bytes)
            parts, wanted = blob_part_count(model.fixed_bytes), here.stop - here.start
        if _number(message, model) != len(self._payloads):
            return "order", f"{_shown(message)} was not asked for"
        if message.parts != parts or size != wanted:
            return "size", f"{_shown(message)} has {size} bytes"
        if isinstance(message, Base) and not all_finite(np.frombuffer(message.payload, np.float32)):
            return "payload", f"the base: {NOT_FINITE}"
        self._payloads.append(message.payload)
        return None

    def is_whole(self, model: AgreedModel) -> bool:
        return len(self._payloads) >= _part_count(model)

    def messages(self, model: AgreedModel) -> list[Base]:
        """The messages that pass the base on to other members, with the payloads that came."""
        count = base_part_count(model.base_elements)
        return [Base(i, count, payload) for i, payload in enumerate(self._payloads[:count])]

    def vector(self, elements: int) -> Vector:
        """The whole base, float32 [elements], in memory of its own."""
        base: Vector = np.empty(elements, np.float32)
        for here, payload in zip(base_parts(elements), self._payloads, strict=False):
            base[here] = np.frombuffer(payload, np.float32)
        return base

    def fixed_values(self, elements: int) -> FixedValues:
        """What came behind a base of [elements], as it came."""
        return FixedValues.of(self._payloads[base_part_count(elements) :])


def _part_count(model: AgreedModel) -> int:
    return base_part_count(model.base_elements) + blob_part_count(model.fixed_bytes)


def _number(message: Base | Fixed, model: AgreedModel) -> int:
    """Which part of all it is: those of the base come first."""
    before = 0 if isinstance(message, Base) else base_part_count(model.base_elements)
    return before + message.part


def _shown(message: Base | Fixed) -> str:
    what = "base" if isinstance(message, Base) else "fixed tensors'"
    return f"{what} part {message.part}"
