"""Sweeps: one job over a grid of settings, cell by cell, and what came of it.

A sweep is a folder of run folders, each named by the digest of its settings, so that it can be
taken up again after an interruption and a cell that two grids share is run once. How a cell is run
(emulated, simulated, made up in a test) is passed in. Nothing is printed or drawn here, and neither
torch nor numpy is imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.grid import Cell, Sweep
from edgetrain.jobs.job import Job
from edgetrain.runs.folder import create_inside, read_summary, write_summary
from edgetrain.runs.reports.sweep_rows import Row

# -- the grid -------------------------------------------------------------------------------------


# -- running it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """After a cell: how far the sweep is. `left_s` is None until a cell has been run."""

    done: int
    total: int
    cell: Cell
    summary: Mapping[str, Any]
    left_s: float | None


Plan = Callable[[Job, Path | None], Any]
Run = Callable[[Any, Path], dict[str, Any]]


def run(
    sweep: Sweep,
    folder: Path,
    plan: Plan,
    run_cell: Run,
    tell: Callable[[Progress], None],
    clock: Callable[[], float],
) -> list[Row]:
    """Run what is not finished yet, cell by cell; the rows of all cells, in order.

    A cell is planned and run as `plans.plan` and `emulate.run` do. One that fails is told and the
    others go on; an interrupted or failed one is run again next time, in an empty folder.
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
        done[digest] = _run_cell(cell, sweep, folder, plan, run_cell)
        spent, worked = spent + clock() - began, worked + cell.weight
        left -= cell.weight
        tell(Progress(len(done), len(unique), cell, done[digest], spent / worked * left))
    return [_row(sweep, cell, done[cell.digest]) for cell in cells]


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a cell that needs no more work."""
    try:
        summary = read_summary(folder)
    except ConfigError:  # half a file, of a machine that lost power
        return None
    return summary if summary is not None and summary.get("status") == "finished" else None


def _run_cell(cell: Cell, sweep: Sweep, folder: Path, plan: Plan, run_cell: Run) -> dict[str, Any]:
    inside = folder / cell.digest
    if inside.exists():
        shutil.rmtree(inside)
    inside = create_inside(folder, cell.digest)
    try:
        return run_cell(plan(cell.job, sweep.beside), inside)
    except EdgetrainError as error:
        failed = {"status": "failed", "errors": [str(error)]}
        summary = (read_summary(inside) or {}) | failed
        write_summary(inside, summary)
        return summary


FIGURES = (
    "status", "seconds", "steps", "steps_per_second", "compute_s", "wait_s", "overhead_s",
    "target_seconds", "target_steps", "sent_bytes", "received_bytes", "joules",
)  # fmt: skip
"""Keys of a run's summary that a row has as they are."""


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


# -- what came of it ------------------------------------------------------------------------------
