"""Run a sweep, one job over a grid of settings, cell by cell, and collect its rows.

A sweep is a folder of run folders, each named by the digest of its settings: an interrupted sweep
can be resumed, and equal cells are run once. The function that runs a cell (emulated, simulated, or
made up in a test) is passed in. This module imports neither torch nor numpy.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.grid import Cell, Sweep
from edgetrain.jobs.job import Job
from edgetrain.runs.folder import NewerFormat, create_inside, read_summary, write_summary
from edgetrain.runs.reports.sweep_rows import Row

log = logging.getLogger("edgetrain")


@dataclass(frozen=True)
class SweepProgress:
    """How far the sweep is, after a cell. `left_s`: seconds left, None if not known."""

    done: int
    total: int
    cell: Cell
    summary: Mapping[str, Any]
    left_s: float | None


Run = Callable[[Job, Path], dict[str, Any]]
"""Runs a cell's job in a folder; returns its summary."""


def run(
    sweep: Sweep,
    folder: Path,
    run_cell: Run,
    tell: Callable[[SweepProgress], None],
    clock: Callable[[], float],
) -> list[Row]:
    """Run the cells that are not finished yet; return the rows of all cells, in order.

    `tell` is called after each cell. If a cell fails the others are still run; a failed or
    interrupted cell is run again next time, in an empty folder. Raises NewerFormat, before it runs
    anything, where a newer edgetrain has finished a cell.
    """
    cells = sweep.cells()
    unique = {cell.digest: cell for cell in cells}
    done = {d: s for d in unique if (s := finished(folder / d)) is not None}
    left = sum(cell.weight for d, cell in unique.items() if d not in done)
    spent = worked = 0.0
    for digest, cell in unique.items():
        if digest in done:
            continue
        began = clock()
        done[digest] = _run_cell(cell, folder, run_cell)
        spent, worked = spent + clock() - began, worked + cell.weight
        left -= cell.weight
        tell(SweepProgress(len(done), len(unique), cell, done[digest], spent / worked * left))
    return [_row(sweep, cell, done[cell.digest]) for cell in cells]


def rows_so_far(sweep: Sweep, folder: Path) -> list[Row]:
    """The rows of the cells that are finished, of a sweep that was interrupted."""
    found = ((cell, finished(folder / cell.digest)) for cell in sweep.cells())
    return [_row(sweep, cell, summary) for cell, summary in found if summary is not None]


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a cell that is finished, or None. Raises NewerFormat."""
    try:
        summary = read_summary(folder)
    except NewerFormat:
        raise
    except ConfigError:  # a damaged file, left by a machine that lost power
        return None
    return summary if summary is not None and summary.get("status") == "finished" else None


def _run_cell(cell: Cell, folder: Path, run_cell: Run) -> dict[str, Any]:
    inside = folder / cell.digest
    if inside.exists():
        _clear(inside)
    inside = create_inside(folder, cell.digest)
    try:
        return run_cell(cell.job, inside)
    except EdgetrainError as error:
        failed = {"status": "failed", "errors": [str(error)]}
        summary = (read_summary(inside) or {}) | failed
        write_summary(inside, summary)
        return summary


def _clear(inside: Path) -> None:
    """Make room for a cell that is run again. What cannot be read may be a good run: it is kept."""
    try:
        read_summary(inside)
    except ConfigError as error:
        number = next(
            n for n in count(1) if not inside.with_name(f"{inside.name}.old-{n}").exists()
        )
        aside = inside.replace(inside.with_name(f"{inside.name}.old-{number}"))
        log.warning("%s; it is run again, %s is kept", error, aside.name)
    else:
        shutil.rmtree(inside)


FIGURES = (
    "status", "seconds", "steps", "seconds_per_step", "steps_per_second",
    "compute_s", "wait_s", "overhead_s", "eval_s", "end_s",
    "target_seconds", "target_steps", "sent_bytes", "received_bytes", "joules",
)  # fmt: skip
"""Keys of a run's summary that are copied to its row."""


def _row(sweep: Sweep, cell: Cell, summary: Mapping[str, Any]) -> Row:
    row: Row = {each.name: label for each, label in zip(sweep.axes, cell.labels, strict=True)}
    row |= {"seed": cell.job.seed, "cell": cell.digest}
    row |= {key: summary.get(key) for key in FIGURES}
    rate = summary.get("steps_per_second")
    members = summary.get("members") or cell.job.fleet.members
    row["fleet_steps_per_second"] = rate * members if rate else None
    row["metric"] = summary.get("metric")
    row["final"] = (summary.get("final") or {}).get(summary.get("metric"))
    row |= {f"final_{key}": value for key, value in (summary.get("final") or {}).items()}
    row["error"] = next(iter(summary.get("errors") or []), None)
    return row
