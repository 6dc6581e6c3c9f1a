"""Speed of training against the round trip: sync-sgd, FedAvg (K = 5) and DGA.

Members are real processes connected by emulated links. Steps are paced to 50 ms, so that the speed
of the machine does not matter unless it is too slow: runs whose steps took longer than their pace,
or whose emulation was late, are counted. Steps per second are relative to the same members without
a network. The steady rate leaves out the first quarter (TCP's slow start) and the wait for the last
replies; the whole run includes both. Then the time to 97 % and the final accuracy at 500 ms, with
plain SGD, over seeds. Fifteen minutes; draws latency.png into this folder.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Measured, measure
from latency_picture import latency_figure

from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import create, read_metrics
from edgetrain.training import emulated

RTTS = (0, 50, 100, 200, 500, 1000)
"""Milliseconds; the first is what the others are compared with."""
MEMBERS, EVERY, PACE_S = 8, 5, 0.05
WAITS = {"sync-sgd": 1.0, "fedavg": 1 / EVERY, "dga": 0.0}
"""Round trips that a step waits for, by strategy."""
CELL_S, MOST_STEPS = 20.0, 300
AT_MS, SEEDS, ACCURACY_STEPS = 500, 3, 280


Runner = Callable[..., dict[str, Any]]
"""Runs a planned job in a folder: emulated, or simulated."""


def network(folder: Path, rtt_ms: float, first: int) -> str:
    """A bare round trip, whose ends begin with `first` segments (0: as Linux does)."""
    if not first:
        return f"rtt-{rtt_ms:g}ms" if rtt_ms else "none"
    path = folder / "begins.toml"
    path.write_text(f"[both]\ndelay_ms={rtt_ms / 2}\nfirst_window={first}\nreceive_kb=1000\n")
    return str(path)


def run(
    folder: Path,
    strategy: str,
    rtt_ms: float,
    seed: int,
    steps: int,
    how: Runner = emulated.run,
    first: int = 0,
) -> dict[str, Any]:
    """The digits job's summary. DGA is the paper's, and its delay covers the round trip, a tenth of
    it and one step more."""
    delay = math.ceil(1.1 * rtt_ms / 1000 / PACE_S) + 1 if strategy == "dga" else 0
    words = [
        f"members={MEMBERS}", f"network={network(folder, rtt_ms, first)}",
        f"pace_s={PACE_S}", f"steps={steps}", f"seed={seed}", "optimizer={name='sgd',lr=0.2}",
        f"strategy={'dga(paper)' if strategy == 'dga' else strategy}",
        f"local_steps={0 if strategy == 'sync-sgd' else EVERY}", f"delay={delay}",
    ]  # fmt: skip
    return how(plan(load(None, words)), folder)


def steady_seconds(folder: Path, steps: int) -> float:
    """Median over members of the mean seconds of a step, between a quarter and the last but one."""
    at: dict[str, dict[int, float]] = {}
    for record in read_metrics(folder, "step"):
        at.setdefault(record["member"], {})[record["step"]] = record["t"]
    first, last = max(1, steps // 4), steps - 1
    return statistics.median((t[last] - t[first]) / (last - first) for t in at.values())


def row(strategy: str, rtt_ms: float, how: Runner = emulated.run, first: int = 0) -> dict[str, Any]:
    """A cell of the table, as the picture takes it."""
    steps = max(40, min(MOST_STEPS, int(CELL_S / (PACE_S + WAITS[strategy] * rtt_ms / 1000))))
    with tempfile.TemporaryDirectory() as name:
        folder = create(Path(name), strategy)
        summary = run(folder, strategy, rtt_ms, 0, steps, how, first)
        steady = 1 / steady_seconds(folder, steps)
        overrun = sum(line["event"] == "overrun" for line in read_metrics(folder, "event"))
    return {
        "strategy": strategy, "rtt_ms": rtt_ms, "steps_per_second": steady, "overrun": overrun,
        "whole_steps_per_second": summary["steps_per_second"],
        "trusted": summary["emulation"]["timing_ok"],
    }  # fmt: skip


def speeds(strategy: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Steps a second at each round trip, relative to the first; `rows` get the cells."""
    cells = [row(strategy, rtt) for rtt in RTTS]
    rows += cells
    figures: dict[str, float] = {}
    for rtt, cell in zip(RTTS, cells, strict=True):
        for key, how in (("steps_per_second", "steady"), ("whole_steps_per_second", "whole run")):
            figures[f"{rtt} ms, {how}"] = cell[key] / cells[0][key]
    bad = sum(not cell["trusted"] or bool(cell["overrun"]) for cell in cells)
    return {**figures, "runs not to be trusted": bad}


def accuracy(seed: int) -> dict[str, float]:
    """Seconds to the target, where it is reached, and final accuracy."""
    figures, reached = {}, {}
    for strategy in ("sync-sgd", "dga"):
        with tempfile.TemporaryDirectory() as name:
            folder = create(Path(name), strategy)
            summary = run(folder, strategy, AT_MS, seed, ACCURACY_STEPS)
        figures[f"{strategy}, final, %"] = 100 * summary["final"]["accuracy"]
        if (seconds := summary["target_seconds"]) is not None:
            reached[strategy] = figures[f"{strategy}, seconds to 97 %"] = seconds
    if len(reached) == 2:
        figures["dga, times sooner"] = reached["sync-sgd"] / reached["dga"]
    return figures


def measured() -> Iterator[Measured]:
    """The table, the picture, the accuracy."""
    emulated.warm_up()
    rows: list[dict[str, Any]] = []
    for strategy in WAITS:
        what = f"{strategy}, steps per second relative to no network"
        yield measure(what, lambda: speeds(strategy, rows), 1)  # noqa: B023
    title = f"digits, {MEMBERS} members, steps of {1000 * PACE_S:g} ms"
    latency_figure(rows, Path("latency.png"), title)
    seeds = itertools.count()
    yield measure(f"round trip {AT_MS} ms", lambda: accuracy(next(seeds)), SEEDS)
