"""What a codec is, with the methods that most have in common, and checks that codecs share.

Codecs are stateless: they turn a flat float32 vector into bytes and back, and know no socket, no
clock, no torch and no round. feedback.py keeps what was not sent yet, never a codec.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgetrain.errors import BadPayload, ConfigError
from edgetrain.vectors.parts import parts_of
from edgetrain.vectors.vector import Buffer, Layout, Vector

DENSE_PART_ELEMENTS = 2**20
"""4 MB of float32: large enough for a link, small enough to overlap sending with decoding."""

TILE = 2**14
"""Elements that are scaled at a time."""


class Codec:
    """A vector to bytes and back. `encode` and `decode` are pure: equal input, equal output.

    `salt` says whose vector it is, and of which round: codecs that draw numbers draw others for
    another one, so that members' errors are independent. Others take no notice of it.

    A payload travels in parts, one for each of `slices`; none is longer than part_elements. A
    decoder trusts no byte: it raises
    BadPayload before it writes anything, and allocates at most the size of the part and half a
    megabyte.

    A codec writes `encode_part`, `check`, `apply` and `max_bytes`, and overrides what it does
    faster, or otherwise.
    """

    name: str
    """The canonical spelling: `parse(codec.name)` gives an equal codec."""
    part_elements: int = DENSE_PART_ELEMENTS
    """Elements of the vector that one part covers, at most."""
    lossless: bool = False
    """True if decoding gives back every bit."""
    verbatim: bool = False
    """True if a payload is the part's own float32 numbers, usable where they lie."""
    nearly_all: bool = False
    """True if every element is sent, to within 0.4 % of the largest one near it: at the end of a
    run, what that leaves out is not worth a round of its own."""
    few_elements: bool = False
    """True if a payload carries only some elements of the vector; the others decode to zero.

    Most members then have zero for an element, so its median or trimmed mean over members is zero.
    With different codecs for different tensors: true if it is true of any of them.
    """
    sums_only: bool = False
    """True if only the sum over all members means anything: no payload alone does."""
    two_trips: bool = False
    """True if a contribution takes two rounds, and what the second one carries depends on the reply
    to the first."""
    gradients_only: bool = False
    """True if it is for gradients: displacements of parameters cannot be sent with it."""
    adapts: bool = False
    """True of `auto`, which encodes on the rung that the hub's replies name."""
    whole: bool = False
    """True if a vector is looked at as a whole: no part of one can be encoded so."""
    unbound: bool = False
    """True if it must be bound to a layout before it can do anything."""
    momentum: float = 0.0
    """The momentum that `codecs.memory` applies to gradients, or 0; then the only one."""

    def slices(self, elements: int) -> list[slice]:
        """The parts of a vector of [elements]: what each payload of `encode` covers, in order."""
        return list(parts_of(elements, self.part_elements))

    def for_displacements(self) -> Codec:
        """The nearest codec that takes displacements; itself if not `gradients_only`."""
        return self

    def for_replies(self) -> Codec:
        """The codec of replies where none is named: without momentum."""
        return self

    def bind(self, layout: Layout) -> Codec:
        """The codec for vectors of this layout; itself, unless it depends on shapes."""
        return self

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        """One buffer per part. `vector` is only read; a lossless codec may return views of it."""
        return [self.encode_part(part, salt) for part in self.parts(vector)]

    def encode_part(self, part: Vector, salt: int = 0) -> Buffer:
        """The payload of one part on its own."""
        raise NotImplementedError

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        """`residual += vector`, encode that sum, and leave in `residual` what was not sent.

        `residual` is mutated in place, `vector` is only read. What is subtracted is the payload's
        own decoding, so nothing is ever lost to rounding in the codec.
        """
        residual += vector
        payloads = self.encode(residual, salt)
        scratch = np.empty(min(self.part_elements, residual.size), np.float32)
        for part, payload in zip(self.parts(residual), payloads, strict=True):
            decoded = scratch[: part.size]
            self.decode(payload, decoded)
            part -= decoded
        return payloads

    def check(self, payload: Buffer, elements: int) -> None:
        """Raise BadPayload unless `apply` can decode it into `elements`. Takes fixed memory."""
        raise NotImplementedError

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        """out = decoded, or out += weight * decoded, of a checked payload. Takes fixed memory.

        Since neither needs memory that grows with the vector, one codec may decode for another.
        """
        raise NotImplementedError

    def decode(self, payload: Buffer, out: Vector) -> None:
        """Overwrites all of `out`, the part's float32 view. BadPayload leaves `out` as it was."""
        self.check(payload, out.size)
        self.apply(payload, None, out)

    def add(self, payload: Buffer, weight: float, out: Vector) -> None:
        """`out += weight * decoded`. BadPayload leaves `out` as it was."""
        self.check(payload, out.size)
        self.apply(payload, weight, out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        """Add the same part of many messages, as `add` in order. BadPayload changes nothing."""
        for payload in payloads:
            self.check(payload, out.size)
        for payload, weight in zip(payloads, weights, strict=True):
            self.apply(payload, weight, out)

    def max_bytes(self, elements: int) -> int:
        """The length of the longest valid payload of a part of `elements` elements."""
        raise NotImplementedError

    def parts(self, vector: Vector) -> list[Vector]:
        """Views of the vector, one per part."""
        step = self.part_elements
        return [vector[start : start + step] for start in range(0, vector.size, step)]

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(self.name)


def bound(codec: Codec, layout: Layout, ranges: int = 1) -> Codec:
    """The codec for vectors of this layout; () if the layout is not known. `ranges`: how many
    ranges such a vector is sent in.

    Raises ConfigError for a codec that depends on an unknown layout, or on tensors that ranges cut.
    """
    check_ranges(codec, ranges)
    codec = codec.bind(layout) if layout else codec
    if codec.unbound:
        raise ConfigError(
            f"'{codec.name}' depends on the shapes of the tensors, which are not known",
            "join with a layout, or take a codec that does not look at tensors",
        )
    return codec


def check_ranges(codec: Codec, ranges: int) -> None:
    """Raise ConfigError for a codec of tensors where a vector is sent in several ranges."""
    if ranges > 1 and codec.unbound:
        raise ConfigError(
            f"the codec '{codec.name}' works on whole tensors, and {ranges} ranges of the vector "
            "cut them",
            "take a codec that does not look at tensors, as topk(0.01) | q2",
        )


def salt_of(name: str, round: int) -> int:
    """The salt of what this member sends in this round, or the hub, whose name is ""."""
    return zlib.crc32(f"{name} {round}".encode())


def add_scaled(values: Vector, weight: float, out: Vector) -> None:
    """out += weight * values, in a scratch that stays in cache."""
    for start in range(0, out.size, TILE):
        here = slice(start, start + TILE)
        out[here] += np.float32(weight) * values[here]


def as_bytes(payload: Buffer) -> npt.NDArray[np.uint8]:
    """A read-only uint8 view of a payload; no copy."""
    return np.frombuffer(memoryview(payload).toreadonly(), np.uint8)


def check_vector(vector: Vector) -> None:
    """Raise ConfigError unless `vector` is flat, contiguous float32, all that codecs take."""
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        shape = "x".join(map(str, vector.shape)) or "a scalar"
        raise ConfigError(
            f"a codec takes one flat contiguous float32 vector, not {vector.dtype} {shape}",
            "pass np.ascontiguousarray(x, np.float32).reshape(-1)",
        )


def check_length(name: str, length: int, expected: int) -> None:
    """Raise BadPayload unless a payload has the only length that its codec writes."""
    if length != expected:
        raise BadPayload(f"{name}: payload of {length} bytes where {expected} are needed")
