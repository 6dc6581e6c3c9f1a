"""Codecs that send few elements: top-k by magnitude, and random ones.

What is kept may be coded by another codec: `topk(0.01) | q2`. The payload of top-k is a count, the
positions as gaps in block Rice code, and the values (docs/codecs.md). Parts are sized so that each
holds some 8192 entries, so a part is also the point from which decoding can start anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgetrain.codecs import kernels, wire
from edgetrain.codecs.base import (
    BaseCodec,
    Buffer,
    Vector,
    as_bytes,
    check_vector,
)
from edgetrain.codecs.blocks import Planes, content_seed
from edgetrain.codecs.dense import Dense
from edgetrain.codecs.fallback import hash32, sparse_count
from edgetrain.codecs.kernels import CHUNK, LIMIT, Bytes, Indices
from edgetrain.errors import BadPayload, ConfigError

SAMPLED_HITS = 1500
"""Expected hits in a sample from which its threshold is taken as it is (2.6 % off, typically)."""
GUARD_STRIDE = 64
"""With fewer, one chunk of 64 this many only bounds the threshold from below."""
MAX_STRIDE = 256
SMALL = 2**16
"""Vectors up to this many elements are ranked whole."""
RAW_BITS = 32
MAX_PART = 2**22


def check_density(name: str, density: float) -> float:
    """`density` if it is a share in (0, 1]; else ConfigError."""
    if not 0 < density <= 1:
        raise ConfigError(f"{name} keeps a share in (0, 1] of the elements, not {density:g}")
    return density


def part_for(density: float) -> int:
    """Elements of a part that holds some 8192 entries at this density: 2^18 to 2^22."""
    return 1 << min(max(round(math.log2(8192 / density)), 18), 22)


def _room(values: BaseCodec, count: int) -> int:
    return values.max_bytes(count) if count else 0


class Values:
    """How kept values travel: as planes or raw, which the kernels do, or by any dense codec."""

    def __init__(self, codec: BaseCodec) -> None:
        self.codec = codec
        self.fused_bits = (
            codec.bits
            if isinstance(codec, Planes)
            else RAW_BITS
            if isinstance(codec, Dense)
            else None
        )

    def encode(self, values: Vector) -> tuple[Buffer, Vector]:
        """(payload, what it decodes to). Raises EdgetrainError for what is not finite."""
        if not np.all(np.abs(values) < LIMIT):
            raise wire.too_large()
        payload = self.codec.encode_part(values)
        sent = np.empty_like(values)
        self.codec.decode(payload, sent)
        return payload, sent

    def decode(self, payload: Bytes, count: int) -> Vector:
        """The values of a payload that holds nothing else. Raises BadPayload."""
        values = np.empty(count, np.float32)
        self.codec.decode(payload.data, values)
        if not np.all(np.abs(values) < 2 * LIMIT):
            raise wire.bad(wire.MAGNITUDE)
        return values


class TopK(BaseCodec):
    """The largest magnitudes of the whole vector: a share `density` of the elements.

    The threshold is that of a sample where the sample holds 1500 hits; then the share is met
    within a few percent. Below that, and always with `exact`, it is exactly round(density *
    elements), at least 1; of equal magnitudes the first are kept. Zeros are never sent.
    Bound: what is not kept decodes to 0 and is no larger than what is; what is kept is within the
    bound of `values`. See also Aji 2017, Stich 2018 (contraction with feedback).
    """

    def __init__(
        self, density: float, values: BaseCodec | None = None, exact: bool = False
    ) -> None:
        """`values` codes what is kept; fp32 by default. Any fixed-size dense codec will do."""
        self.density = check_density("topk", density)
        self.exact = exact
        self.values = Values(values or Dense())
        self.part_elements = part_for(density)
        options = f"{density!r}, exact" if exact else f"{density!r}"
        tail = "" if values is None or values.name == "fp32" else f" | {values.name}"
        self.name = f"topk({options}){tail}"

    def at_density(self, density: float) -> TopK:
        """The same codec at another density; its payloads can be read by this one.

        Parts stay where they are, so decoders need not know the density.
        """
        other = TopK(density, self.values.codec, self.exact)
        other.part_elements = self.part_elements
        return other

    def encode(self, vector: Vector) -> list[Buffer]:
        check_vector(vector)
        return self._encode(vector, None)

    def drain(self, residual: Vector, vector: Vector) -> list[Buffer]:
        check_vector(vector)
        return self._encode(residual, vector)

    def wanted(self, elements: int) -> int:
        """How many elements of a vector of that length are kept."""
        return min(elements, max(1, round(self.density * elements)))

    def decode(self, payload: Buffer, out: Vector) -> None:
        positions, values = self.entries(payload, out.size)
        out[:] = 0
        kernels.current().scatter(out, positions, values)

    def add(self, payload: Buffer, weight: float, out: Vector) -> None:
        self.add_many([payload], [weight], out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        bits = self.values.fused_bits
        if bits:
            for payload in payloads:
                self._check_size(len(payload), out.size)
            kernels.current().sparse_add([as_bytes(p) for p in payloads], weights, bits, out)
            return
        decoded = [self.entries(payload, out.size) for payload in payloads]
        for (positions, values), weight in zip(decoded, weights, strict=True):
            out[positions] += np.float32(weight) * values

    def entries(self, payload: Buffer, elements: int) -> tuple[Indices, Vector]:
        """(positions, values) of a part's payload. Raises BadPayload."""
        self._check_size(len(payload), elements)
        content, bits = as_bytes(payload), self.values.fused_bits
        if bits:
            return kernels.current().sparse_decode(content, elements, bits)
        count, at = sparse_count(content, elements)
        if count == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        positions, used = kernels.current().gaps_decode(content[at:], count, elements)
        return positions, self.values.decode(content[at + used :], count)

    def max_bytes(self, elements: int) -> int:
        """All kept, at worst: at most 7 bits an element for positions, and the values.

        A gap of g costs at most g + 1 bits of quotient, its block's parameter averages at most 2
        bits an element, an escape is only taken where it is cheaper than 2 bits an element, and
        a block's own number is at most 61 bits for 32 entries.
        """
        return 16 + (7 * elements + 7) // 8 + _room(self.values.codec, elements)

    def _check_size(self, size: int, elements: int) -> None:
        if size > self.max_bytes(elements):
            raise BadPayload(f"{self.name}: {size} bytes for {elements} elements")

    def _encode(self, r: Vector, g: Vector | None) -> list[Buffer]:
        settled = g is not None
        wanted, seed = self.wanted(r.size), content_seed(r, g)
        stride = min(wanted // SAMPLED_HITS, MAX_STRIDE)
        if stride >= GUARD_STRIDE and not self.exact:
            sample = r.size // CHUNK // stride * CHUNK
            rank = max(1, wanted * sample // r.size)
            bound, hits = kernels.current().threshold(r, g, rank, stride, seed)
            if hits <= 2 * rank:  # else many magnitudes are equal, and the first will have to do
                return self._encode_above(r, g, max(bound, 1))
        positions, values = _largest(r, g, wanted, seed)
        return [
            self._pack(part if settled else None, positions[a:b] - np.uint32(start), values[a:b], n)
            for part, start, n, a, b in self._cuts(r, positions)
        ]

    def _encode_above(self, r: Vector, g: Vector | None, bound: int) -> list[Buffer]:
        """One pass: each part is selected, coded and settled while it is in cache."""
        step = self.part_elements
        payloads: list[Buffer] = []
        for start in range(0, r.size, step):
            part = r[start : start + step]
            here = None if g is None else g[start : start + step]
            found = kernels.current().select(part, here, bound, zero=False)
            payloads.append(self._pack(None if g is None else part, *found, part.size))
        return payloads

    def _cuts(self, r: Vector, positions: Indices) -> list[tuple[Vector, int, int, int, int]]:
        """(part, its first element, its elements, first and end of its positions) of each part."""
        starts = list(range(0, r.size, self.part_elements))
        cuts = [*np.searchsorted(positions, np.array(starts, np.uint32)).tolist(), positions.size]
        parts = self.parts(r)
        return [
            (part, start, part.size, cuts[i], cuts[i + 1])
            for i, (part, start) in enumerate(zip(parts, starts, strict=True))
        ]

    def _pack(self, r: Vector | None, positions: Indices, values: Vector, elements: int) -> Buffer:
        """The payload of a part; r, where given, becomes what was not sent."""
        bits = self.values.fused_bits
        if bits:
            return kernels.current().sparse_encode(r, positions, values, elements, bits)
        head = wire.put_varint(positions.size)
        if not positions.size:
            return head
        coded, sent = self.values.encode(values)
        gaps = kernels.current().gaps_encode(positions, elements)
        if r is not None:
            kernels.current().settle(r, positions, values, sent)
        return b"".join([head, gaps.tobytes(), coded])


def _largest(r: Vector, g: Vector | None, wanted: int, seed: int) -> tuple[Indices, Vector]:
    """(positions, values) of the `wanted` largest magnitudes of r (+= g), in order of position.

    A sample bounds them from below, so that few have to be ranked; where it bounds too high, the
    bound is lowered and r, which has g by then, is read once more.
    """
    run = kernels.current()
    for rank, sample in _guards(r.size, wanted):
        if sample == r.size:
            bound = run.threshold_of(r, g, rank)[0]
        elif rank > sample:
            bound = 1
        else:
            bound = run.threshold(r, g, rank, GUARD_STRIDE, seed)[0]
        found = _select(r, g, max(bound, 1))
        g = None
        if found[1].size >= wanted or bound <= 1:
            break
    positions, values = found
    if values.size > wanted:
        bound = run.threshold_of(values, None, wanted)[0]
        return run.trim(positions, values, bound, wanted)
    return positions, values


def _guards(elements: int, wanted: int) -> list[tuple[int, int]]:
    """(rank, size of the sample) to try in turn, until enough is found."""
    sample = elements // CHUNK // GUARD_STRIDE * CHUNK
    share = wanted * sample // elements
    if elements <= SMALL or 4 * share > sample:
        return [(wanted, elements)]
    # Neighbours are alike, so a sample of chunks errs some twice as much as its size says.
    rank = share + 6 * math.isqrt(share) + 8
    return [(rank, sample), (4 * rank, sample), (sample + 1, sample)]


def _select(r: Vector, g: Vector | None, bound: int) -> tuple[Indices, Vector]:
    """`select` over a long vector in pieces, copied out of the kernels' scratch."""
    found = []
    for start in range(0, r.size, MAX_PART):
        here = None if g is None else g[start : start + MAX_PART]
        positions, values = kernels.current().select(
            r[start : start + MAX_PART], here, bound, zero=False
        )
        found.append((positions + np.uint32(start), values.copy()))
    return np.concatenate([p for p, _ in found]), np.concatenate([v for _, v in found])


class RandK(BaseCodec):
    """Random elements, one from each of `density * elements` equal strata: no positions are sent.

    A part's payload is a seed, a count and the values; the seed gives the positions on both
    sides. Values are not scaled up by 1 / density: feedback, which diverges if they are, brings the
    rest. Bound: what is drawn is within the bound of `values`, the rest decodes to 0. See Konecny
    2016, Stich 2018.
    """

    def __init__(self, density: float, values: BaseCodec | None = None) -> None:
        self.density = check_density("randk", density)
        self.values = Values(values or Dense())
        self.part_elements = part_for(density)
        tail = "" if values is None or values.name == "fp32" else f" | {values.name}"
        self.name = f"randk({density!r}){tail}"

    def encode(self, vector: Vector) -> list[Buffer]:
        check_vector(vector)
        return self._encode(vector, settle=False)

    def drain(self, residual: Vector, vector: Vector) -> list[Buffer]:
        check_vector(vector)
        residual += vector
        return self._encode(residual, settle=True)

    def decode(self, payload: Buffer, out: Vector) -> None:
        positions, values = self.entries(payload, out.size)
        out[:] = 0
        kernels.current().scatter(out, positions, values)

    def add(self, payload: Buffer, weight: float, out: Vector) -> None:
        self.add_many([payload], [weight], out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        decoded = [self.entries(payload, out.size) for payload in payloads]
        for (positions, values), weight in zip(decoded, weights, strict=True):
            out[positions] += np.float32(weight) * values

    def entries(self, payload: Buffer, elements: int) -> tuple[Indices, Vector]:
        """(positions, values) of a part's payload. Raises BadPayload."""
        content = as_bytes(payload)
        if content.size < 5 or content.size > self.max_bytes(elements):
            raise BadPayload(f"{self.name}: {content.size} bytes for {elements} elements")
        count, at = wire.get_varint(content, 4)
        if not 0 < count <= elements or content.size - at != _room(self.values.codec, count):
            raise wire.bad(wire.COUNT)
        values = self.values.decode(content[at:], count)
        return strata(elements, count, int(content[:4].copy().view("<u4")[0])), values

    def max_bytes(self, elements: int) -> int:
        return 9 + _room(self.values.codec, elements)

    def _encode(self, r: Vector, settle: bool) -> list[Buffer]:
        seed = content_seed(r, None)
        payloads: list[Buffer] = []
        for i, part in enumerate(self.parts(r)):
            count = min(part.size, max(1, round(self.density * part.size)))
            here = (seed + i) % 2**32
            positions = strata(part.size, count, here)
            values = part[positions]
            coded, sent = self.values.encode(values)
            if settle:
                kernels.current().settle(part, positions, values, sent)
            payloads.append(b"".join([here.to_bytes(4, "little"), wire.put_varint(count), coded]))
        return payloads


def strata(elements: int, count: int, seed: int) -> Indices:
    """One position in each of `count` strata of 0..elements.

    Stratum j is [j * elements // count, (j + 1) * elements // count); integers only, so that it is
    the same on every machine.
    """
    edges = np.arange(count + 1, dtype=np.uint64) * np.uint64(elements) // np.uint64(count)
    sizes = edges[1:] - edges[:-1]
    draws = hash32(np.arange(count, dtype=np.uint32) ^ np.uint32(seed)).astype(np.uint64)
    return (edges[:-1] + (draws * sizes >> np.uint64(32))).astype(np.uint32)
