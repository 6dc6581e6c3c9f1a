"""Sorted positions as gaps in block Rice code, in NumPy: the bits that kernels.c writes and reads.

Positions and bytes only, no values. docs/reference/codecs.md specifies the code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import (
    ENTRIES,
    ESCAPE,
    GAP_BLOCK,
    MAX_RICE,
    Bytes,
    Indices,
)

Integers: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""Gaps in columns of GAP_BLOCK, or one number a column: the longer axis is the inner one."""
UNARY_BYTES = 1024
"""Bytes of a unary stream unpacked at a time."""


class GapReader:
    def __init__(self, payload: Bytes, count: int, elements: int, step: int = ENTRIES) -> None:
        """`next_positions` returns `step` entries, and takes some 60 bytes for each."""
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
        self._ones: Integers = np.empty(0, np.int64)  # places of ones not used yet
        self._seen = 0  # bytes of the unary stream
        self._before = -1  # the place of the last one used
        self._used = 0  # low bits
        self._next = 0  # the first position after the last entry

    def next_positions(self) -> Indices:
        """The next ENTRIES positions, fewer at the end; valid until the next call.

        Raises BadPayload.
        """
        count = min(self._left, self._step)
        # (Rice parameter, quotient) of each of the next gaps. Raises BadPayload.
        blocks = -(-count // GAP_BLOCK)
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
        rice: Columns = np.repeat(parameters, GAP_BLOCK)[:count].astype(kind)
        quotients: Columns = table[:, 1:].astype(kind).reshape(-1)[:count]
        top, whole = int(quotients.max()), self._elements.bit_length()
        if top > ESCAPE:
            raise wire.bad(wire.QUOTIENT)
        escaped = quotients == ESCAPE if top == ESCAPE else None
        widths = rice if escaped is None else np.where(escaped, rice.dtype.type(whole), rice)
        gaps, used = unpack_low(self._low[self._used >> 3 :], widths, self._used & 7)
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
        """Number of bytes read; call it after the last position. Raises BadPayload."""
        last, bit = divmod(self._before, 8)
        if last + 1 != self._unary.size or self._unary[-1] >> bit > 1:
            raise wire.bad(wire.PADDING)
        last, bit = divmod(self._used, 8)
        if bit and self._low[last] >> bit:
            raise wire.bad(wire.PADDING)
        return self._low_at + last + (bit > 0)

    def _look_ahead(self, wanted: int) -> Integers:
        """The places of the next `wanted` ones, removed from the stream. Raises BadPayload."""
        batches, have = [self._ones], self._ones.size
        while have < wanted and self._seen < self._unary.size:
            octets = self._unary[self._seen : self._seen + UNARY_BYTES]
            ones = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
            ones += 8 * self._seen
            batches.append(ones)
            have += ones.size
            self._seen += octets.size
        if have < wanted:
            raise wire.bad(wire.COUNT)
        together: Integers = np.concatenate(batches)
        self._ones = together[wanted:].copy()
        return together[:wanted]


def first_parameter(count: int, elements: int) -> int:
    """The Rice parameter that the first block's is relative to: log2 of the mean gap."""
    return min(max((elements // count).bit_length() - 1, 0), MAX_RICE)


def _steps(
    values: npt.NDArray[np.signedinteger[Any]], before: int
) -> npt.NDArray[np.signedinteger[Any]]:
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[:1] -= before
    return steps


def _best_parameters(gaps: Columns, count: int, whole: int) -> Columns:
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
    best: Columns = centre
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


def pack_low(values: npt.NDArray[np.signedinteger[Any]], widths: npt.NDArray[np.uint8]) -> Bytes:
    """Values of the given widths one after the other, lowest bit first."""
    most = int(widths.max())
    kind, room = (np.uint8, 8) if most <= 8 else (np.uint16, 16) if most <= 16 else (np.uint32, 32)
    octets = values.astype(kind).view(np.uint8).reshape(values.size, room // 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    wanted = np.arange(room, dtype=np.uint8) < widths[:, None]
    return np.packbits(bits[wanted], bitorder="little")


def _pack_columns(low: Columns, rice: Columns, count: int) -> Bytes:
    """`pack_low` with one width of at most 8 a column: eight values fill whole bytes."""
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


def unpack_low(stream: Bytes, widths: Columns, skip: int) -> tuple[Columns, int]:
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
    values: Columns = padded[starts]
    for i in range(1, 4 if kind is np.int32 else 5):
        starts += 1
        values |= padded[starts] << kind(8 * i)
    values >>= shift
    values &= (kind(1) << widths) - kind(1)
    return values, bits


def encode_gaps(positions: Indices, elements: int) -> Bytes:
    """Ascending positions below `elements`, at least one, as gaps in block Rice code."""
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
        packed = pack_low(low.T.reshape(-1)[:count], widths.T.reshape(-1)[:count])
    head = np.frombuffer(wire.put_varint(stream.size), np.uint8)
    return np.concatenate([head, stream, packed])
