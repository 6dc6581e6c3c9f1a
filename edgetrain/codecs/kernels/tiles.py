"""A vector tile by tile in NumPy, and the arithmetic on one tile that codecs share.

Sums name their lanes and how these are folded, because the order of additions is part of the
result. The layout of payloads does not belong here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.codecs.kernels import wire
from edgetrain.codecs.kernels.contract import LIMIT, TINY, Blocks, Bytes, Indices
from edgetrain.vectors.vector import Vector

TILE = 2**18
DECODED = 2**13
"""Elements decoded at a time: NumPy needs many times the memory of the elements themselves."""
BLOCKS_DECODED = 2**15
"""Elements decoded at a time by codecs that need less memory an element."""
MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
LIMIT_BITS = int(np.float32(LIMIT).view(np.uint32))
_TINY = np.float32(TINY)
_MAGIC = np.float32(12582912.0)


def bf16_bits(values: Vector) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16, ties to even; of a NaN only the sign is kept."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits >> np.uint32(16) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    return np.where((bits & MAGNITUDE_BITS) > 0x7F800000, nan, rounded).astype("<u2")


def half_bits(values: Vector) -> npt.NDArray[np.uint16]:
    """Round float32 to float16, or to its largest; of a NaN only the sign is kept."""
    halves = np.clip(values, -65504.0, 65504.0).astype("<f2").view(np.uint16)
    nan = np.signbit(values).astype(np.uint16) << np.uint16(15) | np.uint16(0x7E00)
    return np.where(np.isnan(values), nan, halves)


def from_half(stored: npt.NDArray[np.uint16]) -> Vector:
    """float16 as float32; of a NaN only the sign is kept."""
    values = stored.view("<f2").astype(np.float32)
    return np.where(np.isnan(values), np.copysign(np.float32(np.nan), values), values)


def tiles_of(vector: Vector, tile: int = TILE) -> Iterator[tuple[int, Vector]]:
    for start in range(0, vector.size, tile):
        yield start, vector[start : start + tile]


def shapes_of(elements: int, block: int, tile: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(start, shape) of whole blocks as rows, then of the incomplete last block as one row."""
    step = max(1, tile // block) * block
    whole = elements // block * block
    for start in range(0, whole, step):
        yield start, ((min(start + step, whole) - start) // block, block)
    if whole < elements:
        yield whole, (1, elements - whole)


def tables_of(vector: Vector, block: int, tile: int = TILE) -> Iterator[tuple[int, Vector]]:
    """(start, view of the elements in that shape) for each of `shapes_of`."""
    for start, shape in shapes_of(vector.size, block, tile):
        yield start, vector[start : start + shape[0] * shape[1]].reshape(shape)


def fold_lanes(table: Vector) -> Vector:
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


def from_bf16(stored: npt.NDArray[np.uint16]) -> Vector:
    """bf16 as float32; of a NaN only the sign is kept."""
    values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(np.isnan(values), np.copysign(np.float32(np.nan), values), values)


def largest_of(magnitudes: Indices, rank: int) -> Indices:
    """A subset that contains the `rank` largest and their equals, so that fewer are ranked."""
    some = magnitudes[::16]
    safe = rank // 16 + 8 * math.isqrt(rank // 16 + 1) + 16
    if 4 * safe > some.size:
        return magnitudes
    bound = np.partition(some, some.size - safe)[some.size - safe]
    large = magnitudes[(magnitudes >= bound).nonzero()[0]]
    return large if large.size >= rank else magnitudes


def check_scales(stream: Bytes) -> None:
    """Raise BadPayload for a scale that is negative, not finite, or beyond the limit."""
    if np.any(stream.view("<u4") >= LIMIT_BITS):
        raise wire.bad(wire.MAGNITUDE)


def scales_of(payload: Bytes, first: int, rows: int) -> Vector:
    """[rows, 1]: scales `first` .. `first` + `rows` of those at the start of a payload."""
    return payload[4 * first : 4 * (first + rows)].copy().view("<f4")[:, None]


def apply_to(decoded: Vector, out: Vector, weight: float | None) -> None:
    if weight is None:
        out[:] = decoded
    else:
        out += np.float32(weight) * decoded


def quantized(
    x: Vector, code: Blocks, seed: int, start: int
) -> tuple[Vector, npt.NDArray[np.int32]]:
    """(scale of each row, integer levels). Raises EdgetrainError beyond the limit."""
    top = np.abs(x).max(axis=1)
    if int(np.ascontiguousarray(top).view(np.uint32).max()) >= LIMIT_BITS:
        raise wire.too_large()
    most = np.float32(code.levels)
    small = top < _TINY
    divisor = np.where(small, np.float32(1), top)
    scale = np.where(small, np.float32(0), divisor / most)
    inverse = np.where(small, np.float32(0), most / divisor)[:, None]
    if not code.stochastic:
        return scale, ((x * inverse + _MAGIC) - _MAGIC).astype(np.int32)
    place = np.arange(start, start + x.size, dtype=np.uint32).reshape(x.shape)
    noise = (wire.hash32(place ^ np.uint32(seed)) >> np.uint32(8)).astype(np.float32)
    level = (x * inverse + noise * np.float32(2**-24) + most).astype(np.int32)
    return scale, np.minimum(level, 2 * code.levels) - np.int32(code.levels)


def pack_codes(level: npt.NDArray[np.int32], width: int) -> Bytes:
    """Pack levels, row by row: 8 or 4 bits each, or five ternary levels in a byte."""
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


def unpack_codes(
    codes: Bytes, shape: tuple[int, ...], width: int
) -> npt.NDArray[np.signedinteger[Any]]:
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


def check_codes(codes: Bytes, shape: tuple[int, ...], code: Blocks) -> None:
    """Raise BadPayload for a code outside the levels, or an unused bit that is set."""
    rows, m = shape
    if code.width == 5:
        run = (m + 4) // 5
        padded = unpack_codes(codes, (rows, 5 * run), 5)
        if np.any(codes >= 243) or np.any(padded[:, m:] != -1):
            raise wire.bad(wire.CODE)
        return
    if code.width == 4 and m % 2 and np.any(codes.reshape(rows, -1)[:, -1] >> 4):
        raise wire.bad(wire.PADDING)
    level = unpack_codes(codes, shape, code.width)
    if int(level.max()) > code.levels or int(level.min()) < -code.levels:
        raise wire.bad(wire.CODE)
