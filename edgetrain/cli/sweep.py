"""`edgetrain sweep`: run a job over a grid of settings; print a table, write a CSV and pictures."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common, pictures, running
from edgetrain.errors import ConfigError
from edgetrain.training.simulated import require_simulator

if TYPE_CHECKING:
    from edgetrain.jobs.grid import Sweep
    from edgetrain.jobs.job import Job
    from edgetrain.runs.reports.sweep_rows import Row
    from edgetrain.training import sweep
    from edgetrain.training.sweep import SweepProgress

AXES = ("rtt", "members", "delay", "local_steps", "strategy", "codec", "network", "device")
"""Axes with an option of their own; --set takes any key of the job."""

HELP = "one job over a grid of settings: a table, a CSV, a picture per axis"
ABOUT = "Run a job for every combination of settings, simulated or emulated; can be resumed."
EXAMPLES = """\
examples:
  edgetrain sweep --rtt 0,100,500 --strategy sync-sgd,fedavg,dga pace_s=0.05 delay=15
  edgetrain sweep job.toml --members 1,2,4,8 --codec fp32,int8 --seeds 3
  edgetrain sweep job.toml --set optimizer.lr=0.05,0.1,0.2 --set 'partition=iid,dirichlet(0.3)'
  edgetrain sweep examples/paper/latency.toml --at-once 4
  edgetrain sweep --resume runs/20260131-142501-sweep-digits

Every combination is one run, simulated unless you say --emulate. After Ctrl-C, --resume goes on
where it ended: finished cells are kept, the interrupted one is run again. The first value of an
axis is what the others are compared with. A sweep can be a file too: job = {…} and [axes], as those
in examples/paper/. `delay` and `local_steps` apply to the strategies that have them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_job(parser)
    for name in AXES:
        what = "round trips in ms" if name == "rtt" else f"values of `{name}`"
        parser.add_argument(f"--{name}", metavar="V,V", help=f"axis: {what}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=V,V", help="axis: any key of the job"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each cell (default: 1)")
    parser.add_argument(
        "--emulate", action="store_true", help="real processes and emulated links, in real time"
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="continue this sweep")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N",
        help="simulate this many cells at once, each in a process (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dask", metavar="ADDRESS",
        help="simulate on the workers of a Dask cluster, as tcp://host:8786, which see the same "
        "folders (needs `distributed`)",
    )  # fmt: skip
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run every cell, then print and draw the results."""
    from edgetrain.jobs.grid import write
    from edgetrain.jobs.plan import check_names
    from edgetrain.runs.folder import create
    from edgetrain.training import sweep

    chosen, folder = sweep_of(arguments)
    cells = chosen.cells()
    for job in chosen.samples():
        check_names(job)
    if chosen.how == "simulated":
        require_simulator()
    running.say_loading(arguments)
    run_cell = driver_of(arguments, chosen)
    if folder is None:
        folder = create(arguments.runs, f"sweep-{chosen.called}")
        write(folder, chosen)
    out = sys.stderr if arguments.json else sys.stdout
    unique = len({cell.digest for cell in cells})
    print(f"{unique} runs, {chosen.how}; folder: {folder}", file=out, flush=True)

    def report(progress: SweepProgress) -> None:
        print(progress_line(chosen, progress), file=out, flush=True)

    try:
        with _executor(arguments, chosen) as executor:
            if executor is not None:
                folder, run_cell = folder.resolve(), partial(sweep.simulate_cell, chosen.beside)
            rows = sweep.run(chosen, folder, run_cell, report, time.monotonic, executor)
    except KeyboardInterrupt:
        if rows := sweep.rows_so_far(chosen, folder):
            _report(arguments, chosen, folder, rows)
        common.warn(f"continue with: edgetrain sweep --resume {folder}")
        raise
    return _report(arguments, chosen, folder, rows)


@contextlib.contextmanager
def _executor(arguments: argparse.Namespace, chosen: Sweep) -> Iterator[Executor | None]:
    """What runs several cells at once; None: they are run one after the other. ConfigError."""
    if (arguments.at_once != 1 or arguments.dask) and chosen.how != "simulated":
        raise ConfigError(
            "cells that are emulated at once would take each other's time",
            "leave out --at-once and --dask, or --emulate",
        )
    if arguments.at_once < 1:
        raise ConfigError(f"--at-once {arguments.at_once}", "allowed are 1 and more")
    if arguments.dask:
        try:
            client = importlib.import_module("distributed").Client(arguments.dask, timeout=10)
        except ImportError:
            raise ConfigError("--dask needs Dask", "pip install distributed") from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--dask {arguments.dask}: {error}",
                "the address that the cluster's scheduler printed",
            ) from None
        with client:
            yield client.get_executor()
    elif arguments.at_once > 1:
        with ProcessPoolExecutor(arguments.at_once, multiprocessing.get_context("spawn")) as pool:
            yield pool
    else:
        yield None


def driver_of(arguments: argparse.Namespace, chosen: Sweep) -> sweep.Run:
    """The function that runs a cell, as `training.sweep.run` takes it."""
    from edgetrain.jobs.plan import check, with_task

    is_simulated = chosen.how == "simulated"
    if is_simulated:
        run = running.simulator()
    else:
        from edgetrain.training import emulated

        emulated.warm_up()
        run = emulated.run

    def run_cell(job: Job, inside: Path) -> dict[str, Any]:
        found = check(job)
        if is_simulated:
            found = running.with_host_pace(arguments, found, chosen.beside)
        return run(with_task(found, chosen.beside), inside)

    return run_cell


def sweep_of(arguments: argparse.Namespace) -> tuple[Sweep, Path | None]:
    from edgetrain.jobs import grid, reading
    from edgetrain.jobs.defaults import SIMULATED
    from edgetrain.jobs.grid import Sweep, is_sweep, load, resume, split

    axes = [grid.axis(name, split(text)) for name in AXES if (text := getattr(arguments, name))]
    for text in arguments.set:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text}: no axis", "write --set optimizer.lr=0.1,0.2")
        axes.append(grid.axis(key.strip(), split(values)))
    if arguments.resume is not None:
        if axes or arguments.job or arguments.seeds or arguments.emulate:
            raise ConfigError(
                "--resume takes the job, the axes and everything else from its folder",
                "leave the rest of the command line out",
            )
        return resume(arguments.resume), arguments.resume
    file, words = common.split_job(arguments.job)
    path = None if file is None else Path(file)
    if path is not None and is_sweep(path):
        found = load(path)
    else:
        beside = None if path is None else path.resolve().parent
        words = words if path else [*SIMULATED, *words]
        found = Sweep(reading.load(path).to_dict(), (), beside=beside)
    from edgetrain.jobs.resolved import look_beside

    look_beside(found.beside)
    found = found.joined(reading.parse(found.job, words), axes, arguments.seeds)
    return replace(found, how="emulated") if arguments.emulate else found, None


def progress_line(chosen: Sweep, progress: SweepProgress) -> str:
    """A line for a cell that has been run: its values, its final metric, the time left."""
    from edgetrain.runs.reports import units

    cell, summary = progress.cell, progress.summary
    values = ", ".join(
        f"{each.name} {label}" for each, label in zip(chosen.axes, cell.labels, strict=True)
    )
    seed = f", seed {cell.job.seed}" if chosen.seeds > 1 else ""
    metric = str(summary.get("metric"))
    final = units.figure(metric, (summary.get("final") or {}).get(metric))
    failed = "" if summary["status"] == "finished" else f" {summary['status']}"
    left = f"; {units.duration(progress.left_s)} left" if progress.done < progress.total else ""
    return (
        f"[{progress.done}/{progress.total}] {values}{seed}: {metric} {final}, "
        f"{units.duration(summary.get('seconds'))}{failed}{left}"
    )


def _report(arguments: argparse.Namespace, chosen: Sweep, folder: Path, rows: list[Row]) -> int:
    from edgetrain.files.writing import write_text
    from edgetrain.runs.folder import write_summary
    from edgetrain.runs.reports.plot import draw_sweep
    from edgetrain.runs.reports.sweep_rows import CSV, to_csv
    from edgetrain.runs.reports.tables import sweep_text
    from edgetrain.training.sweep import results_of

    summary = results_of(chosen, folder, rows)
    axes = summary["axes"]
    failed = [row for row in rows if row["status"] != "finished"]
    if not arguments.json:
        common.say(sweep_text(axes, summary["points"], summary["metric"]))
        for row in failed:
            told = row["error"] or row["status"]
            common.say(f"failed: {' '.join(row[name] for name in axes)}: {told}")
    path = folder / CSV
    whole = running.saved(lambda: write_text(path, to_csv(rows)))
    whole = running.saved(lambda: write_summary(folder, summary)) and whole
    job, varied = chosen.cells()[0].job, {each.name.rpartition(".")[2] for each in chosen.axes}
    about = chosen.called
    about += f", {job.fleet.members} members" if "members" not in varied else ""
    about += f", {job.train.steps} steps" if "steps" not in varied else ""
    drawn = []
    for axis in [axis for axis, labels in axes.items() if len(labels) > 1]:
        title = summary["title"] or f"{about}, along {axis}"
        name = "".join(char if char.isalnum() or char in "-_" else "-" for char in axis)
        what = (axis, axes, summary["points"], summary["metric"], title)
        if picture := pictures.picture(folder / f"{name}.png", draw_sweep, *what):
            drawn.append(picture)
    if arguments.json:
        answer = summary | {"rows": rows, "pictures": list(map(str, drawn)), "folder": str(folder)}
        common.say(json.dumps(answer))
    else:
        common.say(f"rows: {path}")
        pictures.say_pictures(drawn)
    return int(bool(failed) or not whole)
