"""Flat float32 vectors: the types, tiles, and a 64-bit checksum at the speed of memory.

The checksum is the same on every processor and proves in the field that replicas are equal bit for
bit. It detects divergence, not an adversary: each tile of 65,536 elements is summed as 64-bit
integers (any single changed bit changes the sum), and the sums are hashed in order. A caller that
has a tile in cache can sum it there, so that the checksum costs almost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat, contiguous float32 array of shape [elements]."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""The bytes of a payload or a frame. Arrays travel as `memoryview(array)`, without a copy."""

Layout: TypeAlias = Sequence[tuple[str, int, tuple[int, ...]]]
"""(name, first element, shape) of each tensor of a flat vector, in order, without holes."""

TILE = 1 << 16
"""Elements in a tile (256 KiB): two or three of them fit the L2 cache of a Raspberry Pi 4."""

_MODULO = 0xFFFF_FFFF_FFFF_FFFF


def flushes_tiny() -> bool:
    """Whether this processor takes float32 below 1.2e-38 for 0: sums then differ."""
    tiny = np.full(1, 1e-40, np.float32)
    return bool((tiny * np.float32(1) == 0)[0])


def tiles(elements: int, start: int = 0) -> Iterator[slice]:
    """The tiles of the range [start, elements), as slices that end at multiples of TILE; the first
    and the last may be shorter."""
    while start < elements:
        stop = min(start - start % TILE + TILE, elements)
        yield slice(start, stop)
        start = stop


def in_whole_tiles(pieces: Iterable[Vector]) -> list[Vector]:
    """The vector in pieces of whole tiles but for the last: views, or copies if scattered."""
    found: list[Vector] = []
    rest: list[Vector] = []
    lacks = 0
    for piece in pieces:
        if rest:
            rest.append(piece[:lacks])
            lacks, piece = lacks - rest[-1].size, piece[lacks:]
            if lacks:
                continue
            found.append(np.concatenate(rest))
        whole = piece.size // TILE * TILE
        found += [piece[:whole]] if whole else []
        rest = [piece[whole:]] if whole < piece.size else []
        lacks = TILE - piece.size + whole
    if rest:
        found.append(rest[0] if len(rest) == 1 else np.concatenate(rest))
    return found


def tile_sum(tile: Vector) -> int:
    """The sum of one tile's bits, read as 64-bit integers modulo 2**64."""
    even = tile.size & ~1
    total = int(np.add.reduce(tile[:even].view(np.uint64)))
    if even < tile.size:
        total += int(tile[even:].view(np.uint32)[0])
    return total & _MODULO


def combine(sums: Iterable[int]) -> int:
    """The checksum of a vector from the sums of its tiles, in order, modulo 2**64."""
    digest = hashlib.blake2b(digest_size=8)
    for total in sums:
        digest.update((total & _MODULO).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def checksum(vector: Vector, start: int = 0) -> int:
    """The checksum of a vector. Reads it once and allocates nothing. `start`: it is a piece of a
    longer one, from this element on, cut where the tiles of that end."""
    here = tiles(start + vector.size, start)
    return combine(tile_sum(vector[tile.start - start : tile.stop - start]) for tile in here)


def checksum_within(vector: Vector, here: slice, sums: Sequence[int]) -> int:
    """`checksum` of a piece of a vector whose tiles have these `sums`: reads only tiles that lie in
    it in part. () for sums: they are not known."""
    if not sums:
        return checksum(vector[here], here.start)
    return combine(
        tile_sum(vector[tile])
        if tile.start % TILE or tile.stop % TILE
        else sums[tile.start // TILE]
        for tile in tiles(here.stop, here.start)
    )


def all_finite(vector: Vector) -> bool:
    """True if no element is infinite or NaN. Reads it once, allocates nothing."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A finite sum that overflows is reported too: such parameters are as useless as NaN.
        return bool(np.isfinite(np.add.reduce(vector)))


def zeros(elements: int) -> Vector:
    """Zeros that begin at a cache line, which streaming kernels want (up to a tenth faster)."""
    room = np.zeros(elements + 16, np.float32)
    start = -int(room.__array_interface__["data"][0]) % 64 // 4
    return room[start : start + elements]
