"""The checksum of base: the same for the same bits however they are read, another for others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.vectors.vector import TILE, checksum, combine, tile_sum, tiles

SIZES = st.one_of(
    st.integers(0, 9), st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 3])
)


def drawn(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@given(size=SIZES, start=st.integers(0, 5))
def test_tiles_cover_the_range_once_and_in_order(size, start):
    found = list(tiles(size + start, start))
    assert [i for tile in found for i in (tile.start, tile.stop)] == sorted(
        i for tile in found for i in (tile.start, tile.stop)
    )
    assert sum(tile.stop - tile.start for tile in found) == size
    assert all(tile.stop % TILE == 0 for tile in found[:-1])
    assert all(tile.stop - tile.start <= TILE for tile in found)


@given(size=SIZES, seed=st.integers(0, 99))
def test_it_depends_on_the_bits_alone(size, seed):
    vector = drawn(size, seed)
    room = np.zeros(size + 3, np.float32)
    unaligned = room[1 : size + 1]
    unaligned[:] = vector
    assert checksum(vector) == checksum(vector.copy()) == checksum(unaligned)
    assert checksum(vector) == combine(tile_sum(vector[tile]) for tile in tiles(size))
    assert 0 <= checksum(vector) < 1 << 64


@given(size=SIZES.filter(bool), seed=st.integers(0, 99), data=st.data())
def test_a_flipped_bit_changes_it(size, seed, data):
    vector = drawn(size, seed)
    before = checksum(vector)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    vector.view(np.uint32)[at] ^= np.uint32(1 << bit)
    assert checksum(vector) != before


def test_zero_and_minus_zero_differ():
    zero = np.zeros(4, np.float32)
    assert checksum(zero) != checksum(-zero)


def test_tiles_that_change_places_change_it():
    vector = drawn(2 * TILE, 1)
    assert checksum(vector) != checksum(np.roll(vector, TILE))


def test_not_a_number_is_told_apart_by_its_bits():
    vector = np.zeros(2, np.float32)
    vector.view(np.uint32)[0] = 0x7FC0_0000
    one = checksum(vector)
    vector.view(np.uint32)[0] = 0x7FC0_0001
    assert checksum(vector) != one


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0xB4B2797457A0A6E4),
        ([1.0], 0x5F24CBE05E804EDF),
        ([1.0, -2.0, 0.5], 0x4168250B4E0995C5),
    ],
)
def test_vectors_written_down(values, expected):
    # Written down so that another version, or another machine, cannot quietly disagree.
    assert checksum(np.array(values, np.float32)) == expected


def test_nothing_is_allocated_and_nothing_written():
    vector = drawn(TILE + 1, 3)
    vector.flags.writeable = False
    checksum(vector)
