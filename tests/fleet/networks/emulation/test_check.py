"""What chance alone does to a measured figure."""

from __future__ import annotations

import math
import statistics

import pytest

from edgetrain.fleet.networks import Direction
from edgetrain.fleet.networks.emulation.check import jitter_deviation
from edgetrain.fleet.networks.links.model import LinkModel

MS = 1_000_000


def drawn_ms(way: Direction, seed: int, sent_ns: list[int], size: int = 64 + 28) -> list[float]:
    """The emulator's draws of the delays of these datagrams; `size` with headers."""
    model = LinkModel(way, seed)
    return [(model.arrival(at, size) - at) / 1e6 for at in sent_ns]


def test_the_deviation_of_jitter_is_off_by_chance_as_much_as_said() -> None:
    way = Direction(delay_ms=50, jitter_ms=2)
    seconds, sent = 10, [n * MS for n in range(10_000)]
    off = [statistics.pstdev(drawn_ms(way, seed, sent)) / 2 - 1 for seed in range(60)]
    chance = jitter_deviation(way, seconds)
    assert statistics.pstdev(off) == pytest.approx(chance, rel=0.35)
    assert abs(statistics.fmean(off)) < 4 * chance / math.sqrt(60)
