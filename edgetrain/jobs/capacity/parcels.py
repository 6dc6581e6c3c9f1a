"""Vectors on their way: their messages and bytes, as `messages.pack` and ZMTP frame them.

Sizes only. No link, no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.codecs import Codec
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.messages import Contribute, Message, Reply, pack

_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class ExchangeSizes:
    """What members exchange, and when. A vector has `elements` float32 numbers.

    `codec` and `reply_codec` say how many bytes it takes at most; a `ratio` above 0, measured
    somewhere, says how many times fewer than float32 it takes instead.
    """

    local_steps: int
    delay: Delay
    elements: int
    codec: Codec
    reply_codec: Codec
    ratio: float = 0.0
    reply_ratio: float = 0.0
    final_sync: bool = False
    """Whether the run may have a final sync, which these figures leave out."""
    ranges: int = 1
    """Parts that the vector is cut into before it is encoded, however many hubs there are."""


@dataclass(frozen=True)
class Parcel:
    """A vector on its way: messages (its parts) and their bytes in a TCP stream."""

    parts: int
    bytes: int

    def times(self, count: int) -> Parcel:
        return Parcel(count * self.parts, count * self.bytes)


def contribution(elements: int, codec: Codec, ratio: float = 0.0) -> Parcel:
    """Size of a member's contribution to a round, as framed by `messages.pack` and ZMTP."""
    example = Contribute(
        round=100, part=0, parts=1, weight=1.0, applied=100, checksum=_U64, wanted_delay=20,
        payload=b"",
    )  # fmt: skip
    return _parcel(example, elements, codec, ratio)


def reply(elements: int, codec: Codec, ratio: float = 0.0) -> Parcel:
    example = Reply(
        round=100, part=0, parts=1, members=100, delay=20, checksum=_U64, settled=True,
        payload=b"",
    )  # fmt: skip
    return _parcel(example, elements, codec, ratio)


def _parcel(example: Message, elements: int, codec: Codec, ratio: float) -> Parcel:
    kind, header, _ = (memoryview(frame).nbytes for frame in pack(example))
    framing = sum(size + _frame_bytes(size) for size in (kind, header))
    total = 0
    for size, count in _payloads(elements, codec, ratio):
        total += count * (framing + size + _frame_bytes(size))
    return Parcel(-(-elements // codec.part_elements), total)


def _payloads(elements: int, codec: Codec, ratio: float) -> list[tuple[int, int]]:
    whole, rest = divmod(elements, codec.part_elements)
    found = [(codec.part_elements, whole), (rest, 1 if rest else 0)]
    if ratio:
        return [(max(1, math.ceil(4 * size / ratio)), n) for size, n in found if n]
    return [(codec.max_bytes(size), n) for size, n in found if n]


def _frame_bytes(size: int) -> int:
    """ZMTP 3.1: a flag, and a length of one byte or eight."""
    return 2 if size < 256 else 9
