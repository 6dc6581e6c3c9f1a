"""`edgetrain sweep`: one job over a grid of settings; a table, a CSV and a picture per axis."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.jobs.grid import Axis, Sweep
    from edgetrain.runs.reports.columns import Column
    from edgetrain.runs.reports.sweep_rows import Row
    from edgetrain.training.sweep import Progress

AXES = ("rtt", "members", "delay", "every", "strategy", "codec", "network", "device")
"""Axes with an option of their own; --set takes any key of the job."""

_EXAMPLES = """\
examples:
  edgetrain sweep --rtt 0,50,100,200,500 --strategy sync-sgd,fedavg,dga delay=20
  edgetrain sweep job.toml --members 1,2,4,8 --codec fp32,int8 --seeds 3
  edgetrain sweep job.toml --set optimizer.lr=0.05,0.1,0.2 --set 'partition=iid,dirichlet(0.3)'
  edgetrain sweep examples/paper/latency.toml
  edgetrain sweep --resume runs/20260131-142501-sweep-digits

Every combination is one run, simulated unless you say --emulate. After Ctrl-C, --resume goes on
where it ended: finished cells are kept, the interrupted one is run again. The first value of an
axis is what the others are compared with. A sweep can be a file too: job = {…} and [axes], as those
in examples/paper/. `delay` and `every` apply to the strategies that have them.
"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "sweep",
        "one job over a grid of settings: a table, a CSV, a picture per axis",
        "Run a job for every combination of settings, simulated or emulated; can be resumed.",
        _EXAMPLES,
    )
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
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with this sweep")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every cell, then say and draw what came of it."""
    from edgetrain.jobs.grid import write
    from edgetrain.runs.folder import create
    from edgetrain.training import sweep

    chosen, folder = sweep_of(arguments)
    cells = chosen.cells()
    plan, run_cell = _driver(chosen)
    if folder is None:
        folder = create(arguments.runs, f"sweep-{_name(chosen)}")
        write(folder, chosen)
    out = sys.stderr if arguments.json else sys.stdout
    unique = len({cell.digest for cell in cells})
    print(f"{unique} runs, {chosen.how}; folder: {folder}", file=out, flush=True)
    try:
        rows = sweep.run(chosen, folder, plan, run_cell, _teller(chosen, out), time.monotonic)
    except KeyboardInterrupt:
        common.warn(f"go on with: edgetrain sweep --resume {folder}")
        raise
    return _report(arguments, chosen, folder, rows)


def _driver(chosen: Sweep) -> tuple[Callable[..., Any], Callable[..., dict[str, Any]]]:
    """What plans and runs a cell."""
    from edgetrain.jobs.plan import plan

    if chosen.how == "simulated":
        return plan, common.simulator()
    from edgetrain.training import emulated

    emulated.warm_up()
    return plan, emulated.run


def sweep_of(arguments: argparse.Namespace) -> tuple[Sweep, Path | None]:
    """The sweep that is asked for, and its folder if it has one already."""
    from edgetrain.cli.run import SIMULATED
    from edgetrain.jobs import grid, reading
    from edgetrain.jobs.grid import Sweep, is_sweep, load, resume, split

    axes = [grid.axis(name, split(text)) for name in AXES if (text := getattr(arguments, name))]
    axes += [grid.axis(key, split(text)) for key, text in map(_parted, arguments.set)]
    if arguments.resume is not None:
        if axes or arguments.job or arguments.seeds or arguments.emulate:
            raise ConfigError(
                "--resume takes the job, the axes and all else from its folder",
                "leave the rest of the command line out",
            )
        return resume(arguments.resume), arguments.resume
    words = list(arguments.job)
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    if path is not None and is_sweep(path):
        found = load(path)
    else:
        beside = None if path is None else path.resolve().parent
        words = words if path else [*SIMULATED, *words]
        found = Sweep(reading.load(path).to_dict(), (), beside=beside)
    job = reading.parse(found.job, words).to_dict()
    how = "emulated" if arguments.emulate else found.how
    seeds = found.seeds if arguments.seeds is None else arguments.seeds
    merged = {each.name: each for each in (*found.axes, *axes)}
    return replace(found, job=job, axes=tuple(merged.values()), how=how, seeds=seeds), None


def _parted(text: str) -> tuple[str, str]:
    key, equals, values = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: no axis", "it reads --set optimizer.lr=0.1,0.2")
    return key.strip(), values


def _name(chosen: Sweep) -> str:
    return chosen.name or str(chosen.job.get("name") or chosen.job["task"].rpartition(":")[2])


def _teller(chosen: Sweep, out: Any) -> Callable[[Progress], None]:
    from edgetrain.runs.reports import units

    def tell(progress: Progress) -> None:
        cell, summary = progress.cell, progress.summary
        said = ", ".join(
            f"{each.name} {label}" for each, label in zip(chosen.axes, cell.labels, strict=True)
        )
        seed = f", seed {cell.job.seed}" if chosen.seeds > 1 else ""
        metric = str(summary.get("metric"))
        final = units.figure(metric, (summary.get("final") or {}).get(metric))
        failed = "" if summary["status"] == "finished" else f" {summary['status']}"
        left = f"; {units.duration(progress.left_s)} left" if progress.done < progress.total else ""
        print(
            f"[{progress.done}/{progress.total}] {said}{seed}: {metric} {final}, "
            f"{units.duration(summary.get('seconds'))}{failed}{left}",
            file=out,
            flush=True,
        )

    return tell


# -- shown ----------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, chosen: Sweep, folder: Path, rows: list[Row]) -> int:
    from edgetrain.runs.folder import write_summary
    from edgetrain.runs.reports import plot
    from edgetrain.runs.reports.columns import as_text
    from edgetrain.runs.reports.sweep_rows import points, to_csv

    axes = {each.name: each.labels for each in chosen.axes}
    names = list(axes)
    found = points(names, rows)
    (folder / "sweep.csv").write_text(to_csv(rows), encoding="utf-8")
    metric = next((str(row["metric"]) for row in rows if row["metric"]), "metric")
    pictures = [
        common.picture(
            partial(
                plot.sweep_figure,
                axis,
                axes,
                found,
                metric,
                folder / f"{_file(axis)}.png",
                chosen.title,
            )
        )  # fmt: skip
        for axis, labels in axes.items()
        if len(labels) > 1
    ]
    summary = {
        "name": folder.name,
        "title": chosen.title,
        "how": chosen.how,
        "axes": axes,
        "metric": metric,
        "points": found,
        "runs": list(dict.fromkeys(row["cell"] for row in rows)),
    }
    write_summary(folder, summary)
    drawn = [str(picture) for picture in pictures if picture is not None]
    failed = [row for row in rows if row["status"] != "finished"]
    if arguments.json:
        whole = summary | {"rows": rows, "pictures": drawn, "folder": str(folder)}
        common.say(json.dumps(whole))
        return 1 if failed else 0
    common.say("\n".join(["", *as_text(columns(names, found, metric)), "", *gains(chosen, found)]))
    for row in failed:
        common.say(f"failed: {' '.join(row[name] for name in names)}: {row['error']}")
    common.say("\n".join([f"rows: {folder / 'sweep.csv'}", *(f"picture: {p}" for p in drawn)]))
    return 1 if failed else 0


def _file(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)


def columns(names: list[str], found: list[Row], metric: str) -> list[Column]:
    """A line a cell: medians over its seeds."""
    from edgetrain.runs.reports import units
    from edgetrain.runs.reports.columns import column

    def spread(point: Row) -> str:
        text = units.figure(metric, point["final"])
        low, high = (units.figure(metric, point[key]) for key in ("low", "high"))
        return text if point["runs"] < 2 else f"{text} ({low} to {high})"

    shown = [column(name, (units.printable(point[name]) for point in found)) for name in names]
    shown += [column("final", map(spread, found), below=metric)]
    if any(point["target_seconds"] for point in found):
        reached = (units.duration(point["target_seconds"]) for point in found)
        shown += [column("time to", reached, below="target")]
    return [
        *shown,
        column("time", (units.duration(_per_step(point)) for point in found), below="per step"),
        column("waiting", (units.share(_waiting(point)) for point in found)),
        column("sent", (units.size(point["sent_bytes"]) for point in found)),
    ]


def _per_step(point: Row) -> float | None:
    rate = point["steps_per_second"]
    return 1 / rate if rate else None


def _waiting(point: Row) -> float | None:
    parts = [point[key] for key in ("wait_s", "compute_s", "overhead_s")]
    return None if None in parts or not sum(parts) else float(parts[0] / sum(parts))


def gains(chosen: Sweep, found: list[Row]) -> list[str]:
    """Along each axis of numbers, the fleet's steps a second against the first value's."""
    from edgetrain.runs.reports.sweep_rows import relative, series

    names = [each.name for each in chosen.axes]
    lines = []
    for each in chosen.axes:
        if not _grows(each):
            continue
        for label, line in series(each.name, names, found).items():
            steps = ", ".join(f"{value}: {gain:.2f}x" for value, gain in relative(line))
            lines.append(f"steps a second of the fleet by {each.name}{label and f' ({label})'}: "
                         f"{steps}")  # fmt: skip
    return [*lines, ""] if lines else []


def _grows(axis: Axis) -> bool:
    from edgetrain.runs.reports.sweep_rows import numbers_of

    return numbers_of(axis.labels) is not None and len(axis.values) > 1
