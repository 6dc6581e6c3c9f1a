"""Pieces of whole tiles, and checksums of pieces."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.vectors.ranges import Ranges, TileSums
from edgetrain.vectors.vector import (
    TILE,
    checksum,
    checksum_within,
    in_whole_tiles,
    tile_sum,
    tiles,
)

SIZES = st.integers(0, 2 * TILE + 3) | st.sampled_from([1, TILE - 1, TILE, TILE + 1, 2 * TILE])


@given(st.lists(SIZES, max_size=6), st.randoms(use_true_random=False))
def test_the_same_vector_in_pieces_of_whole_tiles(sizes, random):
    whole = np.random.default_rng(random.randrange(99)).random(sum(sizes)).astype(np.float32)
    borders = np.cumsum([0, *sizes])
    pieces = [whole[a:b] for a, b in itertools.pairwise(borders)]
    found = in_whole_tiles(pieces)
    assert all(piece.size for piece in found)
    assert all(piece.size % TILE == 0 for piece in found[:-1])
    assert np.array_equal(np.concatenate([whole[:0], *found]), whole)
    copied = sum(piece.size for piece in found if not np.shares_memory(piece, whole))
    assert copied <= TILE * len(sizes)


@given(st.integers(0, 3 * TILE), st.integers(0, 3 * TILE))
def test_a_pieces_checksum_follows_from_the_sums_of_the_vectors_tiles(one, other):
    whole = np.random.default_rng(one).random(3 * TILE + 512).astype(np.float32)
    here = slice(min(one, other) // 256 * 256, max(one, other) // 256 * 256)
    sums = [tile_sum(whole[tile]) for tile in tiles(whole.size)]
    wanted = checksum(whole[here], here.start)
    assert checksum_within(whole, here, sums) == checksum_within(whole, here, ()) == wanted
    for count in (1, 2):
        if here.stop - here.start >= 256 * count:
            kept = TileSums(Ranges(here.stop - here.start, count), here.start)
            assert kept.read(whole[here]) == wanted
