"""The inner loops in NumPy: bit for bit what kernels.c does, in tiles that stay in cache.

One method a kernel. gaps.py reads and writes positions, tiles.py has the arithmetic on one tile;
docs/reference/codecs.md specifies the bytes. Imported by chosen.py only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import (
    CHUNK,
    ENTRIES,
    GAP_BLOCK,
    LEVEL_BLOCK,
    LIMIT,
    SIGN_BLOCK,
    Blocks,
    Bytes,
    Indices,
)
from edgetrain.codecs.kernels.runs import Gaps, encode_positions, position_reader
from edgetrain.codecs.kernels.tiles import (
    BLOCKS_DECODED,
    DECODED,
    LIMIT_BITS,
    MAGNITUDE_BITS,
    TILE,
    apply_to,
    bf16_bits,
    check_codes,
    check_scales,
    fold_lanes,
    from_bf16,
    from_half,
    half_bits,
    largest_of,
    pack_codes,
    quantized,
    scales_of,
    shapes_of,
    tables_of,
    tiles_of,
    unpack_codes,
)
from edgetrain.vectors.vector import Vector

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


class NumpyTwin:
    """The kernels in NumPy. Arrays are flat and contiguous, and are only read unless stated."""

    name = "numpy"

    def few(self, elements: int) -> int:
        """The most entries that may be decoded at once for a part of `elements` elements.

        Decoded entries and scratch then take no more memory than the part itself, or about 32 KiB
        for a small part.
        """
        return max(elements // 4, ENTRIES)

    def stream_add(self, r: Vector, g: Vector) -> None:
        """r += g: twelve bytes an element, the yardstick of the benchmarks."""
        np.add(r, g, out=r)

    def threshold(
        self, r: Vector, g: Vector | None, rank: int, stride: int, seed: int
    ) -> tuple[int, int]:
        """(bits, hits): the rank-th largest magnitude of a sample of r + g, as float32 bits.

        One chunk of 64 elements in `stride` chunks is sampled. `hits` is the number of sampled
        magnitudes that are at least as large.
        """
        groups = np.arange(r.size // CHUNK // stride, dtype=np.uint32)
        offset = wire.hash32(groups ^ np.uint32(seed)).astype(np.uint64) * np.uint64(stride)
        chunks = groups.astype(np.int64) * stride + (offset >> np.uint64(32)).astype(np.int64)
        whole = r.size // CHUNK * CHUNK
        sample = r[:whole].reshape(-1, CHUNK)[chunks]
        if g is not None:
            sample = sample + g[:whole].reshape(-1, CHUNK)[chunks]
        return self.threshold_of(sample.reshape(-1), None, rank)

    def threshold_of(self, r: Vector, g: Vector | None, rank: int) -> tuple[int, int]:
        """The threshold for the rank-th largest magnitude of all of r + g, exactly."""
        total = r if g is None else r + g
        magnitudes = largest_of(total.view(np.uint32) & MAGNITUDE_BITS, rank)
        bits = np.partition(magnitudes, magnitudes.size - rank)[magnitudes.size - rank]
        return int(bits), int(np.count_nonzero(magnitudes >= bits))

    def select(
        self, r: Vector, g: Vector | None, bound: int, zero: bool, room: int = 0
    ) -> tuple[Indices, Vector, int]:
        """r += g, then (positions, values, stopped) of the magnitudes of at least `bound`.

        `bound` is float32 bits. If `zero`, set the selected elements of r to 0. If `room` > 0, stop
        after about that many entries; `stopped` is the first element not searched. The arrays are
        valid until this thread's next call.
        """
        magnitudes, keep = np.empty(TILE, np.int32), np.empty(TILE, np.bool_)
        pieces: list[tuple[Indices, Vector]] = []
        for start, tile in tiles_of(r):
            if g is not None:
                tile += g[start : start + tile.size]
            # All below 2^31: signed comparison is the one that processors have.
            np.bitwise_and(
                tile.view(np.int32), np.int32(MAGNITUDE_BITS), out=magnitudes[: tile.size]
            )
            np.greater(magnitudes[: tile.size], np.int32(bound - 1), out=keep[: tile.size])
            here = keep[: tile.size].nonzero()[0]
            pieces.append((here.astype(np.uint32) + np.uint32(start), tile.take(here)))
            if zero:
                tile[here] = 0
        positions = [p for p, _ in pieces] or [np.empty(0, np.uint32)]
        values = [v for _, v in pieces] or [np.empty(0, np.float32)]
        return np.concatenate(positions), np.concatenate(values), r.size

    def trim(
        self, r: Vector | None, positions: Indices, values: Vector, bound: int, wanted: int
    ) -> tuple[Indices, Vector]:
        """The `wanted` largest entries; `bound` is the smallest magnitude among them.

        If r is given, write the dropped values back to it. May reuse the arrays.
        """
        magnitudes = values.view(np.uint32) & MAGNITUDE_BITS
        keep = magnitudes > bound
        equal = np.flatnonzero(magnitudes == bound)
        keep[equal[: max(0, wanted - int(np.count_nonzero(keep)))]] = True
        if r is not None:
            r[positions[~keep]] = values[~keep]
        return positions[keep], values[keep]

    def gaps_encode(self, positions: Indices, elements: int) -> Bytes:
        """Encode ascending positions below `elements`, at least one, as gaps in block Rice code."""
        return encode_positions(positions, elements)

    def gaps_decode(self, payload: Bytes, count: int, elements: int) -> tuple[Indices, int]:
        """(positions, bytes read). Raises BadPayload."""
        step = max(elements // 32 // GAP_BLOCK * GAP_BLOCK, ENTRIES)
        reader = position_reader(payload, count, elements, step)
        if count <= step:
            return reader.next_positions(), reader.finish()
        positions = np.empty(count, np.uint32)
        for start in range(0, count, step):
            positions[start : start + step] = reader.next_positions()
        return positions, reader.finish()

    def gaps(self, payload: Bytes, count: int, elements: int) -> Gaps:
        """A reader of the same positions, some at a time. Raises BadPayload."""
        return position_reader(payload, count, elements)

    def levels_encode(self, values: Vector, anchor: float, bits: int) -> tuple[Bytes, Vector]:
        """(bytes, decoded values): sign and level planes. Raises EdgetrainError."""
        count, base = values.size, np.float32(anchor)
        blocks = -(-count // LEVEL_BLOCK)
        magnitudes = np.zeros(blocks * LEVEL_BLOCK, np.float32)
        np.abs(values, out=magnitudes[:count])
        if int(magnitudes.view(np.uint32).max(initial=0)) >= LIMIT_BITS:
            raise wire.too_large()
        table = magnitudes.reshape(blocks, LEVEL_BLOCK)
        excess = table - base
        excess.reshape(-1)[count:] = 0
        sizes = np.full(blocks, LEVEL_BLOCK, np.float32)
        sizes[-1] = count - (blocks - 1) * LEVEL_BLOCK
        mean = np.maximum(fold_lanes(excess) / sizes, np.float32(0))
        # Rounded up to 2^100, no decoder would read it.
        stored = np.minimum(bf16_bits(mean), np.uint16((LIMIT_BITS >> 16) - 1))
        mean = from_bf16(stored)[:, None]
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
        """Bytes that `count` values take at the start of a payload. Raises BadPayload."""
        blocks, plane = -(-count // LEVEL_BLOCK), -(-count // 8)
        used = 4 + 2 * blocks + bits * plane
        if payload.size < used:
            raise wire.bad(wire.TRUNCATED)
        if int(payload[:4].copy().view("<u4")[0]) >= LIMIT_BITS:
            raise wire.bad(wire.MAGNITUDE)
        if count % 8 and np.any(
            payload[used - plane * bits : used][plane - 1 :: plane] >> count % 8
        ):
            raise wire.bad(wire.PADDING)
        if np.any(payload[4 : 4 + 2 * blocks].view("<u2") >= LIMIT_BITS >> 16):
            raise wire.bad(wire.MAGNITUDE)
        return used

    def levels_read(
        self, payload: Bytes, count: int, first: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        """out = the values from `first` on, or += weight * these, of `count` checked values.

        `first` is a multiple of LEVEL_BLOCK.
        """
        blocks, plane = -(-count // LEVEL_BLOCK), -(-count // 8)
        anchor = payload[:4].copy().view("<f4")[0]
        planes = payload[4 + 2 * blocks :][: bits * plane].reshape(bits, plane)
        for start, y in tiles_of(out, DECODED):
            block, octet = (first + start) // LEVEL_BLOCK, (first + start) // 8
            rows = -(-y.size // LEVEL_BLOCK)
            stored = payload[4 + 2 * block :][: 2 * rows].copy().view("<u2")
            flags = np.unpackbits(
                planes[:, octet : octet + -(-y.size // 8)], axis=1, count=y.size, bitorder="little"
            )
            level = np.zeros(rows * LEVEL_BLOCK, np.intp)
            for p in range(bits - 1):
                level[: y.size] |= flags[1 + p].astype(np.intp) << p
            points = anchor + from_bf16(stored)[:, None] * _POINTS[bits - 1]
            table = level.reshape(rows, LEVEL_BLOCK)
            values = np.take_along_axis(points, table, axis=1).reshape(-1)[: y.size]
            apply_to(np.where(flags[0], -values, values), y, weight)

    def write_residual(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        """r[positions] = values - sent."""
        r[positions.astype(np.intp)] = values - sent

    def scatter(self, r: Vector, positions: Indices, values: Vector, weight: float | None) -> None:
        """r[positions] = values, or += weight * values."""
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
        """A whole sparse payload, values as 1..4 planes or raw (32).

        If r is given, write the residual to it: values - decoded at the positions.

        Raises EdgetrainError.
        """
        head = wire.put_varint(positions.size)
        if not positions.size:
            return head
        magnitudes = values.view(np.uint32) & MAGNITUDE_BITS
        if int(magnitudes.max()) >= LIMIT_BITS:
            raise wire.too_large()
        head += self.gaps_encode(positions, elements).tobytes()
        if bits == 32:
            if r is not None:
                r[positions.astype(np.intp)] = 0
            return head + values.tobytes()
        anchor = float(magnitudes.min().view(np.float32))
        planes, sent = self.levels_encode(values, anchor, bits)
        if r is not None:
            self.write_residual(r, positions, values, sent)
        return head + planes.tobytes()

    def sparse_head(self, payload: Bytes, elements: int) -> tuple[int, int]:
        """(entries that a sparse payload announces, bytes of that number). Raises BadPayload."""
        count, at = wire.get_varint(payload, 0)
        if count > elements:
            raise wire.bad(wire.COUNT)
        if count == 0 and payload.size != at:
            raise wire.bad(wire.TRAILING)
        if count > 8 * payload.size:
            raise wire.bad(wire.COUNT)
        return count, at

    def sparse_decode(self, payload: Bytes, elements: int, bits: int) -> tuple[Indices, Vector]:
        """(positions, values) of a sparse payload, 8 bytes an entry. Raises BadPayload."""
        count, at = self.sparse_head(payload, elements)
        return self._decode_body(payload[at:], count, elements, bits)

    def sparse_check(self, payload: Bytes, elements: int, bits: int) -> None:
        """Raise BadPayload where `sparse_decode` would, in memory for ENTRIES."""
        count, at = self.sparse_head(payload, elements)
        self._check_body(payload[at:], count, elements, bits)

    def sparse_apply(self, payload: Bytes, bits: int, out: Vector, weight: float | None) -> None:
        """out[positions] = values, or += weight * values, of a checked payload.

        Takes memory for ENTRIES.
        """
        count, at = self.sparse_head(payload, out.size)
        self._apply_body(payload[at:], count, bits, out, weight)

    def sparse_set(self, payload: Bytes, bits: int, out: Vector) -> None:
        """out = what a payload decodes to. BadPayload leaves `out` as it was.

        Entries are kept until all are known to be valid where they are `few`; else the payload is
        read twice, in memory for ENTRIES.
        """
        count, at = self.sparse_head(payload, out.size)
        if count > self.few(out.size):
            self._check_body(payload[at:], count, out.size, bits)
            out[:] = 0
            self._apply_body(payload[at:], count, bits, out, None)
            return
        entries = self._decode_body(payload[at:], count, out.size, bits)
        out[:] = 0
        self.scatter(out, *entries, None)

    def sparse_add(
        self, payloads: Sequence[Bytes], weights: Sequence[float], bits: int, out: Vector
    ) -> None:
        """out += weight * decoded of each payload, in order. BadPayload leaves `out` as it was.

        Takes memory as `sparse_set` does; what counts are the entries of all payloads together.
        """
        heads = [self.sparse_head(payload, out.size) for payload in payloads]
        bodies = [
            (payload[at:], count) for payload, (count, at) in zip(payloads, heads, strict=True)
        ]
        if sum(count for count, _ in heads) > self.few(out.size):
            for body, count in bodies:
                self._check_body(body, count, out.size, bits)
            for (body, count), weight in zip(bodies, weights, strict=True):
                self._apply_body(body, count, bits, out, weight)
            return
        decoded = [self._decode_body(body, count, out.size, bits) for body, count in bodies]
        for entries, weight in zip(decoded, weights, strict=True):
            self.scatter(out, *entries, weight)

    def _decode_body(
        self, body: Bytes, count: int, elements: int, bits: int
    ) -> tuple[Indices, Vector]:
        """(positions, values) of what follows the head of a sparse payload. Raises BadPayload."""
        if count == 0:
            return np.empty(0, np.uint32), np.empty(0, np.float32)
        positions, at = self.gaps_decode(body, count, elements)
        if bits == 32:
            used = 4 * count
            check_raw(body[at:], count)
            values = body[at : at + used].copy().view("<f4")
        else:
            used, values = self.levels_check(body[at:], count, bits), np.empty(count, np.float32)
            self.levels_read(body[at:], count, 0, bits, values, None)
        if at + used != body.size:
            raise wire.bad(wire.TRAILING)
        return positions, values

    def _check_body(self, body: Bytes, count: int, elements: int, bits: int) -> None:
        """Raise BadPayload where `_decode_body` would."""
        if count == 0:
            return
        reader = position_reader(body, count, elements)
        for _ in range(0, count, ENTRIES):
            reader.next_positions()
        at = reader.finish()
        if bits == 32:
            check_raw(body[at:], count)
            at += 4 * count
        else:
            at += self.levels_check(body[at:], count, bits)
        if at != body.size:
            raise wire.bad(wire.TRAILING)

    def _apply_body(
        self, body: Bytes, count: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        """out[positions] = values, or += weight * values, of what was checked."""
        if count == 0:
            return
        reader = position_reader(body, count, out.size)
        planes = 4 + 2 * -(-count // LEVEL_BLOCK) + bits * -(-count // 8)
        coded = body[body.size - (4 * count if bits == 32 else planes) :]
        values = np.empty(min(count, ENTRIES), np.float32)
        for first in range(0, count, ENTRIES):
            here = values[: count - first]
            if bits == 32:
                here[:] = coded[4 * first :][: 4 * here.size].copy().view("<f4")
            else:
                self.levels_read(coded, count, first, bits, here, None)
            self.scatter(out, reader.next_positions(), here, weight)

    def blocks_encode(
        self, r: Vector, g: Vector | None, code: Blocks, noise: int, out: Bytes
    ) -> None:
        """Scales and codes of r to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """
        scale_at, code_at = 0, code.scale_bytes(r.size)
        for start, x in tables_of(r, code.block):
            if g is not None:
                x += g[start : start + x.size].reshape(x.shape)
            scale, level = quantized(x, code, noise, start)
            if g is not None:
                x -= scale[:, None] * level.astype(np.float32)
            for at, part in (
                (scale_at, scale.view(np.uint8)),
                (code_at, pack_codes(level, code.width)),
            ):
                out[at : at + part.size] = part
            scale_at += 4 * scale.size
            code_at += part.size

    def blocks_check(self, payload: Bytes, elements: int, code: Blocks) -> None:
        """Raise BadPayload for bytes that no encoder writes. The caller has checked the length."""
        codes_at = code.scale_bytes(elements)
        check_scales(payload[:codes_at])
        for start, shape in shapes_of(elements, code.block, BLOCKS_DECODED):
            at = codes_at + code.code_bytes(start)
            used = shape[0] * code.code_bytes(shape[1])
            check_codes(payload[at : at + used], shape, code)

    def blocks_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        code: Blocks,
        out: Vector,
        weight: float | None,
    ) -> None:
        """out = decoded from element `first` on, or += weight * that, of a checked payload.

        `first` is a multiple of the block.
        """
        for start, y in tables_of(out, code.block, BLOCKS_DECODED):
            at = code.scale_bytes(elements) + code.code_bytes(first + start)
            used = y.shape[0] * code.code_bytes(y.shape[1])
            level = unpack_codes(payload[at : at + used], y.shape, code.width)
            scale = scales_of(payload, (first + start) // code.block, y.shape[0])
            if weight is None:
                np.multiply(scale, level, out=y)
            else:
                apply_to(scale * level, y, weight)

    def signs_encode(self, r: Vector, g: Vector | None, out: Bytes) -> None:
        """Scales and sign bits of r to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """
        bits = out[4 * -(-r.size // SIGN_BLOCK) :]
        for start, x in tables_of(r, SIGN_BLOCK):
            if g is not None:
                x += g[start : start + x.size].reshape(x.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = fold_lanes(np.abs(x)) / np.float32(x.shape[1])
            if not np.all(scale < LIMIT):
                raise wire.too_large()
            packed = np.packbits(np.signbit(x).reshape(-1), bitorder="little")
            bits[start // 8 :][: packed.size] = packed
            out[4 * (start // SIGN_BLOCK) :][: 4 * scale.size] = scale.view(np.uint8)
            if g is not None:
                x -= np.copysign(scale[:, None], x)

    def signs_check(self, payload: Bytes, elements: int) -> None:
        """Raise BadPayload for bytes that no encoder writes. The caller has checked the length."""
        blocks = -(-elements // SIGN_BLOCK)
        check_scales(payload[: 4 * blocks])
        if elements % 8 and payload[-1] >> (elements % 8):
            raise wire.bad(wire.PADDING)

    def signs_read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        """out = decoded from element `first` on, or += weight * that, of a checked payload.

        `first` is a multiple of SIGN_BLOCK.
        """
        bits = payload[4 * -(-elements // SIGN_BLOCK) :]
        for start, y in tables_of(out, SIGN_BLOCK, BLOCKS_DECODED):
            octets = bits[(first + start) // 8 :][: -(-y.size // 8)]
            flags = np.unpackbits(octets, count=y.size, bitorder="little")
            scale = scales_of(payload, (first + start) // SIGN_BLOCK, y.shape[0])
            apply_to(np.where(flags.reshape(y.shape), -scale, scale), y, weight)

    def planes_encode(self, r: Vector, g: Vector | None, bits: int, out: Bytes) -> None:
        """`levels_encode` of r against zero to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """
        if g is not None:
            r += g
        out[:], sent = self.levels_encode(r, 0.0, bits)
        if g is not None:
            r -= sent

    def halves_encode(self, r: Vector, g: Vector | None, brain: bool, out: Bytes) -> None:
        """binary16 or (brain) bfloat16 of r to `out`. With g: r += g first, r -= decoded after."""
        halves = out.view("<u2")
        for start, x in tiles_of(r):
            if g is not None:
                x += g[start : start + x.size]
            here = halves[start : start + x.size]
            here[:] = bf16_bits(x) if brain else half_bits(x)
            if g is not None:
                x -= from_bf16(here) if brain else from_half(here)

    def halves_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        brain: bool,
        out: Vector,
        weight: float | None,
    ) -> None:
        """out = decoded from element `first` on, or += weight * that, of the right length."""
        halves = np.frombuffer(payload, "<u2", out.size, 2 * first)
        for start, y in tiles_of(out, BLOCKS_DECODED):
            here = halves[start : start + y.size]
            apply_to(from_bf16(here) if brain else from_half(here), y, weight)

    def momentum(self, u: Vector, g: Vector, m: float, scale: float) -> None:
        """u = m * u + scale * g."""
        u *= np.float32(m)
        u += np.float32(scale) * g


def check_raw(payload: Bytes, count: int) -> None:
    """BadPayload unless it begins with `count` float32 below 2^100 in magnitude."""
    if payload.size < 4 * count:
        raise wire.bad(wire.TRUNCATED)
    words = payload[: 4 * count].view("<u4")
    for start in range(0, count, DECODED):
        if np.any((words[start : start + DECODED] & MAGNITUDE_BITS) >= LIMIT_BITS):
            raise wire.bad(wire.MAGNITUDE)
