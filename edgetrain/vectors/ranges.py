"""The ranges of a vector: those that rounds concern in turn, those that a reducer has, and the
vector's checksum while they change.

Numbers, and sums of tiles: no codec, no round's contributions, no message. Which strategy has how
many ranges is not known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edgetrain.errors import ConfigError
from edgetrain.vectors.blocks import BLOCK, block_count
from edgetrain.vectors.vector import TILE, Vector, combine, tile_sum, tiles


@dataclass(frozen=True)
class Ranges:
    """`count` ranges of a vector of `elements`, as equal as whole blocks allow; round r concerns
    range r % count. One range is the whole vector.

    Borders lie between blocks of BLOCK elements, so the sums of a tile's pieces add up to its own:
    a vector's checksum does not depend on its ranges. ConfigError for more ranges than blocks.
    """

    elements: int
    count: int = 1

    def __post_init__(self) -> None:
        blocks = block_count(self.elements)
        if self.count > max(1, blocks):
            raise ConfigError(
                f"{self.count} ranges of a vector of {self.elements} elements, which has {blocks} "
                f"blocks of {BLOCK}",
                f"take {blocks} or fewer: each range has at least one block",
            )

    def at(self, number: int) -> slice:
        if self.count == 1:
            return slice(0, self.elements)
        blocks = block_count(self.elements)
        start, stop = (blocks * n // self.count * BLOCK for n in (number, number + 1))
        return slice(start, min(stop, self.elements))

    def of(self, round: int) -> slice:
        """The range that a round concerns."""
        return self.at(round % self.count)

    def size(self, round: int) -> int:
        here = self.of(round)
        return int(here.stop - here.start)

    @property
    def largest(self) -> int:
        return max(self.size(number) for number in range(self.count))

    def rounds_before(self, round: int, number: int) -> int:
        """The rounds before `round` that concern the range with this number."""
        return (round - number + self.count - 1) // self.count

    def next_alike(self, round: int, oldest: int) -> int:
        """The first round, of those from `oldest` and `round` on, of the range of `round`."""
        return max(round, oldest + (round - oldest) % self.count)

    def __iter__(self) -> Iterator[slice]:
        """The ranges in order."""
        return (self.at(number) for number in range(self.count))


@dataclass(frozen=True)
class Stretch:
    """The ranges [first, end) of `count` ranges of a vector: what one reducer adds up.

    They follow each other, so a stretch is a view of the vector. Codecs cut at the borders of all
    ranges, so that the bits do not depend on who has which.
    """

    count: int = 1
    first: int = 0
    end: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end <= self.count or self.count < 1:
            raise ConfigError(
                f"the ranges {self.first} to {self.end} of {self.count}: there are none"
            )

    @property
    def is_whole(self) -> bool:
        return self.end - self.first == self.count

    @property
    def is_part(self) -> bool:
        """Whether others have ranges, too."""
        return 0 < self.end - self.first < self.count

    def of(self, elements: int) -> slice:
        """Its slice in a vector of [elements]. Raises ConfigError for more ranges than blocks."""
        ranges = Ranges(elements, self.count)
        if self.first == self.end:
            return slice(0, 0)
        return slice(ranges.at(self.first).start, ranges.at(self.end - 1).stop)

    def turn(self, count: int) -> int:
        """Which of `count` members its reducer sends to first. Each begins with another one: else
        all replies would come to the first member's line at once, and none to the last one's."""
        return -(-self.first * count // self.count)

    def size(self, elements: int) -> int:
        here = self.of(elements)
        return int(here.stop - here.start)

    def pieces(self, elements: int) -> list[slice]:
        """Its ranges, as slices of the stretch, of a vector of [elements]."""
        ranges, start = Ranges(elements, self.count), self.of(elements).start
        found = [ranges.at(number) for number in range(self.first, self.end)]
        return [slice(here.start - start, here.stop - start) for here in found]

    def __str__(self) -> str:
        return f"ranges {self.first} to {self.end} of {self.count}"


def shared(count: int, reducers: int) -> list[Stretch]:
    """`count` ranges shared out among reducers, as equally as whole ranges allow, in order.
    ConfigError for more reducers than ranges."""
    if not 1 <= reducers <= count:
        raise ConfigError(
            f"{reducers} hubs share {count} ranges of the vector",
            f"strategy.ranges = {max(reducers, 16)}, or fewer hubs: each has at least one range",
        )
    borders = [count * number // reducers for number in range(reducers + 1)]
    return [Stretch(count, *each) for each in itertools.pairwise(borders)]


WHOLE = Stretch()
"""The whole vector, in one range."""


class TileSums:
    """The sums of a vector's tiles, kept by ranges: its checksum, without reading the ranges that
    did not change."""

    def __init__(self, ranges: Ranges, start: int = 0) -> None:
        """`start`: where this piece of a vector begins, whose tiles count (`checksum`)."""
        self._ranges, self._start = ranges, start
        self._sums: list[list[int]] = [[] for _ in range(ranges.count)]

    def read(self, vector: Vector) -> int:
        """Sum all of a vector. Returns its checksum."""
        for number, here in enumerate(self._ranges):
            sums = [tile_sum(vector[tile]) for tile in self.tiles(here)]
            checksum = self.replace(number, sums)
        return checksum

    def tiles(self, here: slice) -> Iterator[slice]:
        """The tiles in these elements."""
        start = self._start
        for tile in tiles(start + here.stop, start + here.start):
            yield slice(tile.start - start, tile.stop - start)

    def replace(self, round: int, sums: Iterable[int]) -> int:
        """The range of this round has changed: note the sums of its `tiles`. The checksum."""
        number = round % self._ranges.count
        self._sums[number] = list(sums)
        if self._ranges.count == 1:
            return combine(self._sums[0])
        first = self._start // TILE
        totals = [0] * (-(-(self._start + self._ranges.elements) // TILE) - first)
        for here, pieces in zip(self._ranges, self._sums, strict=True):
            for tile, piece in enumerate(pieces, (self._start + here.start) // TILE - first):
                totals[tile] += piece
        return combine(totals)
