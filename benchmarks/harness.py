"""What benchmarks share: figures measured again and again, and the machine that they are of.

A benchmark is a module of this folder whose `measured()` yields what `measure` returns; `python -m
benchmarks` prints it. Ratios are taken inside a job, against a reference of the same call, so that
other work on the machine meets both.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from edgetrain.runs import environment

Job = Callable[[], Mapping[str, float]]
"""Does all of it once. Figures by name, with their units."""
QUIET_S = 2.0
"""Without a word for this long, a measurement says where it is."""


@dataclass(frozen=True)
class Figure:
    """One figure of a measurement, over its repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """What one job came to."""

    name: str
    figures: dict[str, Figure]
    repeats: int
    load: float
    """Processes that wanted to run, on average over the last minute of it."""
    others: float = 0.0
    """Cores that other processes of the machine kept busy meanwhile."""

    @property
    def beside(self) -> str:
        """Other work that was going on, in words; "": less than a tenth of a core."""
        return f"beside other work ({self.others:.1f} cores)" if self.others >= 0.1 else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def text(self) -> str:
        """A line for each figure: its median and, of several repeats, its range."""
        width = max(map(len, self.figures))
        lines = [f"{self.name}: {times(self.repeats)}, load {self.load:.1f} {self.beside}".rstrip()]
        for what, figure in self.figures.items():
            line = f"  {what:{width}} {spelled(figure.median):>12}"
            if self.repeats > 1:
                line += f"   ({spelled(figure.low)} to {spelled(figure.high)})"
            lines.append(line)
        return "\n".join(lines)


def measure(name: str, job: Job, repeats: int) -> Measured:
    """Call a job this often: the median of each figure that it returns, and its range. A figure may
    be missing from some of the calls."""
    found: dict[str, list[float]] = defaultdict(list)
    began = said = time.monotonic()
    busy, own = busy_s(), own_s()
    if sys.stderr.isatty():
        progress(f"{name} …")
    for done in range(repeats):
        for what, value in job().items():
            found[what].append(value)
        if done + 1 < repeats and time.monotonic() - said > QUIET_S:
            said = time.monotonic()
            progress(f"{name}: {done + 1} of {repeats}, {said - began:.0f} s")
    progress("")
    figures = {
        what: Figure(statistics.median(values), min(values), max(values))
        for what, values in found.items()
    }
    others = (busy_s() - busy - (own_s() - own)) / max(time.monotonic() - began, 1e-9)
    return Measured(name, figures, repeats, os.getloadavg()[0], max(others, 0.0))


def on_ranks(serve: Callable[..., None], count: int, *given: object) -> Any:
    """What `serve(rank, count, port, *given, path)` writes to the path as JSON, on the first of
    `count` ranks, which are fresh processes; `port` is a store's."""
    from edgetrain.training import processes
    from edgetrain.training.servers.mesh import open_store

    context, store = processes.fork_server([]), open_store()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "found.json"))
        ranks = [
            processes.start(context, f"r{rank}", serve, rank, count, store.port, *given, out)
            for rank in range(count)
        ]
        for each in ranks:
            each.process.join()
            if each.exit_code:
                raise SystemExit(each.error)
        return json.loads(Path(out).read_text())


def busy_s() -> float:
    """CPU seconds of the whole machine since it started."""
    found = psutil.cpu_times()
    return float(found.user + found.nice + found.system)


def own_s() -> float:
    """CPU seconds of this process, and of all that it started."""
    this = psutil.Process()
    return sum(sum(each) for each in map(cpu_times, [this, *this.children(recursive=True)]))


def cpu_times(process: psutil.Process) -> tuple[float, ...]:
    """A process's CPU seconds, and those of its children that have ended."""
    try:
        return tuple(process.cpu_times()[:4])
    except psutil.Error:
        return ()


def progress(text: str) -> None:
    """Say where it is, to people: one line on a terminal, which "" clears."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def machine() -> str:
    """The machine and what runs on it, in a line."""
    found = environment.capture()
    packages = found["packages"]
    return (
        f"{found['cpu'] or found['machine']}, {found['usable_cores']} cores, "
        f"Linux {found['kernel']}, Python {found['python']}, torch {packages['torch']}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def spelled(value: float) -> str:
    """A figure with four digits that say something."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ranged(values: Sequence[float]) -> str:
    """The median of some values and, of several, their range."""
    text = spelled(statistics.median(values))
    if len(values) < 2 or min(values) == max(values):
        return text
    return f"{text} ({spelled(min(values))} to {spelled(max(values))})"


def code_lines(functions: Iterable[Callable[..., Any]]) -> int:
    """Lines of code of some functions in one style, `ast.unparse`'s: a statement a line, without
    docstrings and comments."""
    return sum(_code_lines(inspect.unwrap(function)) for function in functions)


def _code_lines(function: Callable[..., Any]) -> int:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(tree).splitlines() if line.strip()])


def times(count: int) -> str:
    """How often something was measured."""
    return "once" if count == 1 else f"median of {count} (lowest to highest)"
