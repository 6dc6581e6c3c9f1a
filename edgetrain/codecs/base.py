"""The base class of codecs, and checks shared by them.

Codecs are stateless: they turn a flat float32 vector into bytes and back, and know no socket, no
clock, no torch and no round. The unsent remainder is kept by feedback.py, never by a codec.
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
    """Encodes a float32 vector as bytes, and decodes them. Pure: equal input, equal output.

    `salt` identifies the member and the round of a vector. Random codecs draw other numbers for
    each salt, so members' errors are independent; others ignore it.

    A vector travels in parts, one for each of `slices`, of at most `part_elements` elements. A
    decoder trusts no byte: it raises BadPayload before it writes anything, and allocates at most
    the size of the part and half a megabyte.

    A subclass defines `encode_part`, `check`, `apply` and `max_bytes`, and may override the rest.
    """

    name: str
    """The canonical spelling: `parse(codec.name)` gives an equal codec."""
    part_elements: int = DENSE_PART_ELEMENTS
    """Maximum number of elements in a part."""
    lossless: bool = False
    """True if decoding gives back every bit."""
    verbatim: bool = False
    """True if a payload is the part's own float32 numbers, usable where they lie."""
    nearly_all: bool = False
    """True if every element is sent, to within 0.4 % of the largest one near it: at the end of a
    run, the remainder is not worth a round of its own."""
    few_elements: bool = False
    """True if a payload carries only some elements of the vector; the others decode to zero.

    Most members then have zero for an element, so its median or trimmed mean over members is zero.
    With different codecs for different tensors: true if it is true of any of them.
    """
    sums_only: bool = False
    """True if only the sum over all members means anything: no payload alone does."""
    two_trips: bool = False
    """True if a contribution takes two rounds, and the second one depends on the reply to the
    first."""
    gradients_only: bool = False
    """True if it encodes only gradients, and no displacements of parameters."""
    adapts: bool = False
    """True of `auto`: it encodes on the density level named by the hub's replies."""
    whole: bool = False
    """True if it encodes only whole vectors, and no parts of one."""
    unbound: bool = False
    """True if `bind` has to be called before anything else."""
    momentum: float = 0.0
    """The momentum that `codecs.memory` applies to gradients, or 0; then the only one."""

    def slices(self, elements: int) -> list[slice]:
        """The parts of a vector of [elements], one for each payload of `encode`, in order."""
        return list(parts_of(elements, self.part_elements))

    def for_displacements(self) -> Codec:
        """The nearest codec for displacements; itself if not `gradients_only`."""
        return self

    def for_replies(self) -> Codec:
        """The default codec of replies: this one without momentum."""
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
        """`residual += vector`, encode that sum, and leave the unsent remainder in `residual`.

        `residual` is mutated in place, `vector` is only read. The payload's own decoding is
        subtracted, so nothing is ever lost to rounding in the codec.
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
