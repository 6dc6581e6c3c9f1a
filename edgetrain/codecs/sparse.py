"""Codecs that send few elements: top-k by magnitude, and random ones.

Another codec may code the kept values: `topk(0.01) | q2`. The payload of top-k is a count, the
positions as gaps in block Rice code, and the values (docs/reference/codecs.md). A part holds about
16384 entries, and decoding can start at any part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from edgetrain.codecs.base import Codec, as_bytes, check_vector
from edgetrain.codecs.blocks import Planes
from edgetrain.codecs.dense import Dense
from edgetrain.codecs.fixed import Ranged, sample_seed, whole_seed
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import CHUNK, ENTRIES, LIMIT, Bytes, Indices
from edgetrain.codecs.kernels.wire import hash32
from edgetrain.errors import BadPayload, ConfigError
from edgetrain.vectors.vector import Buffer, Vector

SAMPLED_HITS = 1500
"""Expected hits from which the threshold of a sample is used directly (2.6 % off, typically)."""
LEAST_STRIDE = 64
MAX_STRIDE = 256
"""The sample is one chunk of 64 elements in at most this many. If one in LEAST_STRIDE has too few
hits, a sample only bounds the threshold from below, and the elements above are ranked."""
MOST_ERROR = 0.04
"""Standard error of the share up to which the threshold of a sample is used; where large magnitudes
stand together (rows of an embedding), a sample of chunks says less."""
LOOKED_AT = 2048
"""Chunks from which that error is estimated, at most."""
GUARD_STRIDE = 256
ROOM = 2**20
"""Entries that one `select` may return when the whole vector is searched."""
SMALL = 2**16
"""Vectors of up to this many elements are ranked without a sample."""
RAW_BITS = 32


def check_density(name: str, density: float) -> float:
    """Return `density`; raise ConfigError unless it is in (0, 1]."""
    if not 0 < density <= 1:
        raise ConfigError(f"{name} keeps a share in (0, 1] of the elements, not {density:g}")
    return density


def part_for(density: float) -> int:
    """Elements of a part with about 16384 entries at this density: 2^18 to 2^22."""
    return 1 << min(max(round(math.log2(16384 / density)), 18), 22)


def _room(values: Ranged, count: int) -> int:
    return values.max_bytes(count) if count else 0


class Values:
    """Coding of kept values: by the kernels (planes, raw float32) or by any dense codec."""

    def __init__(self, codec: Ranged) -> None:
        self.codec = codec
        self.fused_bits = (
            codec.bits
            if isinstance(codec, Planes)
            else RAW_BITS
            if isinstance(codec, Dense)
            else None
        )
        # Planes end a small factor above the limit of their scales, whatever these are.
        self._limit = LIMIT if isinstance(codec, Dense) else 2 * LIMIT
        self._any = isinstance(codec, Planes)

    def encode(self, values: Vector, salt: int) -> tuple[Buffer, Vector]:
        """(payload, decoded values). Raises EdgetrainError for NaN and infinity."""
        if not np.all(np.abs(values) < LIMIT):
            raise wire.too_large()
        payload = self.codec.encode_part(values, salt)
        sent = np.empty_like(values)
        self.codec.decode(payload, sent)
        return payload, sent

    def check(self, payload: Bytes, count: int) -> None:
        """Raise BadPayload unless the payload holds `count` values and nothing else."""
        self.codec.check(payload.data, count)
        if self._any:
            return
        values = np.empty(min(count, ENTRIES), np.float32)
        for first in range(0, count, ENTRIES):
            here = values[: count - first]
            self.codec.read(payload, count, first, here, None)
            self._check(here)

    def decode(self, payload: Bytes, count: int) -> Vector:
        """The `count` values of a payload of values only. Raises BadPayload."""
        self.codec.check(payload.data, count)
        values = np.empty(count, np.float32)
        self.codec.read(payload, count, 0, values, None)
        for first in range(0, 0 if self._any else count, 4 * ENTRIES):
            self._check(values[first : first + 4 * ENTRIES])
        return values

    def _check(self, values: Vector) -> None:
        if not np.all(np.abs(values) < self._limit):
            raise wire.bad(wire.MAGNITUDE)


class TopK(Codec):
    """The largest magnitudes of the whole vector: a share `density` of the elements.

    If a sample holds 1500 hits, its threshold is used, and the share is met within a few percent.
    Otherwise, and always with `exact`, round(density * elements) are kept, at least 1; of equal
    magnitudes the first. Zeros are never sent.
    Bound: other elements decode to 0 and are not larger than any kept one; kept ones are within
    the bound of `values`. See also Aji 2017, Stich 2018 (contraction with feedback).
    """

    few_elements = True

    def __init__(self, density: float, values: Ranged | None = None, exact: bool = False) -> None:
        """`values` codes the kept values: any dense codec of fixed size, by default fp32."""
        self.density = check_density("topk", density)
        self.exact = exact
        self.values = Values(values or Dense())
        self.part_elements = part_for(density)
        options = f"{density!r}, exact" if exact else f"{density!r}"
        tail = "" if values is None or values.name == "fp32" else f" | {values.name}"
        self.name = f"topk({options}){tail}"

    def at_density(self, density: float) -> TopK:
        """This codec at another density; this one decodes its payloads, of the same parts."""
        other = TopK(density, self.values.codec, self.exact)
        other.part_elements = self.part_elements
        return other

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        return self._encode(vector, None, salt)

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        return self._encode(residual, vector, salt)

    def wanted(self, elements: int) -> int:
        """Number of elements kept of a vector of `elements`."""
        return min(elements, max(1, round(self.density * elements)))

    def check(self, payload: Buffer, elements: int) -> None:
        self._check_size(len(payload), elements)
        content, run, bits = as_bytes(payload), kernels.current(), self.values.fused_bits
        if bits:
            run.sparse_check(content, elements, bits)
        else:
            self._check_body(*self._split(content, elements), elements)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        content, run, bits = as_bytes(payload), kernels.current(), self.values.fused_bits
        if weight is None:
            out[:] = 0
        if bits:
            run.sparse_apply(content, bits, out, weight)
        else:
            self._apply_body(*self._split(content, out.size), weight, out)

    def decode(self, payload: Buffer, out: Vector) -> None:
        self._check_size(len(payload), out.size)
        content, run, bits = as_bytes(payload), kernels.current(), self.values.fused_bits
        if bits:
            run.sparse_set(content, bits, out)
            return
        body, count = self._split(content, out.size)
        if count > run.few(out.size):
            self._check_body(body, count, out.size)
            out[:] = 0
            self._apply_body(body, count, None, out)
            return
        entries = self._decode_body(body, count, out.size)
        out[:] = 0
        run.scatter(out, *entries, None)

    def add(self, payload: Buffer, weight: float, out: Vector) -> None:
        self.add_many([payload], [weight], out)

    def add_many(self, payloads: Sequence[Buffer], weights: Sequence[float], out: Vector) -> None:
        """Few entries are decoded once and kept until all are known to be valid, many twice."""
        for payload in payloads:
            self._check_size(len(payload), out.size)
        contents, run = [as_bytes(p) for p in payloads], kernels.current()
        if self.values.fused_bits:
            run.sparse_add(contents, weights, self.values.fused_bits, out)
            return
        bodies = [self._split(content, out.size) for content in contents]
        if sum(count for _, count in bodies) > run.few(out.size):
            for body, count in bodies:
                self._check_body(body, count, out.size)
            for (body, count), weight in zip(bodies, weights, strict=True):
                self._apply_body(body, count, weight, out)
            return
        decoded = [self._decode_body(body, count, out.size) for body, count in bodies]
        for entries, weight in zip(decoded, weights, strict=True):
            run.scatter(out, *entries, weight)

    def entries(self, payload: Buffer, elements: int) -> tuple[Indices, Vector]:
        """(positions, values) of a part's payload, 8 bytes an entry. Raises BadPayload."""
        self._check_size(len(payload), elements)
        content, bits = as_bytes(payload), self.values.fused_bits
        if bits:
            return kernels.current().sparse_decode(content, elements, bits)
        return self._decode_body(*self._split(content, elements), elements)

    def _split(self, content: Bytes, elements: int) -> tuple[Bytes, int]:
        """(what follows the head, the number of its entries). Raises BadPayload."""
        count, at = kernels.current().sparse_head(content, elements)
        return content[at:], count

    def _decode_body(self, body: Bytes, count: int, elements: int) -> tuple[Indices, Vector]:
        """(positions, values) where `values` is not fused. Raises BadPayload."""
        if count == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        positions, used = kernels.current().gaps_decode(body, count, elements)
        return positions, self.values.decode(body[used:], count)

    def _check_body(self, body: Bytes, count: int, elements: int) -> None:
        """Raise BadPayload where `_decode_body` would, in memory for ENTRIES."""
        if count:
            gaps = kernels.current().gaps(body, count, elements)
            for _ in range(0, count, ENTRIES):
                gaps.next_positions()
            self.values.check(body[gaps.finish() :], count)

    def _apply_body(self, body: Bytes, count: int, weight: float | None, out: Vector) -> None:
        """out[positions] = values, or += weight * values, of what `_check_body` let pass."""
        if count:
            run = kernels.current()
            gaps = run.gaps(body, count, out.size)
            coded = body[body.size - self.values.codec.max_bytes(count) :]
            values = np.empty(min(count, ENTRIES), np.float32)
            for first in range(0, count, ENTRIES):
                here = values[: count - first]
                self.values.codec.read(coded, count, first, here, None)
                run.scatter(out, gaps.next_positions(), here, weight)

    def max_bytes(self, elements: int) -> int:
        """If all are kept: at most 7 bits an element for positions, and the values.

        A gap of g costs at most g + 1 bits of quotient, its block's parameter averages at most 2
        bits an element, an escape is only taken where it is cheaper than 2 bits an element, and
        a block's own number is at most 61 bits for 32 entries.
        """
        return 16 + (7 * elements + 7) // 8 + _room(self.values.codec, elements)

    def _check_size(self, size: int, elements: int) -> None:
        if size > self.max_bytes(elements):
            raise BadPayload(f"{self.name}: {size} bytes for {elements} elements")

    def pick(
        self, r: Vector, g: Vector | None, zero: bool
    ) -> Iterator[tuple[int, Indices, Vector]]:
        """(first element, positions in the part, values) of the kept elements, part by part.

        Adds g to r. If `zero`, sets the kept elements of r to 0. The arrays are valid until the
        next step.
        """
        if not r.size:
            return
        wanted, seed = self.wanted(r.size), sample_seed(r, g)
        stride = min(wanted // SAMPLED_HITS, MAX_STRIDE)
        if stride >= LEAST_STRIDE and not self.exact:
            sample = r.size // CHUNK // stride * CHUNK
            rank = max(1, wanted * sample // r.size)
            bound, hits = kernels.current().threshold(r, g, rank, stride, seed)
            # Else many magnitudes are equal, and the first will have to do.
            even = hits <= 2 * rank
            if even and _error(r, g, bound, sample // CHUNK, seed) <= MOST_ERROR:
                yield from self._above(r, g, max(bound, 1), zero)
                return
        positions, values = _largest(r, g, wanted, seed, zero)
        starts = np.arange(0, r.size, self.part_elements, dtype=np.int64)
        cuts = [*np.searchsorted(positions, starts).tolist(), positions.size]
        for i, start in enumerate(starts.tolist()):
            here = slice(cuts[i], cuts[i + 1])
            yield start, positions[here] - np.uint32(start), values[here]

    def _above(
        self, r: Vector, g: Vector | None, bound: int, zero: bool
    ) -> Iterator[tuple[int, Indices, Vector]]:
        """One pass, so that each part is coded while it is in cache."""
        for start in range(0, r.size, self.part_elements):
            here = slice(start, start + self.part_elements)
            part = None if g is None else g[here]
            positions, values, _ = kernels.current().select(r[here], part, bound, zero)
            yield start, positions, values

    def _encode(self, r: Vector, g: Vector | None, salt: int) -> list[Buffer]:
        raw = self.values.fused_bits == RAW_BITS  # sent exactly, so the residual is zero
        step, settle = self.part_elements, g is not None and not raw
        payloads = []
        for start, positions, values in self.pick(r, g, zero=g is not None and raw):
            part = r[start : start + step]
            kept = part if settle else None
            payloads.append(self._pack(kept, positions, values, part.size, salt))
        return payloads

    def _pack(
        self, r: Vector | None, positions: Indices, values: Vector, elements: int, salt: int
    ) -> Buffer:
        """The payload of a part. If r is given, write the residual to it."""
        bits = self.values.fused_bits
        if bits:
            return kernels.current().sparse_encode(r, positions, values, elements, bits)
        head = wire.put_varint(positions.size)
        if not positions.size:
            return head
        coded, sent = self.values.encode(values, salt)
        gaps = kernels.current().gaps_encode(positions, elements)
        if r is not None:
            kernels.current().write_residual(r, positions, values, sent)
        return b"".join([head, gaps.tobytes(), coded])


def _error(r: Vector, g: Vector | None, bound: int, sampled: int, seed: int) -> float:
    """Relative standard error of the number of elements above `bound`, from a sample's chunks."""
    total = r.size // CHUNK
    step = max(total // LOOKED_AT, 1)
    chunks = slice(seed % step, None, step)
    here = r[: total * CHUNK].reshape(-1, CHUNK)[chunks]
    here = here.copy() if g is None else here + g[: total * CHUNK].reshape(-1, CHUNK)[chunks]
    above = np.abs(here, out=here).view(np.uint32) >= bound
    hits = np.add.reduce(above.view(np.uint8), axis=1, dtype=np.uint16)
    mean = float(hits.mean())
    return float(hits.std()) / math.sqrt(sampled) / mean if mean else math.inf


def _largest(
    r: Vector, g: Vector | None, wanted: int, seed: int, zero: bool
) -> tuple[Indices, Vector]:
    """(positions, values) of the `wanted` largest magnitudes of r (+= g), in order of position.

    They become zero in r on demand. A sample bounds them from below, so that few have to be
    ranked; where it bounds too high, what was found goes back and the bound is lowered.
    """
    run = kernels.current()
    for rank, sample in _guards(r.size, wanted):
        if sample == r.size:
            bound = run.threshold_of(r, g, rank)[0]
        elif rank > sample:
            bound = 1
        else:
            bound = run.threshold(r, g, rank, GUARD_STRIDE, seed)[0]
        positions, values = _select(r, g, max(bound, 1), zero)
        g = None
        if values.size >= wanted or bound <= 1:
            break
        if zero:
            run.scatter(r, positions, values, None)
    if values.size > wanted:
        bound = run.threshold_of(values, None, wanted)[0]
        return run.trim(r if zero else None, positions, values, bound, wanted)
    return positions, values


def _guards(elements: int, wanted: int) -> list[tuple[int, int]]:
    """(rank, size of the sample) to try in order, until enough elements are found."""
    sample = elements // CHUNK // GUARD_STRIDE * CHUNK
    share = wanted * sample // elements
    if elements <= SMALL or 4 * share > sample:
        return [(wanted, elements)]
    # Neighbours are alike, so a sample of chunks errs some twice as much as its size says.
    rank = share + 6 * math.isqrt(share) + 8
    return [(rank, sample), (4 * rank, sample), (sample + 1, sample)]


def _select(r: Vector, g: Vector | None, bound: int, zero: bool) -> tuple[Indices, Vector]:
    """`select` over a long vector, ROOM entries at a time, copied from the kernels' scratch."""
    pieces: list[tuple[Indices, Vector]] = []
    at = 0
    while at < r.size:
        here = None if g is None else g[at:]
        positions, values, stopped = kernels.current().select(r[at:], here, bound, zero, ROOM)
        pieces.append((positions + np.uint32(at), values.copy()))
        at += stopped
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([p for p, _ in pieces]), np.concatenate([v for _, v in pieces])


class RandK(Codec):
    """Random elements, one from each of `density * elements` equal strata: no positions are sent.

    A part's payload is a seed, a count and the values; both sides derive the positions from the
    seed. Values are not scaled up by 1 / density: feedback sends the rest later, and diverges with
    scaled values. Bound: drawn elements are within the bound of `values`, others decode to 0. See
    Konecny 2016, Stich 2018.
    """

    few_elements = True

    def __init__(self, density: float, values: Ranged | None = None) -> None:
        self.density = check_density("randk", density)
        self.values = Values(values or Dense())
        self.part_elements = part_for(density)
        tail = "" if values is None or values.name == "fp32" else f" | {values.name}"
        self.name = f"randk({density!r}){tail}"

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        return self._encode(vector, settle=False, salt=salt)

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        residual += vector
        return self._encode(residual, settle=True, salt=salt)

    def check(self, payload: Buffer, elements: int) -> None:
        content = as_bytes(payload)
        if content.size < 5 or content.size > self.max_bytes(elements):
            raise BadPayload(f"{self.name}: {content.size} bytes for {elements} elements")
        count, at = wire.get_varint(content, 4)
        if not 0 < count <= elements or content.size - at != _room(self.values.codec, count):
            raise wire.bad(wire.COUNT)
        self.values.check(content[at:], count)

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        content = as_bytes(payload)
        seed = int(content[:4].copy().view("<u4")[0])
        count, at = wire.get_varint(content, 4)
        if weight is None:
            out[:] = 0
        values = np.empty(min(count, ENTRIES), np.float32)
        for first in range(0, count, ENTRIES):
            here = values[: count - first]
            self.values.codec.read(content[at:], count, first, here, None)
            positions = strata(out.size, count, seed, first, first + here.size)
            kernels.current().scatter(out, positions, here, weight)

    def max_bytes(self, elements: int) -> int:
        return 9 + _room(self.values.codec, elements)

    def _encode(self, r: Vector, settle: bool, salt: int) -> list[Buffer]:
        seed = whole_seed(r, salt)
        payloads: list[Buffer] = []
        for i, part in enumerate(self.parts(r)):
            count = min(part.size, max(1, round(self.density * part.size)))
            here = (seed + i) % 2**32
            positions = strata(part.size, count, here, 0, count)
            values = part[positions]
            coded, sent = self.values.encode(values, salt)
            if settle:
                kernels.current().write_residual(part, positions, values, sent)
            payloads.append(b"".join([here.to_bytes(4, "little"), wire.put_varint(count), coded]))
        return payloads


def strata(elements: int, count: int, seed: int, first: int, stop: int) -> Indices:
    """One position in each of the strata first .. stop, of `count` of 0..elements.

    Stratum j is [j * elements // count, (j + 1) * elements // count); integers only, so that all
    machines agree.
    """
    edges = np.arange(first, stop + 1, dtype=np.uint64) * np.uint64(elements) // np.uint64(count)
    sizes = edges[1:] - edges[:-1]
    draws = hash32(np.arange(first, stop, dtype=np.uint32) ^ np.uint32(seed)).astype(np.uint64)
    return (edges[:-1] + (draws * sizes >> np.uint64(32))).astype(np.uint32)
