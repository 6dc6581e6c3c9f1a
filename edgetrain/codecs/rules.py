"""Different codecs for different tensors: `small(1024): fp32; *.bias: bf16; topk(0.01) | q2`.

A codec must be bound to the vector's layout to know the elements of each rule. Then the whole
vector is one part: the payloads of all pieces in order, each behind its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from edgetrain.codecs.base import Codec, as_bytes, check_vector
from edgetrain.codecs.kernels import wire
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Buffer, Layout, Vector

WHOLE = 2**31
"""`part_elements` of an unbound codec: more elements than any vector."""


@dataclass(frozen=True)
class Rule:
    """Tensors of at most `small` elements, or whose name matches `pattern`, get `codec`."""

    codec: Codec
    pattern: str = ""
    small: int = 0

    @property
    def name(self) -> str:
        if self.small:
            return f"small({self.small}): {self.codec.name}"
        return f"{self.pattern}: {self.codec.name}" if self.pattern else self.codec.name

    def matches(self, name: str, elements: int) -> bool:
        """True if this rule applies to a tensor of this name and number of elements."""
        if self.small:
            return elements <= self.small
        return not self.pattern or fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class BoundRanges:
    """Some elements of the vector, as [start, stop) ranges in order, and their bound codec."""

    codec: Codec
    ranges: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def gather_elements(self, vector: Vector) -> Vector:
        """The elements of the ranges: a view if there is one range, else a copy."""
        if len(self.ranges) == 1:
            return vector[slice(*self.ranges[0])]
        values, at = np.empty(self.elements, np.float32), 0
        for start, stop in self.ranges:
            values[at : at + stop - start] = vector[start:stop]
            at += stop - start
        return values

    def write_elements(self, values: Vector, vector: Vector) -> None:
        if len(self.ranges) == 1 and np.shares_memory(values, vector):
            return
        at = 0
        for start, stop in self.ranges:
            vector[start:stop] = values[at : at + stop - start]
            at += stop - start

    def part(self, first: int, elements: int) -> BoundRanges:
        """The ranges of `elements` of its elements, from the `first`-th on."""
        ranges, at = [], 0
        for start, stop in self.ranges:
            begin, end = max(at, first), min(at + stop - start, first + elements)
            if begin < end:
                ranges.append((start + begin - at, start + end - at))
            at += stop - start
        return BoundRanges(self.codec, tuple(ranges))


class Unbound(Codec):
    """A codec that must be bound to a layout before it can do anything."""

    part_elements = WHOLE
    unbound = True

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        raise self._unbound()

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        raise self._unbound()

    def check(self, payload: Buffer, elements: int) -> None:
        raise self._unbound()

    def max_bytes(self, elements: int) -> int:
        raise self._unbound()

    def _unbound(self) -> ConfigError:
        return ConfigError(
            f"'{self.name}' depends on the shapes of the tensors", "call codec.bind(layout) first"
        )


class Bound(Codec):
    """A codec for vectors of one layout; the whole vector is one part."""

    def _check_size(self, elements: int) -> None:
        if elements != self.part_elements:
            raise ConfigError(
                f"'{self.name}' is bound to {self.part_elements} elements, not {elements}"
            )


class Rules(Unbound):
    """The first rule that matches a tensor codes it; the last rule matches all."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.name = "; ".join(rule.name for rule in rules)
        self.few_elements = any(rule.codec.few_elements for rule in rules)

    def bind(self, layout: Layout) -> Codec:
        check_layout(layout)
        taken: list[list[tuple[str, int, tuple[int, ...]]]] = [[] for _ in self.rules]
        for name, start, shape in layout:
            if not (elements := math.prod(shape)):
                continue
            index = next(i for i, rule in enumerate(self.rules) if rule.matches(name, elements))
            taken[index].append((name, start, shape))
        pieces = [
            _bound_ranges(rule.codec, tensors)
            for rule, tensors in zip(self.rules, taken, strict=True)
            if tensors
        ]
        return BoundRules(self.name, tuple(pieces))


class PerTensor(Unbound):
    """Each tensor on its own: `topk(0.01, tensor)` keeps a share of every tensor."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.name = name
        self.codec = codec
        self.few_elements = codec.few_elements

    def bind(self, layout: Layout) -> Codec:
        check_layout(layout)
        tensors = [tensor for tensor in layout if math.prod(tensor[2])]
        return BoundRules(
            self.name, tuple(_bound_ranges(self.codec, [tensor]) for tensor in tensors)
        )


class BoundRules(Bound):
    """A codec for each piece of the vector; one part, the payloads in order behind their lengths.

    Bound: each piece is within its own codec's. Lossless if all of them are.
    """

    def __init__(self, name: str, pieces: tuple[BoundRanges, ...]) -> None:
        self.name = name
        self.pieces = pieces
        self.part_elements = sum(piece.elements for piece in pieces)
        self.lossless = all(piece.codec.lossless for piece in pieces)
        self.nearly_all = all(piece.codec.nearly_all for piece in pieces)
        self.few_elements = any(piece.codec.few_elements for piece in pieces)

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        self._check(vector)
        pieces = ((piece.codec, piece.gather_elements(vector)) for piece in self.pieces)
        return [_joined(codec.encode(piece, salt) for codec, piece in pieces)]

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        self._check(vector)
        return [_joined(self._drain(piece, residual, vector, salt) for piece in self.pieces)]

    def check(self, payload: Buffer, elements: int) -> None:
        self._check_size(elements)
        for part, payload_of_part in self._split(payload):
            part.codec.check(payload_of_part, part.elements)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        """A piece of several ranges is decoded into a copy, which is smaller than the vector."""
        for part, payload_of_part in self._split(payload):
            values = part.gather_elements(out)
            part.codec.apply(payload_of_part, weight, values)
            part.write_elements(values, out)

    def max_bytes(self, elements: int) -> int:
        self._check_size(elements)
        return sum(most for _, most in self._parts())

    def _drain(
        self, piece: BoundRanges, residual: Vector, vector: Vector, salt: int
    ) -> list[Buffer]:
        mine = piece.gather_elements(residual)
        payloads = piece.codec.drain(mine, piece.gather_elements(vector), salt)
        piece.write_elements(mine, residual)
        return payloads

    def _parts(self) -> Iterator[tuple[BoundRanges, int]]:
        """(the piece's part, most bytes) of each part of each piece."""
        for piece in self.pieces:
            step = piece.codec.part_elements
            for start in range(0, piece.elements, step):
                part = piece if piece.elements <= step else piece.part(start, step)
                yield part, 5 + piece.codec.max_bytes(part.elements)

    def _split(self, payload: Buffer) -> Iterator[tuple[BoundRanges, Buffer]]:
        """(the piece's part, its payload) in order. Raises BadPayload."""
        content, at = as_bytes(payload), 0
        for part, most in self._parts():
            size, at = wire.get_varint(content, at)
            if size > min(most, content.size - at):
                raise wire.bad(wire.TRUNCATED)
            yield part, content[at : at + size].data
            at += size
        if at != content.size:
            raise wire.bad(wire.TRAILING)

    def _check(self, vector: Vector) -> None:
        check_vector(vector)
        self._check_size(vector.size)


def check_layout(layout: Layout) -> None:
    """Raise ConfigError unless the tensors of a layout follow each other without gaps."""
    at = 0
    for name, start, shape in layout:
        if start != at:
            raise ConfigError(f"tensor '{name}' starts at {start}, the one before ends at {at}")
        at += math.prod(shape)
    if not at:
        raise ConfigError("the layout has no elements")


def _bound_ranges(codec: Codec, tensors: list[tuple[str, int, tuple[int, ...]]]) -> BoundRanges:
    ranges: list[tuple[int, int]] = []
    own: list[tuple[str, int, tuple[int, ...]]] = []
    at = 0
    for name, start, shape in tensors:
        stop = start + math.prod(shape)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
        own.append((name, at, shape))
        at += stop - start
    return BoundRanges(codec.bind(own), tuple(ranges))


def _joined(groups: Iterator[list[Buffer]]) -> bytes:
    pieces: list[Buffer] = []
    for payloads in groups:
        for payload in payloads:
            pieces += [wire.put_varint(len(payload)), payload]
    return b"".join(pieces)
