"""Run a sweep, one job over a grid of settings, cell by cell, and collect its rows.

A sweep is a folder of run folders, each named by the digest of its settings: an interrupted sweep
can be resumed, and equal cells are run once. The function that runs a cell (emulated, simulated, or
made up in a test) is passed in. This module imports neither torch nor numpy.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.grid import Cell, Sweep
from edgetrain.jobs.job import Job
from edgetrain.runs.folder import NewerFormat, create_inside, read_summary, write_summary
from edgetrain.runs.reports.sweep_rows import Row, points

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
    executor: Executor | None = None,
) -> list[Row]:
    """Run the cells that are not finished yet; return the rows of all cells, in order.

    `tell` is called after each cell. If a cell fails the others are still run; a failed or
    interrupted cell is run again next time, in an empty folder. Raises NewerFormat, before it runs
    anything, where a newer edgetrain has finished a cell.

    An `executor` runs several cells at once, wherever it has workers: they need this folder and
    this edgetrain, and `run_cell` and the job's task have to be names of modules. None: one after
    the other, here. A worker that is lost is the executor's matter: one that begins a cell again
    finds an empty folder; an error of its own ends the sweep.
    """
    cells = sweep.cells()
    unique = {cell.digest: cell for cell in cells}
    done = {d: s for d in unique if (s := finished(folder / d)) is not None}
    left = sum(cell.weight for d, cell in unique.items() if d not in done)
    spent = worked = 0.0
    began = clock()
    for digest, summary in _summaries(
        [cell for digest, cell in unique.items() if digest not in done], folder, run_cell, executor
    ):
        cell = unique[digest]
        done[digest] = summary
        spent, worked = clock() - began, worked + cell.weight
        left -= cell.weight
        tell(SweepProgress(len(done), len(unique), cell, done[digest], spent / worked * left))
    return [_row(sweep, cell, done[cell.digest]) for cell in cells]


def simulate_cell(beside: Path | None, job: Job, inside: Path) -> dict[str, Any]:
    """Simulate one cell, in whatever process. `beside` is the folder of the sweep's job."""
    from edgetrain.jobs.plan import check, with_task
    from edgetrain.jobs.resolved import look_beside
    from edgetrain.training.host_pace import paced
    from edgetrain.training.simulated import simulation

    look_beside(beside)
    return simulation.run(with_task(paced(check(job), beside), beside), inside)


def _summaries(
    cells: Sequence[Cell], folder: Path, run_cell: Run, executor: Executor | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    if executor is None:
        for cell in cells:
            yield cell.digest, _run_cell(cell, folder, run_cell)
        return
    pending = {executor.submit(_run_cell, cell, folder, run_cell): cell.digest for cell in cells}
    try:
        for future in as_completed(pending):
            yield pending[future], future.result()
    finally:
        for future in pending:
            future.cancel()


def results_of(sweep: Sweep, folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    axes = {each.name: each.labels for each in sweep.axes}
    return {
        "name": folder.name,
        "title": sweep.title,
        "how": sweep.how,
        "axes": axes,
        "metric": next((str(row["metric"]) for row in rows if row["metric"]), "metric"),
        "points": points(list(axes), rows),
        "runs": list(dict.fromkeys(row["cell"] for row in rows)),
    }


def rows_so_far(sweep: Sweep, folder: Path) -> list[Row]:
    found = ((cell, finished(folder / cell.digest)) for cell in sweep.cells())
    return [_row(sweep, cell, summary) for cell, summary in found if summary is not None]


def finished(folder: Path) -> dict[str, Any] | None:
    try:
        summary = read_summary(folder)
    except NewerFormat:
        raise
    except ConfigError:  # a damaged file, left by a machine that lost power
        return None
    return summary if summary is not None and summary.get("status") == "finished" else None


def _run_cell(cell: Cell, folder: Path, run_cell: Run) -> dict[str, Any]:
    inside = folder / cell.digest
    if (done := finished(inside)) is not None:  # by a worker that was lost with its answer
        return done
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
