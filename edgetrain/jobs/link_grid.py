"""A grid of links and message sizes: the jobs that show how far the simulator's time is off.

Pure: overrides of a job, and the network's profile as a table. Nothing is written or run here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edgetrain import strategies
from edgetrain.errors import ConfigError

PACE_S = 0.02
EVERY = 5
ROUNDS = 12
"""Rounds of a job: the first few open TCP's window, the others show what it has come to."""
MOST_DELAY = 60


@dataclass(frozen=True)
class Axes:
    """The values along each axis of the grid."""

    rtt_ms: tuple[float, ...] = (50, 100, 200, 500)
    """Round trip times."""
    rate_mbit: tuple[float, ...] = (1, 3, 10, 100)
    """The same both ways."""
    kilobytes: tuple[float, ...] = (4, 40, 400)
    """Of one message (1,000 bytes), uncompressed."""
    jitter_percent: tuple[float, ...] = (0, 8)
    """Standard deviation of the delay, in percent of the round trip time."""


RANGES = {
    "rtt_ms": (0.1, 10_000.0),
    "rate_mbit": (0.05, 10_000.0),
    "kilobytes": (0.1, 1_000_000.0),
    "jitter_percent": (0.0, 12.5),
}


@dataclass(frozen=True)
class Point:
    """One point of the grid, under one strategy."""

    strategy: str
    rtt_ms: float
    rate_mbit: float
    kilobytes: float
    jitter_percent: float

    @property
    def network(self) -> str:
        """A name for the network of this point."""
        jitter = f"-jitter{self.jitter_percent:g}" if self.jitter_percent else ""
        return f"rtt{self.rtt_ms:g}-rate{self.rate_mbit:g}{jitter}"

    @property
    def name(self) -> str:
        """A name for the job of this point."""
        jitter = f", jitter {self.jitter_percent:g} %" if self.jitter_percent else ""
        return (
            f"{self.strategy}, {self.rtt_ms:g} ms, {self.rate_mbit:g} Mbit/s, "
            f"{self.kilobytes:g} kB{jitter}"
        )

    @property
    def group(self) -> str:
        """What it has in common with others: the message and the round trip."""
        return f"{self.kilobytes:g} kB, {self.rtt_ms:g} ms"

    @property
    def place(self) -> tuple[str, str, str]:
        """Where it stands in a table of tables: which table, row and column."""
        jitter = f", jitter {self.jitter_percent:g} %" if self.jitter_percent else ""
        row = f"{self.rate_mbit:g} Mbit/s, {self.kilobytes:g} kB"
        return f"{self.strategy}{jitter}", row, f"{self.rtt_ms:g}"

    @property
    def values(self) -> tuple[str, ...]:
        """Its strategy, and its value on each axis, as names of groups."""
        return (
            self.strategy, f"{self.rtt_ms:g} ms", f"{self.rate_mbit:g} Mbit/s",
            f"{self.kilobytes:g} kB", f"jitter {self.jitter_percent:g} %",
        )  # fmt: skip

    @property
    def round_trip_s(self) -> float:
        """What an exchange takes at least: the way there and back, and the message on the line
        twice."""
        return self.rtt_ms / 1000 + 2 * self.kilobytes * 8 / (self.rate_mbit * 1000)

    def profile(self) -> dict[str, Any]:
        """The network's profile, as in a file of `netem/`."""
        both = {"delay_ms": self.rtt_ms / 2, "rate_mbit": self.rate_mbit}
        if self.jitter_percent:
            both["jitter_ms"] = self.rtt_ms * self.jitter_percent / 100
        chosen = "chosen: a point of the grid of links"
        return {
            "title": f"grid: {self.network}",
            "both": both,
            "source": dict.fromkeys(both, chosen),
        }

    def overrides(self) -> tuple[str, ...]:
        """The job of this point, but for `network`: two members, steps of PACE_S."""
        strategy = strategies.find(self.strategy)
        every = EVERY if strategy.has_local_steps else 1
        delay, steps = 0, ROUNDS * every
        if strategy.delays:
            delay = min(max(math.ceil(1.1 * self.round_trip_s / PACE_S), 1), MOST_DELAY)
            steps = ROUNDS * max(every, delay // 2)
        elements = max(round(self.kilobytes * 1000 / 4), 1)
        return (
            f"strategy={self.strategy}", f"delay={delay}", f"every={every}", f"steps={steps}",
            f"pace_s={PACE_S}", "members=2", "task=edgetrain.tasks:sized",
            f"data.elements={elements}", "codec=fp32", "evaluate_every=0",
        )  # fmt: skip


def axes_of(given: dict[str, str | None]) -> Axes:
    """Axes with these comma-separated values in place of the defaults (None: keep). Raises
    ConfigError for what is no number or out of range."""
    found: dict[str, tuple[float, ...]] = {}
    for field in fields(Axes):
        text = given.get(field.name)
        if text is not None:
            flag = f"--{field.name.replace('_', '-')}"
            found[field.name] = tuple(_number(flag, field.name, each) for each in text.split(","))
    return Axes(**found)


def _number(flag: str, name: str, text: str) -> float:
    low, high = RANGES[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # nan, too
        raise ConfigError(f"{flag}: '{text}' is not in range", f"allowed are {low:g} to {high:g}")
    return value


def points(axes: Axes, names: Sequence[str]) -> Iterator[Point]:
    """Every point of the grid under every strategy of these names."""
    every = itertools.product(
        axes.jitter_percent, axes.rtt_ms, sorted(axes.rate_mbit, reverse=True), axes.kilobytes
    )
    for jitter, rtt, rate, kilobytes in every:
        for name in names:
            yield Point(name, rtt, rate, kilobytes, jitter)


def part_of(text: str, every: Sequence[Point]) -> list[Point]:
    """One part of a grid, "2/4" the second of four. Each part has every strategy, message and rate
    about equally often. Raises ConfigError for a text that is not K/N."""
    first, slash, last = text.partition("/")
    if not (slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"--part '{text}' is not a part", "K/N with 1 <= K <= N, such as 1/4")
    number, parts, total = int(first), int(last), len(every)
    # Points that follow each other differ in one axis; a stride without a common divisor mixes all.
    strides = itertools.count(max(round(0.618 * total), 1))
    stride = next(step for step in strides if math.gcd(step, total) == 1)
    low, high = (number - 1) * total // parts, number * total // parts
    return [point for i, point in enumerate(every) if low <= i * stride % total < high]
