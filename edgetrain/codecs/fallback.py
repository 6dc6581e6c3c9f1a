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
    ENTRIES,
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
DECODED = 2**13
"""Elements that are decoded at a time: what NumPy takes for each is many times its own size."""
BLOCKS_DECODED = 2**15
"""The same for codecs that take little for each."""
UNARY_BYTES = 1024
"""Of a unary stream, unpacked at a time."""
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


class _Gaps:
    """See `kernels.Gaps`."""

    def __init__(self, payload: Bytes, count: int, elements: int, step: int = ENTRIES) -> None:
        """`step` entries come at a time, with some 60 bytes for each."""
        if not 0 < count <= elements:
            raise wire.bad(wire.COUNT)
        unary_bytes, at = wire.get_varint(payload, 0)
        self._low_at = at + unary_bytes
        if self._low_at > payload.size:
            raise wire.bad(wire.TRUNCATED)
        if 8 * unary_bytes < count:
            raise wire.bad(wire.COUNT)
        self._unary, self._low = payload[at : self._low_at], payload[self._low_at :]
        self._left, self._elements, self._step = count, elements, step
        self._rice = first_parameter(count, elements)
        self._ones: Integers = np.empty(0, np.int64)  # places of ones that were not taken yet
        self._seen = 0  # bytes of the unary stream
        self._before = -1  # the place of the last one that was taken
        self._used = 0  # low bits
        self._next = 0  # the first position that the next gap may lead to

    def take(self) -> Indices:
        count = min(self._left, self._step)
        rice, quotients = self._numbers(count, -(-count // GAP_BLOCK))
        top, whole = int(quotients.max()), self._elements.bit_length()
        if top > ESCAPE:
            raise wire.bad(wire.QUOTIENT)
        escaped = quotients == ESCAPE if top == ESCAPE else None
        widths = rice if escaped is None else np.where(escaped, rice.dtype.type(whole), rice)
        gaps, used = _unpack_low(self._low[self._used >> 3 :], widths, self._used & 7)
        self._used += used
        if escaped is not None:
            if np.any(escaped & (gaps >> rice < ESCAPE)):
                raise wire.bad(wire.QUOTIENT)
            quotients[escaped] = 0
        quotients <<= rice
        gaps |= quotients
        # A gap is below 2^35, so no sum wraps.
        positions = np.cumsum(gaps, dtype=np.int64)
        positions += np.arange(self._next, self._next + count)
        self._next = int(positions[-1]) + 1
        if self._next > self._elements:
            raise wire.bad(wire.INDEX)
        self._left -= count
        return positions.astype(np.uint32)

    def finish(self) -> int:
        last, bit = divmod(self._before, 8)
        if last + 1 != self._unary.size or self._unary[-1] >> bit > 1:
            raise wire.bad(wire.PADDING)
        last, bit = divmod(self._used, 8)
        if bit and self._low[last] >> bit:
            raise wire.bad(wire.PADDING)
        return self._low_at + last + (bit > 0)

    def _numbers(self, count: int, blocks: int) -> tuple[Gaps, Gaps]:
        """(Rice parameter, quotient) of each of the next gaps. Raises BadPayload."""
        ones = self._look_ahead(count + blocks)
        numbers = np.zeros(blocks * (1 + GAP_BLOCK), np.int64)
        numbers[: ones.size] = _steps(ones, self._before) - 1
        self._before = int(ones[-1])
        table = numbers.reshape(blocks, 1 + GAP_BLOCK)
        zigzag = table[:, 0]
        if int(zigzag.max()) > 2 * MAX_RICE:
            raise wire.bad(wire.PARAMETER)
        moved = np.where(zigzag & 1, -(zigzag + 1) // 2, zigzag // 2)
        parameters = np.cumsum(moved) + self._rice
        if int(parameters.min()) < 0 or int(parameters.max()) > MAX_RICE:
            raise wire.bad(wire.PARAMETER)
        self._rice = int(parameters[-1])
        # In 32 bits are the eight that a number may begin in, and all that a valid one has.
        narrow = max(int(parameters.max()), self._elements.bit_length()) <= 24
        kind: Any = np.int32 if narrow and int(table.max()) <= ESCAPE + 2 * MAX_RICE else np.int64
        rice: Gaps = np.repeat(parameters, GAP_BLOCK)[:count].astype(kind)
        quotients: Gaps = table[:, 1:].astype(kind).reshape(-1)[:count]
        return rice, quotients

    def _look_ahead(self, wanted: int) -> Integers:
        """The places of that many ones, which are taken. Raises BadPayload."""
        found, have = [self._ones], self._ones.size
        while have < wanted and self._seen < self._unary.size:
            octets = self._unary[self._seen : self._seen + UNARY_BYTES]
            ones = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
            ones += 8 * self._seen
            found.append(ones)
            have += ones.size
            self._seen += octets.size
        if have < wanted:
            raise wire.bad(wire.COUNT)
        together: Integers = np.concatenate(found)
        self._ones = together[wanted:].copy()
        return together[:wanted]


class Fallback:
    """See `kernels.Kernels` for what each does."""

    name = "numpy"

    def few(self, elements: int) -> int:
        return max(elements // 4, ENTRIES)

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
        step = max(elements // 32 // GAP_BLOCK * GAP_BLOCK, ENTRIES)
        reader = _Gaps(payload, count, elements, step)
        if count <= step:
            return reader.take(), reader.finish()
        positions = np.empty(count, np.uint32)
        for start in range(0, count, step):
            positions[start : start + step] = reader.take()
        return positions, reader.finish()

    def gaps(self, payload: Bytes, count: int, elements: int) -> _Gaps:
        return _Gaps(payload, count, elements)

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

    def levels_check(self, payload: Bytes, count: int, bits: int) -> int:
        blocks, plane = -(-count // LEVEL_BLOCK), -(-count // 8)
        used = 4 + 2 * blocks + bits * plane
        if payload.size < used:
            raise wire.bad(wire.TRUNCATED)
        if int(payload[:4].copy().view("<u4")[0]) >= _LIMIT_BITS:
            raise wire.bad(wire.MAGNITUDE)
        if count % 8 and np.any(
            payload[used - plane * bits : used][plane - 1 :: plane] >> count % 8
        ):
            raise wire.bad(wire.PADDING)
        if np.any(payload[4 : 4 + 2 * blocks].view("<u2") >= _LIMIT_BITS >> 16):
            raise wire.bad(wire.MAGNITUDE)
        return used

    def levels_read(
        self, payload: Bytes, count: int, first: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        blocks, plane = -(-count // LEVEL_BLOCK), -(-count // 8)
        anchor = payload[:4].copy().view("<f4")[0]
        planes = payload[4 + 2 * blocks :][: bits * plane].reshape(bits, plane)
        for start, y in _tiles(out, DECODED):
            block, octet = (first + start) // LEVEL_BLOCK, (first + start) // 8
            rows = -(-y.size // LEVEL_BLOCK)
            stored = payload[4 + 2 * block :][: 2 * rows].copy().view("<u2")
            flags = np.unpackbits(
                planes[:, octet : octet + -(-y.size // 8)], axis=1, count=y.size, bitorder="little"
            )
            level = np.zeros(rows * LEVEL_BLOCK, np.intp)
            for p in range(bits - 1):
                level[: y.size] |= flags[1 + p].astype(np.intp) << p
            points = anchor + _from_bf16(stored)[:, None] * _POINTS[bits - 1]
            table = level.reshape(rows, LEVEL_BLOCK)
            values = np.take_along_axis(points, table, axis=1).reshape(-1)[: y.size]
            _apply(np.where(flags[0], -values, values), y, weight)

    def settle(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        r[positions.astype(np.intp)] = values - sent

    def scatter(self, r: Vector, positions: Indices, values: Vector, weight: float | None) -> None:
        for start in range(0, positions.size, DECODED):
            here = slice(start, start + DECODED)
            where = positions[here].astype(np.intp)  # NumPy is slower with any other index
            if weight is None:
                r[where] = values[here]
            else:
                r[where] += np.float32(weight) * values[here]

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
            used = 4 * count
            check_raw(payload[at:], count)
            values = payload[at : at + used].copy().view("<f4")
        else:
            used, values = self.levels_check(payload[at:], count, bits), np.empty(count, np.float32)
            self.levels_read(payload[at:], count, 0, bits, values, None)
        if at + used != payload.size:
            raise wire.bad(wire.TRAILING)
        return positions, values

    def sparse_check(self, payload: Bytes, elements: int, bits: int) -> None:
        count, at = sparse_count(payload, elements)
        if count == 0:
            return
        reader = _Gaps(payload[at:], count, elements)
        for _ in range(0, count, ENTRIES):
            reader.take()
        at += reader.finish()
        if bits == 32:
            check_raw(payload[at:], count)
            at += 4 * count
        else:
            at += self.levels_check(payload[at:], count, bits)
        if at != payload.size:
            raise wire.bad(wire.TRAILING)

    def sparse_apply(self, payload: Bytes, bits: int, out: Vector, weight: float | None) -> None:
        count, at = sparse_count(payload, out.size)
        if count == 0:
            return
        reader = _Gaps(payload[at:], count, out.size)
        planes = 4 + 2 * -(-count // LEVEL_BLOCK) + bits * -(-count // 8)
        coded = payload[payload.size - (4 * count if bits == 32 else planes) :]
        values = np.empty(min(count, ENTRIES), np.float32)
        for first in range(0, count, ENTRIES):
            here = values[: count - first]
            if bits == 32:
                here[:] = coded[4 * first :][: 4 * here.size].copy().view("<f4")
            else:
                self.levels_read(coded, count, first, bits, here, None)
            self.scatter(out, reader.take(), here, weight)

    def sparse_add(
        self, payloads: Sequence[Bytes], weights: Sequence[float], bits: int, out: Vector
    ) -> bool:
        if sum(sparse_count(payload, out.size)[0] for payload in payloads) > self.few(out.size):
            return False
        decoded = [self.sparse_decode(payload, out.size, bits) for payload in payloads]
        for entries, weight in zip(decoded, weights, strict=True):
            self.scatter(out, *entries, weight)
        return True

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

    def blocks_check(self, payload: Bytes, elements: int, code: Blocks) -> None:
        codes_at = code.scale_bytes(elements)
        _check_scales(payload[:codes_at])
        for start, shape in _shapes(elements, code.block, BLOCKS_DECODED):
            at = codes_at + code.code_bytes(start)
            used = shape[0] * code.code_bytes(shape[1])
            _check_codes(payload[at : at + used], shape, code)

    def blocks_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        code: Blocks,
        out: Vector,
        weight: float | None,
    ) -> None:
        for start, y in _tables(out, code.block, BLOCKS_DECODED):
            at = code.scale_bytes(elements) + code.code_bytes(first + start)
            used = y.shape[0] * code.code_bytes(y.shape[1])
            level = _unpack(payload[at : at + used], y.shape, code.width)
            scale = _scales(payload, (first + start) // code.block, y.shape[0])
            if weight is None:
                np.multiply(scale, level, out=y)
            else:
                _apply(scale * level, y, weight)

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

    def signs_check(self, payload: Bytes, elements: int) -> None:
        blocks = -(-elements // SIGN_BLOCK)
        _check_scales(payload[: 4 * blocks])
        if elements % 8 and payload[-1] >> (elements % 8):
            raise wire.bad(wire.PADDING)

    def signs_read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        bits = payload[4 * -(-elements // SIGN_BLOCK) :]
        for start, y in _tables(out, SIGN_BLOCK, BLOCKS_DECODED):
            octets = bits[(first + start) // 8 :][: -(-y.size // 8)]
            flags = np.unpackbits(octets, count=y.size, bitorder="little")
            scale = _scales(payload, (first + start) // SIGN_BLOCK, y.shape[0])
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
        for start, y in _tiles(out, BLOCKS_DECODED):
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


def check_raw(payload: Bytes, count: int) -> None:
    """BadPayload unless it begins with `count` float32 below 2^100 in magnitude."""
    if payload.size < 4 * count:
        raise wire.bad(wire.TRUNCATED)
    words = payload[: 4 * count].view("<u4")
    for start in range(0, count, DECODED):
        if np.any((words[start : start + DECODED] & MAGNITUDE_BITS) >= _LIMIT_BITS):
            raise wire.bad(wire.MAGNITUDE)


def _steps(
    values: npt.NDArray[np.signedinteger[Any]], before: int
) -> npt.NDArray[np.signedinteger[Any]]:
    """Each value minus the one before it."""
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[:1] -= before
    return steps


def _tiles(vector: Vector, tile: int = TILE) -> Iterator[tuple[int, Vector]]:
    for start in range(0, vector.size, tile):
        yield start, vector[start : start + tile]


def _shapes(elements: int, block: int, tile: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(start, shape) of whole blocks as rows, then of the incomplete last block as one row."""
    step = max(1, tile // block) * block
    whole = elements // block * block
    for start in range(0, whole, step):
        yield start, ((min(start + step, whole) - start) // block, block)
    if whole < elements:
        yield whole, (1, elements - whole)


def _tables(vector: Vector, block: int, tile: int = TILE) -> Iterator[tuple[int, Vector]]:
    """(start, view of that shape)."""
    for start, shape in _shapes(vector.size, block, tile):
        yield start, vector[start : start + shape[0] * shape[1]].reshape(shape)


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


def _unpack_low(stream: Bytes, widths: Gaps, skip: int) -> tuple[Gaps, int]:
    """(numbers of these widths, lowest bit first, the bits they take) behind `skip` bits.

    In the type of the widths, which are below 25 where it has 32 bits. Raises BadPayload.
    """
    kind = widths.dtype.type
    starts = np.cumsum(widths, dtype=np.int64)
    bits = int(starts[-1])
    used = -(-(skip + bits) // 8)
    if used > stream.size:
        raise wire.bad(wire.TRUNCATED)
    padded = np.zeros(used + 5, kind)
    padded[:used] = stream[:used]
    starts += skip
    starts -= widths
    shift = starts.astype(kind)
    shift &= kind(7)
    starts >>= 3
    values: Gaps = padded[starts]
    for i in range(1, 4 if kind is np.int32 else 5):
        starts += 1
        values |= padded[starts] << kind(8 * i)
    values >>= shift
    values &= (kind(1) << widths) - kind(1)
    return values, bits


def _check_scales(stream: Bytes) -> None:
    if np.any(stream.view("<u4") >= _LIMIT_BITS):
        raise wire.bad(wire.MAGNITUDE)


def _scales(payload: Bytes, first: int, rows: int) -> Vector:
    """[rows, 1] of the scales that a payload begins with."""
    return payload[4 * first : 4 * (first + rows)].copy().view("<f4")[:, None]


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


def _unpack(codes: Bytes, shape: tuple[int, ...], width: int) -> npt.NDArray[np.signedinteger[Any]]:
    rows, m = shape
    if width == 8:
        return codes.view(np.int8).reshape(rows, m)
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
    level = _unpack(codes, shape, code.width)
    if int(level.max()) > code.levels or int(level.min()) < -code.levels:
        raise wire.bad(wire.CODE)
