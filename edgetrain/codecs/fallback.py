"""The inner loops in NumPy: bit for bit what kernels.c does, in tiles that stay in cache.

Where a sum is taken, lanes and their folding are spelt out, because the order of additions is part
of the result. What the bytes mean stands in docs/codecs.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgetrain.codecs import wire
from edgetrain.codecs.base import Vector
from edgetrain.codecs.kernels import (
    CHUNK,
    ESCAPE,
    GAP_BLOCK,
    LEVEL_BLOCK,
    LIMIT,
    MAX_RICE,
    SIGN_BLOCK,
    TINY,
    Blocks,
    Bytes,
    Indices,
)

Integers: TypeAlias = npt.NDArray[np.int64]
Gaps: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Gaps in columns of GAP_BLOCK, or a number for each column: the longer axis is the inner one."""

TILE = 2**18
MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
_LIMIT_BITS = int(np.float32(LIMIT).view(np.uint32))
_TINY = np.float32(TINY)
_MAGIC = np.float32(12582912.0)

# Lloyd-Max points and edges of the exponential law with mean 1, for 1, 2, 4 and 8 levels.
_POINTS = [
    np.array([1.0], np.float32),
    np.array([0.59362426, 2.59362426], np.float32),
    np.array([0.33007874, 1.17798584, 2.36523436, 4.36523436], np.float32),
    np.array(
        [
            *(0.17534268, 0.57252912, 1.0304672, 1.57116874),
            *(2.23132622, 3.07923332, 4.26648184, 6.26648184),
        ],
        np.float32,
    ),
]
_EDGES = [
    np.array([], np.float32),
    np.array([1.59362426], np.float32),
    np.array([0.75403229, 1.7716101, 3.36523436], np.float32),
    np.array(
        [0.3739359, 0.80149816, 1.30081797, 1.90124748, 2.65527977, 3.67285758, 5.26648184],
        np.float32,
    ),
]


class Fallback:
    """See `kernels.Kernels` for what each does."""

    name = "numpy"

    def stream_add(self, r: Vector, g: Vector) -> None:
        np.add(r, g, out=r)

    def threshold(
        self, r: Vector, g: Vector | None, rank: int, stride: int, seed: int
    ) -> tuple[int, int]:
        groups = np.arange(r.size // CHUNK // stride, dtype=np.uint32)
        offset = hash32(groups ^ np.uint32(seed)).astype(np.uint64) * np.uint64(stride)
        chunks = groups.astype(np.int64) * stride + (offset >> np.uint64(32)).astype(np.int64)
        whole = r.size // CHUNK * CHUNK
        sample = r[:whole].reshape(-1, CHUNK)[chunks]
        if g is not None:
            sample = sample + g[:whole].reshape(-1, CHUNK)[chunks]
        return self.threshold_of(sample.reshape(-1), None, rank)

    def threshold_of(self, r: Vector, g: Vector | None, rank: int) -> tuple[int, int]:
        total = r if g is None else r + g
        magnitudes = _largest(total.view(np.uint32) & MAGNITUDE_BITS, rank)
        bits = np.partition(magnitudes, magnitudes.size - rank)[magnitudes.size - rank]
        return int(bits), int(np.count_nonzero(magnitudes >= bits))

    def select(
        self, r: Vector, g: Vector | None, bound: int, zero: bool, room: int = 0
    ) -> tuple[Indices, Vector, int]:
        magnitudes, keep = np.empty(TILE, np.int32), np.empty(TILE, np.bool_)
        found: list[tuple[Indices, Vector]] = []
        for start, tile in _tiles(r):
            if g is not None:
                tile += g[start : start + tile.size]
            # All below 2^31: signed comparison is the one that processors have.
            np.bitwise_and(
                tile.view(np.int32), np.int32(MAGNITUDE_BITS), out=magnitudes[: tile.size]
            )
            np.greater(magnitudes[: tile.size], np.int32(bound - 1), out=keep[: tile.size])
            here = keep[: tile.size].nonzero()[0]
            found.append((here.astype(np.uint32) + np.uint32(start), tile.take(here)))
            if zero:
                tile[here] = 0
        positions = [p for p, _ in found] or [np.empty(0, np.uint32)]
        values = [v for _, v in found] or [np.empty(0, np.float32)]
        return np.concatenate(positions), np.concatenate(values), r.size

    def trim(
        self, r: Vector | None, positions: Indices, values: Vector, bound: int, wanted: int
    ) -> tuple[Indices, Vector]:
        magnitudes = values.view(np.uint32) & MAGNITUDE_BITS
        keep = magnitudes > bound
        equal = np.flatnonzero(magnitudes == bound)
        keep[equal[: max(0, wanted - int(np.count_nonzero(keep)))]] = True
        if r is not None:
            r[positions[~keep]] = values[~keep]
        return positions[keep], values[keep]

    def gaps_encode(self, positions: Indices, elements: int) -> Bytes:
        here = positions.view(np.int32) if elements < 2**30 else positions.astype(np.int64)
        count, whole, blocks = here.size, elements.bit_length(), -(-here.size // GAP_BLOCK)
        padded = np.zeros(blocks * GAP_BLOCK, here.dtype)
        padded[0] = here[0]
        np.subtract(here[1:], here[:-1], out=padded[1:count])
        padded[1:count] -= 1
        table = np.ascontiguousarray(padded.reshape(blocks, GAP_BLOCK).T)
        rice = _best_parameters(table, count, whole)
        moved = _steps(rice, first_parameter(count, elements))
        quotients = table >> rice
        escaped = quotients >= ESCAPE if int(quotients.max()) >= ESCAPE else None
        if escaped is not None:
            np.minimum(quotients, ESCAPE, out=quotients)
        numbers = np.empty((blocks, 1 + GAP_BLOCK), np.int32)
        numbers[:, 0] = np.where(moved >= 0, 2 * moved, -2 * moved - 1)
        numbers[:, 1:] = quotients.T
        numbers += 1
        ends = np.cumsum(numbers.reshape(-1)[: count + blocks], dtype=np.intp)
        unary = np.zeros(int(ends[-1]) + 1, np.bool_)
        unary[ends] = True
        stream = np.packbits(unary[1:], bitorder="little")
        low = table & ((1 << rice) - 1)
        if escaped is None and int(rice.max()) <= 8:
            packed = _pack_columns(low, rice, count)
        else:
            widths = np.broadcast_to(rice.astype(np.uint8), table.shape)
            if escaped is not None:
                low = np.where(escaped, table, low)
                widths = np.where(escaped, np.uint8(whole), widths)
            packed = _pack_low(low.T.reshape(-1)[:count], widths.T.reshape(-1)[:count])
        head = np.frombuffer(wire.put_varint(stream.size), np.uint8)
        return np.concatenate([head, stream, packed])

    def gaps_decode(self, payload: Bytes, count: int, elements: int) -> tuple[Indices, int]:
        if not 0 < count <= elements:
            raise wire.bad(wire.COUNT)
        unary_bytes, at = wire.get_varint(payload, 0)
        low_at = at + unary_bytes
        if low_at > payload.size:
            raise wire.bad(wire.TRUNCATED)
        blocks = -(-count // GAP_BLOCK)
        ones = np.flatnonzero(np.unpackbits(payload[at:low_at], bitorder="little"))
        if ones.size < count + blocks:
            raise wire.bad(wire.COUNT)
        if ones.size > count + blocks or int(ones[-1]) // 8 + 1 != unary_bytes:
            raise wire.bad(wire.PADDING)
        numbers = np.zeros(blocks * (1 + GAP_BLOCK), np.int64)
        numbers[: ones.size] = _steps(ones, -1) - 1
        table = numbers.reshape(blocks, 1 + GAP_BLOCK)
        zigzag = table[:, 0]
        if int(zigzag.max()) > 2 * MAX_RICE:
            raise wire.bad(wire.PARAMETER)
        moved = np.where(zigzag & 1, -(zigzag + 1) // 2, zigzag // 2)
        parameters = np.cumsum(moved) + first_parameter(count, elements)
        if int(parameters.min()) < 0 or int(parameters.max()) > MAX_RICE:
            raise wire.bad(wire.PARAMETER)
        quotients = table[:, 1:].reshape(-1)[:count]
        if int(quotients.max()) > ESCAPE:
            raise wire.bad(wire.QUOTIENT)
        rice = np.repeat(parameters, GAP_BLOCK)[:count]
        escaped = quotients == ESCAPE
        widths = np.where(escaped, elements.bit_length(), rice)
        low, low_bytes = _unpack_low(payload[low_at:], widths)
        if np.any(escaped & (low >> rice < ESCAPE)):
            raise wire.bad(wire.QUOTIENT)
        gaps = np.where(escaped, low, (quotients << rice) | low)
        positions = np.cumsum(gaps + 1) - 1
        # A gap is below 2^35 and there are fewer than 2^28 of them in any payload, so no sum wraps.
        if int(positions[-1]) >= elements:
            raise wire.bad(wire.INDEX)
        return positions.astype(np.uint32), low_at + low_bytes

    def levels_encode(self, values: Vector, anchor: float, bits: int) -> tuple[Bytes, Vector]:
        count, base = values.size, np.float32(anchor)
        blocks = -(-count // LEVEL_BLOCK)
        magnitudes = np.zeros(blocks * LEVEL_BLOCK, np.float32)
        np.abs(values, out=magnitudes[:count])
        if int(magnitudes.view(np.uint32).max(initial=0)) >= _LIMIT_BITS:
            raise wire.too_large()
        table = magnitudes.reshape(blocks, LEVEL_BLOCK)
        excess = table - base
        excess.reshape(-1)[count:] = 0
        sizes = np.full(blocks, LEVEL_BLOCK, np.float32)
        sizes[-1] = count - (blocks - 1) * LEVEL_BLOCK
        mean = np.maximum(_fold(excess) / sizes, np.float32(0))
        stored = bf16_bits(mean)
        mean = _from_bf16(stored)[:, None]
        level = np.zeros(table.shape, np.uint8)
        sent = np.empty(table.shape, np.float32)
        sent[:] = base + mean * _POINTS[bits - 1][0]
        for edge, point in zip(_EDGES[bits - 1], _POINTS[bits - 1][1:], strict=True):
            above = table > base + mean * edge
            level += above
            np.copyto(sent, base + mean * point, where=above)
        signs, flat = np.signbit(values), level.reshape(-1)[:count]
        signed = sent.reshape(-1)[:count]
        # Or, not a negation where the mask says so: that goes element by element.
        signed.view(np.uint32)[:] |= values.view(np.uint32) & ~MAGNITUDE_BITS
        planes = [np.packbits(signs, bitorder="little")]
        planes += [np.packbits(flat & (1 << p), bitorder="little") for p in range(bits - 1)]
        head = np.array([base], "<f4").view(np.uint8)
        return np.concatenate([head, stored.view(np.uint8), *planes]), signed

    def levels_decode(self, payload: Bytes, count: int, bits: int) -> tuple[Vector, int]:
        blocks, plane = -(-count // LEVEL_BLOCK), -(-count // 8)
        used = 4 + 2 * blocks + bits * plane
        if payload.size < used:
            raise wire.bad(wire.TRUNCATED)
        anchor = payload[:4].copy().view("<f4")
        if int(anchor.view(np.uint32)[0]) >= _LIMIT_BITS:
            raise wire.bad(wire.MAGNITUDE)
        planes = payload[4 + 2 * blocks : used].reshape(bits, plane)
        if count % 8 and np.any(planes[:, -1] >> (count % 8)):
            raise wire.bad(wire.PADDING)
        mean = _from_bf16(payload[4 : 4 + 2 * blocks].copy().view("<u2"))
        if np.any(mean.view(np.uint32) >= _LIMIT_BITS):
            raise wire.bad(wire.MAGNITUDE)
        flags = np.unpackbits(planes, axis=1, count=count, bitorder="little")
        level = np.zeros(blocks * LEVEL_BLOCK, np.intp)
        for p in range(bits - 1):
            level[:count] |= flags[1 + p].astype(np.intp) << p
        points = anchor[0] + mean[:, None] * _POINTS[bits - 1]
        table = level.reshape(blocks, LEVEL_BLOCK)
        values = np.take_along_axis(points, table, axis=1).reshape(-1)[:count]
        return np.where(flags[0], -values, values), used

    def settle(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        r[positions.astype(np.intp)] = values - sent

    def scatter(self, r: Vector, positions: Indices, values: Vector) -> None:
        r[positions.astype(np.intp)] = values

    def sparse_encode(
        self, r: Vector | None, positions: Indices, values: Vector, elements: int, bits: int
    ) -> bytes:
        head = wire.put_varint(positions.size)
        if not positions.size:
            return head
        magnitudes = values.view(np.uint32) & MAGNITUDE_BITS
        if int(magnitudes.max()) >= _LIMIT_BITS:
            raise wire.too_large()
        head += self.gaps_encode(positions, elements).tobytes()
        if bits == 32:
            if r is not None:
                r[positions.astype(np.intp)] = 0
            return head + values.tobytes()
        anchor = float(magnitudes.min().view(np.float32))
        planes, sent = self.levels_encode(values, anchor, bits)
        if r is not None:
            self.settle(r, positions, values, sent)
        return head + planes.tobytes()

    def sparse_decode(self, payload: Bytes, elements: int, bits: int) -> tuple[Indices, Vector]:
        count, at = sparse_count(payload, elements)
        if count == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        positions, used = self.gaps_decode(payload[at:], count, elements)
        at += used
        if bits == 32:
            values, used = raw_values(payload[at:], count), 4 * count
        else:
            values, used = self.levels_decode(payload[at:], count, bits)
        if at + used != payload.size:
            raise wire.bad(wire.TRAILING)
        return positions, values

    def sparse_add(
        self, payloads: Sequence[Bytes], weights: Sequence[float], bits: int, out: Vector
    ) -> None:
        counts = [sparse_count(payload, out.size)[0] for payload in payloads]
        decoded = []
        for payload in payloads:
            entries = self.sparse_decode(payload, out.size, bits)
            if sum(counts) <= 2 * out.size:  # dense messages are decoded again, one at a time
                decoded.append(entries)
        for i, weight in enumerate(weights):
            entries = decoded[i] if decoded else self.sparse_decode(payloads[i], out.size, bits)
            where = entries[0].astype(np.intp)  # NumPy is slower with any other index
            out[where] += np.float32(weight) * entries[1]

    def blocks_encode(
        self, r: Vector, g: Vector | None, code: Blocks, noise: int, out: Bytes
    ) -> None:
        scale_at, code_at = 0, code.scale_bytes(r.size)
        for start, x in _tables(r, code.block):
            if g is not None:
                x += g[start : start + x.size].reshape(x.shape)
            scale, level = _quantize(x, code, noise, start)
            if g is not None:
                x -= scale[:, None] * level.astype(np.float32)
            for at, part in ((scale_at, scale.view(np.uint8)), (code_at, _pack(level, code.width))):
                out[at : at + part.size] = part
            scale_at += 4 * scale.size
            code_at += part.size

    def blocks_decode(
        self, payload: Bytes, code: Blocks, out: Vector, weight: float | None
    ) -> None:
        scales = _scales(payload[: code.scale_bytes(out.size)])
        codes = payload[code.scale_bytes(out.size) :]
        # Two rounds over the tiles: nothing is written before all of it is known to be good.
        for write in (False, True):
            at = 0
            for start, y in _tables(out, code.block):
                used = y.shape[0] * code.code_bytes(y.shape[1])
                if write:
                    level = _unpack(codes[at : at + used], y.shape, code.width)
                    scale = scales[start // code.block :][: y.shape[0]]
                    _apply(scale[:, None] * level.astype(np.float32), y, weight)
                else:
                    _check_codes(codes[at : at + used], y.shape, code)
                at += used

    def signs_encode(self, r: Vector, g: Vector | None, out: Bytes) -> None:
        bits = out[4 * -(-r.size // SIGN_BLOCK) :]
        for start, x in _tables(r, SIGN_BLOCK):
            if g is not None:
                x += g[start : start + x.size].reshape(x.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = _fold(np.abs(x)) / np.float32(x.shape[1])
            if not np.all(scale < LIMIT):
                raise wire.too_large()
            packed = np.packbits(np.signbit(x).reshape(-1), bitorder="little")
            bits[start // 8 :][: packed.size] = packed
            out[4 * (start // SIGN_BLOCK) :][: 4 * scale.size] = scale.view(np.uint8)
            if g is not None:
                x -= np.copysign(scale[:, None], x)

    def signs_decode(self, payload: Bytes, out: Vector, weight: float | None) -> None:
        blocks = -(-out.size // SIGN_BLOCK)
        scales = _scales(payload[: 4 * blocks])
        bits = payload[4 * blocks :]
        if out.size % 8 and bits[-1] >> (out.size % 8):
            raise wire.bad(wire.PADDING)
        for start, y in _tables(out, SIGN_BLOCK):
            flags = np.unpackbits(bits[start // 8 :], count=y.size, bitorder="little")
            scale = scales[start // SIGN_BLOCK :][: y.shape[0], None]
            _apply(np.where(flags.reshape(y.shape), -scale, scale), y, weight)

    def planes_encode(self, r: Vector, g: Vector | None, bits: int, out: Bytes) -> None:
        if g is not None:
            r += g
        out[:], sent = self.levels_encode(r, 0.0, bits)
        if g is not None:
            r -= sent

    def halves_encode(self, r: Vector, g: Vector | None, brain: bool, out: Bytes) -> None:
        halves = out.view("<u2")
        for start, x in _tiles(r):
            if g is not None:
                x += g[start : start + x.size]
            here = halves[start : start + x.size]
            here[:] = bf16_bits(x) if brain else _half_bits(x)
            if g is not None:
                x -= _from_bf16(here) if brain else _from_half(here)

    def halves_decode(self, payload: Bytes, brain: bool, out: Vector, weight: float | None) -> None:
        halves = np.frombuffer(payload, "<u2")
        for start, y in _tiles(out):
            here = halves[start : start + y.size]
            _apply(_from_bf16(here) if brain else _from_half(here), y, weight)

    def momentum(self, u: Vector, g: Vector, m: float, scale: float) -> None:
        u *= np.float32(m)
        u += np.float32(scale) * g


def bf16_bits(values: Vector) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16, ties to even; of a NaN only the sign is kept."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits >> np.uint32(16) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    return np.where((bits & MAGNITUDE_BITS) > 0x7F800000, nan, rounded).astype("<u2")


def _half_bits(values: Vector) -> npt.NDArray[np.uint16]:
    halves = np.clip(values, -65504.0, 65504.0).astype("<f2").view(np.uint16)
    nan = np.signbit(values).astype(np.uint16) << np.uint16(15) | np.uint16(0x7E00)
    return np.where(np.isnan(values), nan, halves)


def _from_half(stored: npt.NDArray[np.uint16]) -> Vector:
    values = stored.view("<f2").astype(np.float32)
    return np.where(np.isnan(values), np.copysign(np.float32(np.nan), values), values)


def hash32(x: Indices) -> Indices:
    """Wellons' lowbias32, a permutation of 32-bit integers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def first_parameter(count: int, elements: int) -> int:
    """The Rice parameter that the first block's is told against: log2 of the mean gap."""
    return min(max((elements // count).bit_length() - 1, 0), MAX_RICE)


def sparse_count(payload: Bytes, elements: int) -> tuple[int, int]:
    """(entries that a sparse payload announces, bytes that this took). Raises BadPayload."""
    count, at = wire.get_varint(payload, 0)
    if count > elements:
        raise wire.bad(wire.COUNT)
    if count == 0 and payload.size != at:
        raise wire.bad(wire.TRAILING)
    if count > 8 * payload.size:
        raise wire.bad(wire.COUNT)
    return count, at


def raw_values(payload: Bytes, count: int) -> Vector:
    """`count` float32 from the start of a payload. Raises BadPayload."""
    if payload.size < 4 * count:
        raise wire.bad(wire.TRUNCATED)
    values = payload[: 4 * count].copy().view("<f4")
    if np.any((values.view(np.uint32) & MAGNITUDE_BITS) >= _LIMIT_BITS):
        raise wire.bad(wire.MAGNITUDE)
    return values


def _steps(
    values: npt.NDArray[np.signedinteger[Any]], before: int
) -> npt.NDArray[np.signedinteger[Any]]:
    """Each value minus the one before it."""
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[:1] -= before
    return steps


def _tiles(vector: Vector) -> Iterator[tuple[int, Vector]]:
    for start in range(0, vector.size, TILE):
        yield start, vector[start : start + TILE]


def _tables(vector: Vector, block: int) -> Iterator[tuple[int, Vector]]:
    """(start, view of whole blocks as rows), then the incomplete last block as one row."""
    step = max(1, TILE // block) * block
    whole = vector.size // block * block
    for start in range(0, whole, step):
        yield start, vector[start : min(start + step, whole)].reshape(-1, block)
    if whole < vector.size:
        yield whole, vector[whole:].reshape(1, -1)


def _fold(table: Vector) -> Vector:
    """Row sums in sixteen lanes, folded 8-4-2-1: the order that the C code adds in."""
    rows, columns = table.shape
    lanes = np.zeros((rows, 16), np.float32)
    whole = columns // 16 * 16
    for j in range(0, whole, 16):
        lanes += table[:, j : j + 16]
    lanes[:, : columns - whole] += table[:, whole:]
    eight = lanes[:, :8] + lanes[:, 8:]
    four = eight[:, :4] + eight[:, 4:]
    total: Vector = (four[:, 0] + four[:, 2]) + (four[:, 1] + four[:, 3])
    return total


def _from_bf16(stored: npt.NDArray[np.uint16]) -> Vector:
    values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(np.isnan(values), np.copysign(np.float32(np.nan), values), values)


def _largest(magnitudes: Indices, rank: int) -> Indices:
    """Those among which are the `rank` largest and their equals: most are left out unranked."""
    some = magnitudes[::16]
    safe = rank // 16 + 8 * math.isqrt(rank // 16 + 1) + 16
    if 4 * safe > some.size:
        return magnitudes
    bound = np.partition(some, some.size - safe)[some.size - safe]
    found = magnitudes[(magnitudes >= bound).nonzero()[0]]
    return found if found.size >= rank else magnitudes


def _best_parameters(gaps: Gaps, count: int, whole: int) -> Gaps:
    """For each column the cheapest of three Rice parameters around the mean bit length.

    No sum is above the sum of all gaps, so none leaves their dtype.
    """
    blocks, kind = gaps.shape[1], gaps.dtype.type
    sizes = np.full(blocks, GAP_BLOCK, kind)
    sizes[-1] = count - (blocks - 1) * GAP_BLOCK
    exponents = gaps.astype(np.float32).view(np.int32) >> 23
    exponents -= 126
    lengths = np.maximum(exponents, 0, out=exponents).sum(axis=0, dtype=kind)
    centre = (10 * lengths + 3 * sizes) // (10 * sizes)
    top = gaps.max(axis=0)
    best: Gaps = centre
    best_cost = np.full(blocks, np.iinfo(kind).max, kind)
    for offset in (-1, 0, 1):
        rice = np.clip(centre + kind(offset), kind(0), kind(MAX_RICE))
        quotients = gaps >> rice
        cost = sizes * (1 + rice) + quotients.sum(axis=0, dtype=kind)
        where = np.flatnonzero(top >> rice >= ESCAPE)
        if where.size:
            over = np.maximum(quotients[:, where] - kind(ESCAPE - 1), 0)
            escaped = np.count_nonzero(over, axis=0).astype(kind)
            cost[where] += escaped * (whole - rice[where] + 1) - over.sum(axis=0, dtype=kind)
        better = cost < best_cost
        best, best_cost = np.where(better, rice, best), np.where(better, cost, best_cost)
    return best


def _pack_low(values: npt.NDArray[np.signedinteger[Any]], widths: npt.NDArray[np.uint8]) -> Bytes:
    """Values of the given widths one after the other, lowest bit first."""
    most = int(widths.max())
    kind, room = (np.uint8, 8) if most <= 8 else (np.uint16, 16) if most <= 16 else (np.uint32, 32)
    octets = values.astype(kind).view(np.uint8).reshape(values.size, room // 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    wanted = np.arange(room, dtype=np.uint8) < widths[:, None]
    return np.packbits(bits[wanted], bitorder="little")


def _pack_columns(low: Gaps, rice: Gaps, count: int) -> Bytes:
    """The same where each column has one width of at most 8: eight values fill whole bytes."""
    width = rice.astype(np.uint16)
    two = low.astype(np.uint16)
    two = two[0::2] | two[1::2] << width
    four = two[0::2].astype(np.uint32)
    four |= two[1::2].astype(np.uint32) << (2 * width).astype(np.uint32)
    eight = four[0::2].astype(np.uint64)
    eight |= four[1::2].astype(np.uint64) << (4 * width).astype(np.uint64)
    octets = np.ascontiguousarray(eight.T).view(np.uint8).reshape(-1, 8)
    widths = np.repeat(rice.astype(np.uint8), GAP_BLOCK // 8)
    stream = octets[np.arange(8, dtype=np.uint8) < widths[:, None]]
    last = count - (rice.size - 1) * GAP_BLOCK
    bits = GAP_BLOCK * int(rice[:-1].sum()) + last * int(rice[-1])
    return stream[: -(-bits // 8)]


def _unpack_low(stream: Bytes, widths: Integers) -> tuple[Integers, int]:
    """(values, bytes read). Raises BadPayload."""
    ends = np.cumsum(widths)
    total = int(ends[-1])
    used = -(-total // 8)
    if used > stream.size:
        raise wire.bad(wire.TRUNCATED)
    if total % 8 and stream[used - 1] >> (total % 8):
        raise wire.bad(wire.PADDING)
    padded = np.zeros(used + 5, np.int64)
    padded[:used] = stream[:used]
    starts = ends - widths
    at, shift = starts >> 3, starts & 7
    values = padded[at]
    for i in range(1, 5):
        values |= padded[at + i] << (8 * i)
    return values >> shift & ((1 << widths) - 1), used


def _scales(stream: Bytes) -> Vector:
    scales = stream.copy().view("<f4")
    if np.any(scales.view(np.uint32) >= _LIMIT_BITS):
        raise wire.bad(wire.MAGNITUDE)
    return scales


def _apply(decoded: Vector, out: Vector, weight: float | None) -> None:
    if weight is None:
        out[:] = decoded
    else:
        out += np.float32(weight) * decoded


def _quantize(
    x: Vector, code: Blocks, seed: int, start: int
) -> tuple[Vector, npt.NDArray[np.int32]]:
    """(scale of each row, integer levels). Raises EdgetrainError beyond the limit."""
    top = np.abs(x).max(axis=1)
    if int(np.ascontiguousarray(top).view(np.uint32).max()) >= _LIMIT_BITS:
        raise wire.too_large()
    most = np.float32(code.levels)
    small = top < _TINY
    divisor = np.where(small, np.float32(1), top)
    scale = np.where(small, np.float32(0), divisor / most)
    inverse = np.where(small, np.float32(0), most / divisor)[:, None]
    if not code.stochastic:
        return scale, ((x * inverse + _MAGIC) - _MAGIC).astype(np.int32)
    place = np.arange(start, start + x.size, dtype=np.uint32).reshape(x.shape)
    noise = (hash32(place ^ np.uint32(seed)) >> np.uint32(8)).astype(np.float32)
    level = (x * inverse + noise * np.float32(2**-24) + most).astype(np.int32)
    return scale, np.minimum(level, 2 * code.levels) - np.int32(code.levels)


def _pack(level: npt.NDArray[np.int32], width: int) -> Bytes:
    rows, m = level.shape
    if width == 8:
        bytes_: Bytes = level.astype(np.int8).view(np.uint8).reshape(-1)
        return bytes_
    if width == 4:
        nibbles = np.zeros((rows, m + m % 2), np.uint8)
        nibbles[:, :m] = level + 8
        pairs: Bytes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).reshape(-1)
        return pairs
    run = (m + 4) // 5
    trits = np.zeros((rows, 5 * run), np.uint8)
    trits[:, :m] = level + 1
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[None, :, None]
    fives: Bytes = (trits.reshape(rows, 5, run) * powers).sum(axis=1, dtype=np.uint8)
    return fives.reshape(-1)


def _unpack(codes: Bytes, shape: tuple[int, ...], width: int) -> npt.NDArray[np.int16]:
    rows, m = shape
    if width == 8:
        return codes.view(np.int8).reshape(rows, m).astype(np.int16)
    if width == 4:
        pairs = codes.reshape(rows, -1)
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(rows, -1)
        return nibbles[:, :m].astype(np.int16) - np.int16(8)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[None, :, None]
    trits = codes.reshape(rows, 1, -1) // powers % 3
    return trits.reshape(rows, -1)[:, :m].astype(np.int16) - np.int16(1)


def _check_codes(codes: Bytes, shape: tuple[int, ...], code: Blocks) -> None:
    rows, m = shape
    if code.width == 5:
        run = (m + 4) // 5
        padded = _unpack(codes, (rows, 5 * run), 5)
        if np.any(codes >= 243) or np.any(padded[:, m:] != -1):
            raise wire.bad(wire.CODE)
        return
    if code.width == 4 and m % 2 and np.any(codes.reshape(rows, -1)[:, -1] >> 4):
        raise wire.bad(wire.PADDING)
    if np.any(np.abs(_unpack(codes, shape, code.width)) > code.levels):
        raise wire.bad(wire.CODE)
