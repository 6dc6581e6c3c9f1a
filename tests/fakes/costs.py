"""What each file of tests costs, as tests/costs.toml has it, and the order of files.

`make test-costs` measures them, or some: `make test-costs TESTS=tests/cli`. Seconds in which no
process of a test could run are counted as waiting, so that a busy machine spoils little.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path(__file__).parents[1] / "costs.toml"
_HEAD = """\
# Seconds that each file of tests takes alone, and its CPU seconds: `make test-costs` measures them.
# A file that is not here takes less than three.
"""
_LEAST_S = 3
_SAMPLE_S = 0.2
_SHOWN = 12


class Cost(NamedTuple):
    """Of a file."""

    wall: float
    cpu: float

    @property
    def waits(self) -> bool:
        """Whether a processor that has this file is idle most of the time."""
        return self.wall > 5 and self.cpu < self.wall / 2

    def __add__(self, other: tuple[float, ...]) -> Cost:
        return Cost(self.wall + other[0], self.cpu + other[1])


def read() -> dict[str, Cost]:
    """The cost of files, by their path from the root, as in the ids of tests."""
    with FILE.open("rb") as file:
        return {name: Cost(*seconds) for name, seconds in tomllib.load(file).items()}


def write(costs: dict[str, Cost]) -> None:
    """Write what was measured; other files keep their costs."""
    costs = {**read(), **costs}
    dear = sorted(name for name, cost in costs.items() if cost.wall >= _LEAST_S)
    rows = [f'"{name}" = [{costs[name].wall:.0f}, {costs[name].cpu:.0f}]\n' for name in dear]
    FILE.write_text(_HEAD + "".join(rows))


def in_order(items: list[pytest.Item], costs: Mapping[str, Cost], seed: int | None) -> None:
    """Sort: the longest files first. With a seed the order is drawn, of the files and of the tests
    in each; long ones are likely to be early, so that no worker is left with one at the end."""
    files = {item.nodeid.partition("::")[0] for item in items}
    seconds = {name: costs.get(name, Cost(0, 0)).wall for name in files}
    if seed is None:
        items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])
        return
    draw = random.Random(seed)
    draw.shuffle(items)
    place = {name: draw.random() / (1 + seconds[name]) for name in sorted(files)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def _after_name(stat: Path) -> list[str]:
    """What follows the name in /proc/…/stat: the state first."""
    return stat.read_text().rpartition(")")[2].split()


def cpu_seconds() -> float:
    """CPU seconds of this process and those it started, as far as they are its children, or have
    been waited for by one that is."""
    ticks = 0
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _after_name(Path(f"/proc/{pid}/stat"))[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def could_run(pid: int, but: int = 0) -> bool:
    """Whether a thread of this process, or of one that it started, runs or waits for a processor:
    another thread than `but`."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                if _after_name(task / "stat")[0] == "R" and int(task.name) != but:
                    return True
                children += (task / "children").read_text().split()
    return any(could_run(int(child), but) for child in children)


class Waiting(threading.Thread):
    """Counts the seconds in which no process of the tests could run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0

    def run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_SAMPLE_S)
            now = time.monotonic()
            if not could_run(os.getpid(), self.native_id or 0):
                self.seconds += now - before
            before = now


def of_reports(reports: Iterable[pytest.TestReport]) -> dict[str, Cost]:
    """What files cost, by their tests' reports. Those that were sampled have their CPU and waiting
    seconds, and are taken to cost the sum where nothing else runs."""
    costs: dict[str, Cost] = {}
    for report in reports:
        name = report.nodeid.partition("::")[0]
        cpu = getattr(report, "cpu_s", 0.0)
        waited = getattr(report, "waited_s", None)
        cost = Cost(report.duration if waited is None else cpu + waited, cpu)
        costs[name] = costs.get(name, Cost(0, 0)) + cost
    return costs


def told(costs: dict[str, Cost], skipped: Iterable[pytest.TestReport]) -> list[str]:
    """Lines: where the time went, and what was skipped for want of what."""
    whole = sum(costs.values(), Cost(0, 0))
    lines = [f"{whole.wall:7.0f} s, of which CPU {whole.cpu:5.0f} s: {len(costs)} files"]
    dear = sorted(costs.items(), key=lambda each: -max(each[1].wall, each[1].cpu))[:_SHOWN]
    lines += [f"{cost.wall:7.0f} s, of which CPU {cost.cpu:5.0f} s: {name}" for name, cost in dear]
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ").partition("\n")[0]
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    return lines + [f"{count:7} skipped: {why}" for why, count in reasons.most_common()]
