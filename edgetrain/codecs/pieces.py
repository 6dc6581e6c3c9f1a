"""A codec whose parts are cut at given borders, too: those of the ranges that reducers share.

What it encodes depends on the borders, and not on how many of the pieces lie in one vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from edgetrain.codecs.base import Codec, check_length
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Vector


def in_pieces(codec: Codec, pieces: Sequence[slice]) -> Codec:
    """The codec for a vector of these pieces. ConfigError if it looks at the whole vector."""
    check_pieces(codec)
    return InPieces(codec, pieces) if pieces else Nothing(codec.name)


def check_pieces(codec: Codec) -> None:
    """Raise ConfigError for a codec of whole vectors, or one that changes with the round."""
    if codec.whole and not codec.two_trips:  # which `check_ranges` refuses in its own words
        raise ConfigError(
            f"the codec '{codec.name}' looks at the whole vector, and strategy.ranges cuts it",
            "strategy.ranges = 1, or a codec such as topk(0.01) | q2",
        )


class InPieces(Codec):
    """`codec`, whose parts end where a piece ends. Decodes what it does, part by part."""

    def __init__(self, codec: Codec, pieces: Sequence[slice]) -> None:
        """`pieces` follow each other, from element 0 on."""
        self.codec, self.pieces = codec, pieces
        self.name, self.part_elements = codec.name, codec.part_elements
        self.lossless, self.nearly_all = codec.lossless, codec.nearly_all
        self.verbatim, self.few_elements = codec.verbatim, codec.few_elements
        self._slices = [
            slice(piece.start + here.start, piece.start + here.stop)
            for piece in pieces
            for here in codec.slices(piece.stop - piece.start)
        ]

    def slices(self, elements: int) -> list[slice]:
        return self._slices

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        found = (self.codec.encode(vector[piece], salt) for piece in self.pieces)
        return list(itertools.chain.from_iterable(found))

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        found = (self.codec.drain(residual[piece], vector[piece], salt) for piece in self.pieces)
        return list(itertools.chain.from_iterable(found))

    def decode(self, payload: Buffer, out: Vector) -> None:
        self.codec.decode(payload, out)

    def add(self, payload: Buffer, weight: float, out: Vector) -> None:
        self.codec.add(payload, weight, out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        self.codec.add_many(payloads, weights, out)

    def max_bytes(self, elements: int) -> int:
        return self.codec.max_bytes(elements)


class Nothing(Codec):
    """Of a vector without elements: one part, without bytes. A hub that has no range to add up
    still counts contributions."""

    lossless = nearly_all = True

    def __init__(self, name: str) -> None:
        self.name = name

    def slices(self, elements: int) -> list[slice]:
        return [slice(0, 0)]

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        return [b""]

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        return [b""]

    def check(self, payload: Buffer, elements: int) -> None:
        check_length(self.name, memoryview(payload).nbytes, 0)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        """Nothing to write."""

    def max_bytes(self, elements: int) -> int:
        return 0
