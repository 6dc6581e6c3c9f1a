"""Ranges of a vector, and its checksum while they change in turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.vectors.blocks import BLOCK, block_count
from edgetrain.vectors.ranges import Ranges, TileSums
from edgetrain.vectors.vector import TILE, checksum, tile_sum, tiles


@given(elements=st.integers(1, 40 * BLOCK), count=st.integers(1, 40))
def test_ranges_are_the_vector_cut_at_blocks(elements, count):
    count = min(count, block_count(elements))
    ranges = Ranges(elements, count)
    borders = [0, *(here.stop for here in ranges)]
    assert [here.start for here in ranges] == borders[:-1]
    assert borders[-1] == elements
    assert not any(border % BLOCK for border in borders[:-1])
    sizes = [ranges.size(number) for number in range(count)]
    assert min(sizes) > 0
    assert max(sizes) == ranges.largest
    assert max(sizes) - min(sizes) < 2 * BLOCK
    assert ranges.of(count + 1) == ranges.at(1 % count)


@given(round=st.integers(0, 60), oldest=st.integers(0, 60), count=st.integers(1, 9))
def test_a_late_contribution_is_for_the_next_round_of_its_range(round, oldest, count):
    ranges = Ranges(count * BLOCK, count)
    alike = [r for r in range(oldest, 200) if r % count == round % count and r >= round]
    assert ranges.next_alike(round, oldest) == alike[0]
    for number in range(count):
        assert ranges.rounds_before(round, number) == len(
            [r for r in range(round) if r % count == number]
        )


def test_more_ranges_than_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"3 ranges of a vector of 300 .* has 2 blocks of 256"):
        Ranges(300, 3)


@given(
    elements=st.integers(1, 3 * TILE), count=st.integers(1, 7),
    rounds=st.lists(st.integers(0, 20), max_size=8), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_checksum_of_a_vector_does_not_depend_on_its_ranges(elements, count, rounds, seed):
    rng = np.random.default_rng(seed)
    vector = rng.standard_normal(elements).astype(np.float32)
    ranges = Ranges(elements, min(count, block_count(elements)))
    sums = TileSums(ranges)
    assert sums.read(vector) == checksum(vector)
    for round in rounds:
        here = ranges.of(round)
        vector[here] += rng.standard_normal(here.stop - here.start).astype(np.float32)
        pieces = [tile_sum(vector[tile]) for tile in tiles(here.stop, here.start)]
        assert sums.replace(round, pieces) == checksum(vector)
