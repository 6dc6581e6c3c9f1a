"""Rules that look at each element on its own: the median and the trimmed mean.

Both sort the members' values of every element, by a network of minima and maxima over tiles: the
same instructions for every element, at the speed of vector units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgetrain.strategies.merging.rule import Discounted, Piece
from edgetrain.vectors.vector import Vector

TILE = 1 << 14
"""Elements that are sorted at a time: the rows of ten members and one more fit an L2 cache."""

SUSPICIOUS = 1.25
"""Report a member whose elements are left out this many times as often as by chance."""

Rows = NDArray[np.float32]
"""float32 [members, elements]."""


class TrimmedMean:
    """Each element's mean of the members' values without the `share` lowest and `share` highest.

    Coordinate-wise trimmed mean, Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018,
    definition 2. Of n members ceil(share n) are cut at each end, but never all. With no more than
    that many that lie, every element of the result is within the range of the honest values.
    """

    fewest = 1

    def __init__(self, share: float, keeps_late: bool = True) -> None:
        self.share = share
        self.keeps_late = keeps_late

    def ends(self, members: int) -> int:
        return min(math.ceil(self.share * members - 1e-9), (members - 1) // 2)

    def reported(self, members: int) -> int:
        """Being among how many at an end counts against a member in the report."""
        return self.ends(members)

    def merge_round(
        self, contributions: Sequence[Sequence[Piece]], out: Sequence[Vector]
    ) -> tuple[Discounted, ...]:
        members = len(contributions)
        kept = range(self.ends(members), members - self.ends(members))
        watched = self.reported(members)
        outside = np.zeros(members, np.int64)
        for part, merged in enumerate(out):
            rows = np.empty((members, merged.size), np.float32)
            for contribution, row in zip(contributions, rows, strict=True):
                contribution[part].read(row)
            for start in range(0, merged.size, TILE):
                tile = rows[:, start : start + TILE]
                ordered = in_order(tile, kept.start, watched)
                _mean(ordered[kept.start : kept.stop], merged[start : start + TILE])
                if watched:
                    outside += _outside(tile, ordered[watched], ordered[members - 1 - watched])
        elements = sum(merged.size for merged in out)
        chance = 2 * watched / len(outside)
        shares = outside / max(elements, 1)
        return tuple(
            Discounted(
                i, float(share), f"at an end in {share:.0%} of its elements, by chance {chance:.0%}"
            )
            for i, share in enumerate(shares)
            if share > SUSPICIOUS * chance
        )


class Median(TrimmedMean):
    """Each element's median; of an even number the mean of the middle two.

    Coordinate-wise median, Yin et al., ICML 2018, definition 1. As long as fewer than half of the
    members lie, every element of the result is within the range of the honest values.
    """

    def __init__(self, keeps_late: bool = True) -> None:
        super().__init__(0.5, keeps_late)

    def reported(self, members: int) -> int:
        """The outer quarters: nearly all values are cut from a median, which says nothing."""
        return members // 4


@lru_cache(maxsize=64)
def network(members: int, first: int, watched: int) -> tuple[tuple[int, int], ...]:
    """Comparators (i, j), i < j, that put row k in its sorted place for each k in
    [first, members - first), and for `watched` and its mirror image.

    Batcher's odd-even merge sort for any number of rows (Knuth, TAOCP 3, 5.2.2, algorithm M),
    without the comparators that decide nothing about those rows.
    """
    comparators = []
    top = 1 << max(members - 1, 1).bit_length() - 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            comparators += [(i, i + d) for i in range(members - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    wanted = {*range(first, members - first), watched, members - 1 - watched}
    needed = []
    for i, j in reversed(comparators):
        if i in wanted or j in wanted:
            wanted |= {i, j}
            needed.append((i, j))
    return tuple(reversed(needed))


def in_order(rows: Rows, first: int, watched: int) -> list[Vector]:
    """Copies of the rows, elementwise in order at the places that `network` speaks of."""
    members, elements = rows.shape
    work = np.empty((members + 1, elements), np.float32)
    work[:members] = rows
    ordered = list(work)
    spare = ordered.pop()
    for i, j in network(members, first, watched):
        low, high = ordered[i], ordered[j]
        np.minimum(low, high, out=spare)
        np.maximum(low, high, out=high)
        ordered[i], spare = spare, low
    return ordered


def _mean(rows: Sequence[Vector], out: Vector) -> None:
    # Halves first: values at the end of the range must not overflow in between.
    scale = np.float32(1 / len(rows))
    np.multiply(rows[0], scale, out=out)
    for row in rows[1:]:
        out += row * scale
    if len(rows) == 1:
        out[:] = rows[0]


def _outside(rows: Rows, low: Vector, high: Vector) -> NDArray[np.int64]:
    """Number of elements below `low` or above `high`, for each member."""
    counts: NDArray[np.int64] = ((rows < low) | (rows > high)).sum(axis=1, dtype=np.int64)
    return counts
