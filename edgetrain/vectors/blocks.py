"""The blocks of a flat vector in which something is not zero, some at a time.

Where a round touches few rows of a large embedding, work on the blocks that hold them costs little
beside reading the vector. A block has BLOCK elements, the last one what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgetrain.vectors.vector import TILE, Vector, tile_sum

BLOCK = 1 << 8
AT_ONCE = TILE // BLOCK
"""Blocks that are copied together: as many elements as a tile."""
FEW = 4
"""One block in this many may be touched for work on blocks to be worth it."""

Flags: TypeAlias = npt.NDArray[np.bool_]
"""bool [blocks]: whether anything in a block is not zero."""
Place: TypeAlias = npt.NDArray[np.intp] | slice
"""Some whole blocks, by number, or the elements of an incomplete last one."""


def block_count(elements: int) -> int:
    return -(-elements // BLOCK)


def touched_blocks(vector: Vector) -> Flags:
    """The blocks that have any bit set (-0.0 has one). Reads the vector once."""
    whole = vector.size // BLOCK * BLOCK
    flags = np.zeros(block_count(vector.size), np.bool_)
    words = vector[:whole].view(np.uint64).reshape(-1, BLOCK // 2)
    np.not_equal(np.bitwise_or.reduce(words, axis=1), 0, out=flags[: len(words)])
    if whole < vector.size:
        flags[-1] = bool(vector[whole:].view(np.uint32).any())
    return flags


def union_of(touched: Iterable[Flags | None], elements: int) -> Flags:
    """The blocks that any of some vectors of `elements` touches. None: a vector touches all."""
    union = np.zeros(block_count(elements), np.bool_)
    for flags in touched:
        union |= True if flags is None else flags
    return union


def are_few(flags: Flags) -> bool:
    """Whether work on these blocks costs less than work on all."""
    return FEW * int(np.count_nonzero(flags)) <= flags.size


def places(flags: Flags, elements: int) -> Iterator[Place]:
    """The places of the flagged blocks of a vector of `elements`, up to AT_ONCE at a time."""
    numbers = np.flatnonzero(flags)
    whole = elements // BLOCK
    ragged = numbers.size > 0 and int(numbers[-1]) == whole
    numbers = numbers[: numbers.size - ragged]
    for first in range(0, numbers.size, AT_ONCE):
        yield numbers[first : first + AT_ONCE]
    if ragged:
        yield slice(whole * BLOCK, elements)


def read_blocks(vector: Vector, place: Place) -> Vector:
    """A copy of these blocks: [blocks, BLOCK], or flat for an incomplete one."""
    if isinstance(place, slice):
        return vector[place].copy()
    copied: Vector = vector[: vector.size // BLOCK * BLOCK].reshape(-1, BLOCK)[place]
    return copied


def write_blocks(vector: Vector, place: Place, values: Vector) -> None:
    """Write what `read_blocks` has the shape of."""
    if isinstance(place, slice):
        vector[place] = values
    else:
        vector[: vector.size // BLOCK * BLOCK].reshape(-1, BLOCK)[place] = values


def has_negative_zero(vector: Vector, flags: Flags) -> bool:
    """Whether an element of the flagged blocks is -0.0."""
    chunks = (read_blocks(vector, at).view(np.uint32) for at in places(flags, vector.size))
    return any(bool((words == 0x8000_0000).any()) for words in chunks)


def move_sums(sums: list[int], place: Place, before: Vector, after: Vector) -> None:
    """Correct the sums of tiles for blocks that were `before` and are `after`."""
    if isinstance(place, slice):
        moved = [(place.start // TILE, tile_sum(after) - tile_sum(before))]
    else:
        words = (np.add.reduce(x.view(np.uint64), axis=1).tolist() for x in (after, before))
        tiles = (place * BLOCK // TILE).tolist()
        moved = [(t, new - old) for t, new, old in zip(tiles, *words, strict=True)]
    for tile, step in moved:
        sums[tile] = (sums[tile] + step) & 0xFFFF_FFFF_FFFF_FFFF
