"""How far the simulator's time is off over a grid of links, message sizes and strategies.

    python benchmarks/links.py --rtt-ms 50,500 --rate-mbit 1,100 --strategies fedavg
    python benchmarks/links.py --keep links.jsonl                    288 jobs: three hours

Each point is a job of two members behind one kind of link, run emulated and simulated as
benchmarks/calibrate.py does. With --keep each job's line is written as it ends, and a second start
runs only what is missing; what was run with other settings or by another version is run again.
Emulated runs mostly sleep: several grids side by side, with one file, save most of the time as long
as no emulation is marked NO. Below the jobs stand how many are within 5 % under each strategy and
at each value of an axis, and which five are the worst.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import calibration
from calibration import GOOD, CalibratedPair

from edgetrain import __version__, strategies
from edgetrain.errors import ConfigError
from edgetrain.files.toml import to_toml
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.reports.columns import as_text, column
from edgetrain.strategies.spelling import split_list
from edgetrain.training import emulated

PACE_S = 0.02
EVERY = 5
ROUNDS = 12
"""Rounds of a job: the first few open TCP's window, the others show what it has come to."""
MOST_DELAY = 60


Axes = dict[str, tuple[float, ...]]
AXES: Axes = {
    "rtt_ms": (50, 100, 200, 500),
    "rate_mbit": (1, 3, 10, 100),  # the same both ways
    "kilobytes": (4, 40, 400),  # of one message, uncompressed
    "jitter_percent": (0, 8),  # standard deviation of the delay, of the round trip
}
"""The grid: the values along each axis."""
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
        local_steps = EVERY if strategy.has_local_steps else 1
        delay, steps = 0, ROUNDS * local_steps
        if strategy.delays:
            delay = min(max(math.ceil(1.1 * self.round_trip_s / PACE_S), 1), MOST_DELAY)
            steps = ROUNDS * max(local_steps, delay // 2)
        elements = max(round(self.kilobytes * 1000 / 4), 1)
        return (
            f"strategy={self.strategy}", f"delay={delay}", f"local_steps={local_steps}",
            f"steps={steps}", f"pace_s={PACE_S}", "members=2", "task=edgetrain.tasks:sized",
            f"data.elements={elements}", "codec=fp32", "evaluate_every=0",
        )  # fmt: skip


def values_of(name: str, text: str) -> tuple[float, ...]:
    """The comma-separated values of an axis. Raises ConfigError for what is not in its range."""
    low, high = RANGES[name]
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(low <= value <= high for value in values):  # nan, too
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag}: '{text}' is not in range", f"allowed are {low:g} to {high:g}")
    return values


def points(axes: Axes, names: Sequence[str]) -> list[Point]:
    """Every point of the grid under every strategy of these names."""
    jitters, rtts = axes["jitter_percent"], axes["rtt_ms"]
    rates = sorted(axes["rate_mbit"], reverse=True)
    every = itertools.product(jitters, rtts, rates, axes["kilobytes"], names)
    return [Point(name, rtt, rate, size, jitter) for jitter, rtt, rate, size, name in every]


# -- reporting ------------------------------------------------------------------------------------


def summed_up(groups: Mapping[str, Sequence[CalibratedPair]]) -> str:
    """How far off each group of jobs is, a line each."""
    listed = list(groups.items())
    errors = [sorted(abs(each.time_error) for each in pairs) for _, pairs in listed]
    columns = [
        column("jobs", (name for name, _ in listed)),
        column(
            "within", (f"{sum(e <= GOOD for e in found)} of {len(found)}" for found in errors),
            below=f"{GOOD:.0%}",
        ),
        column("median", (f"{statistics.median(found):.1%}" for found in errors)),
        column("worst", (f"{found[-1]:.1%}" for found in errors)),
    ]  # fmt: skip
    return "\n".join(as_text(columns)) + "\n"


def groups_of(
    named: Iterable[tuple[Sequence[str], CalibratedPair]],
) -> dict[str, list[CalibratedPair]]:
    """The pairs of each group, from pairs and the names of the groups that each is in. Groups of
    the first name come first, then those of the second, and so on."""
    placed = [(at, name, pair) for names, pair in named for at, name in enumerate(names)]
    groups: dict[str, list[CalibratedPair]] = {}
    for _, name, pair in sorted(placed, key=lambda each: each[0]):
        groups.setdefault(name, []).append(pair)
    return groups


MOST_SHOWN = 5
"""Of the worst."""


def worst(pairs: Sequence[CalibratedPair]) -> str:
    """The jobs whose simulated time is furthest off, a line each."""
    found = sorted(pairs, key=lambda each: -abs(each.time_error))[:MOST_SHOWN]
    columns = [
        column("worst", (each.name for each in found)),
        column("error", (f"{100 * each.time_error:+.1f} %" for each in found), below="time"),
        column("machine", (f"{100 * each.busy:+.1f} %" for each in found), below="busy"),
    ]
    return "\n".join(as_text(columns)) + "\n"


# -- running -------------------------------------------------------------------------------------


class Kept:
    """The pairs that a file has, a line each; None: nothing is kept. Damaged lines do not count,
    nor do pairs of another version or of runs that failed."""

    def __init__(self, path: Path | None, draws: int) -> None:
        self._path, self._draws = path, draws
        self.pairs: dict[str, CalibratedPair] = {}
        lines = path.read_text("utf-8").splitlines() if path and path.exists() else []
        for line in lines:
            try:
                found = json.loads(line)
                if [found["version"], found["draws"]] == [__version__, draws]:
                    self._add(found["pair"])
            except (ValueError, TypeError, KeyError):
                continue  # cut short: it is run again

    def _add(self, values: Mapping[str, Any]) -> None:
        lists = {key: tuple(each) for key, each in values.items() if isinstance(each, list)}
        pair = CalibratedPair(**{**values, **lists})
        if not pair.incomplete:
            self.pairs[pair.name] = pair

    def add(self, pair: CalibratedPair) -> None:
        """Keep a pair."""
        self.pairs[pair.name] = pair
        if self._path is not None:
            line = {"version": __version__, "draws": self._draws, "pair": asdict(pair)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def plan_of(point: Point, folder: Path) -> Resolved:
    """The planned job of a point. Its network is written into `folder`."""
    path = folder / f"{point.network}.toml"
    path.write_text(to_toml(point.profile()), "utf-8")
    return plan(load(None, [*point.overrides(), f"network={path}"]))


def report(grid: Sequence[Point], pairs: Mapping[str, CalibratedPair]) -> str:
    """How far off the jobs of these points were, those that have a pair."""
    found = [(point.values, pairs[point.name]) for point in grid if point.name in pairs]
    every = [pair for _, pair in found]
    return "\n".join([calibration.text(every), summed_up(groups_of(found)), worst(every)])


def main() -> int:
    """Run what is not kept, then print the report; after Ctrl-C, too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in ("--rtt-ms", "--rate-mbit", "--kilobytes", "--jitter-percent"):
        usual = ",".join(f"{each:g}" for each in AXES[flag[2:].replace("-", "_")])
        parser.add_argument(flag, metavar="N,N", default=usual, help=f"default: {usual}")
    parser.add_argument("--strategies", default="fedavg,dga,sync-sgd")
    parser.add_argument("--draws", type=int, default=8, help="simulated runs where luck decides")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="go on with what it has")
    arguments = parser.parse_args()
    try:
        axes = {name: values_of(name, getattr(arguments, name)) for name in AXES}
        grid = points(axes, split_list(arguments.strategies))
    except ConfigError as error:
        parser.error(str(error))
    kept = Kept(arguments.keep, arguments.draws)
    left = [point for point in grid if point.name not in kept.pairs]
    status = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, point in enumerate(left):
                print(f"{number + 1} of {len(left)}: {point.name} …", file=sys.stderr)
                made, quiet = plan_of(point, Path(folder)), lambda how: None
                kept.add(
                    calibration.run_both(
                        point.name, made, Path(folder), arguments.draws, quiet, time.monotonic
                    )
                )
    except KeyboardInterrupt:
        status = 130
    if any(point.name in kept.pairs for point in grid):
        print(report(grid, kept.pairs))
    return status


if __name__ == "__main__":
    emulated.warm_up()
    sys.exit(main())
