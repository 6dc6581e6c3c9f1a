"""Sweeps: one job over a grid of settings, cell by cell, and what came of it.

A sweep is a folder of run folders, each named by the digest of its settings, so that it can be
taken up again after an interruption and a cell that two grids share is run once. How a cell is run
(emulated, simulated, made up in a test) is passed in. Nothing is printed or drawn here, and neither
torch nor numpy is imported.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import shutil
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgetrain import strategies
from edgetrain.errors import ConfigError, EdgetrainError, did_you_mean
from edgetrain.jobs import reading as config
from edgetrain.jobs.reading import Job
from edgetrain.runs import folder as runs

Row = dict[str, Any]
"""One cell: its axes' values, its seed, and figures of its summary. Seconds and bytes."""

FILE = "sweep.toml"
SHORT = {"rtt": "fleet.network", "partition": "data.partition"}
"""Axes that are not keys of a job: `rtt` 50 is the network rtt-50ms."""
LABEL = "label"
HOW = ("simulated", "emulated")
MOST_CELLS = 100_000


@dataclass(frozen=True)
class Value:
    """One value of an axis: how it is called, and the overrides of the job that it stands for."""

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """What varies, and over which values, in order; the first is the one to compare with."""

    name: str
    values: tuple[Value, ...]

    @property
    def numbers(self) -> list[float] | None:
        """The values as numbers, or None where they are names."""
        try:
            return [float(value.label) for value in self.values]
        except ValueError:
            return None


def axis(name: str, values: Sequence[Any]) -> Axis:
    """An axis over a key of the job, or `rtt`; a value that is a table sets several keys at once.

    >>> axis("rtt", [0, 50]).values[1]
    Value(label='50', overrides=('fleet.network=rtt-50ms',))
    >>> axis("case", [{"label": "K=10", "strategy": "fedavg", "every": 10}]).values[0].overrides
    ('strategy=fedavg', 'every=10')

    Raises ConfigError for a key that no job has, and for no value or one twice.
    """
    found = tuple(_value(name, value) for value in values)
    labels = [value.label for value in found]
    if not found or len(set(labels)) < len(labels):
        raise ConfigError(
            f"axis '{name}' has the values {', '.join(labels) or 'none'}",
            "name one or more, each once",
        )
    return Axis(name, found)


def _value(name: str, value: Any) -> Value:
    if isinstance(value, Mapping):
        keys = {key: inner for key, inner in value.items() if key != LABEL}
        overrides = tuple(f"{_key(key)}={_text(inner)}" for key, inner in keys.items())
        said = ", ".join(f"{key} {_text(inner)}" for key, inner in keys.items())
        return Value(str(value.get(LABEL, said)), overrides)
    text = _text(value)
    if name == "rtt":
        return Value(text, (f"fleet.network=rtt-{text}ms",))
    return Value(text, (f"{_key(name)}={text}",))


def _key(name: str) -> str:
    key = SHORT.get(name, name)
    try:
        config.parse({}, [f"{key}="])  # an empty text fits nowhere: only an unknown key matters
    except ConfigError as error:
        if error.message.startswith("no key"):
            keys = config.keys()
            known = {full.rpartition(".")[2] for full in keys} | {*SHORT}
            raise ConfigError(
                f"no axis '{name}': a job has no such key", did_you_mean(name, known)
            ) from None
    return key


def _text(value: Any) -> str:
    """As it stands behind KEY= on the command line."""
    if isinstance(value, str):
        return value.strip()
    return runs.to_toml({"v": value}).partition("=")[2].strip()


def split(text: str) -> list[str]:
    """The values of a comma-separated list; commas inside brackets and quotes belong to a value.

    >>> split("fp32, topk(0.01) | q2, {a = 1, b = 2}")
    ['fp32', 'topk(0.01) | q2', '{a = 1, b = 2}']
    """
    found, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += char
    return [part.strip() for part in found if part.strip()]


# -- the grid -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    labels: tuple[str, ...]
    """A value of each axis."""
    job: Job
    digest: str
    """Of its settings: the name of its run folder."""

    @property
    def weight(self) -> float:
        """About how long it takes, in no unit."""
        return float(self.job.fleet.members * self.job.train.steps)


@dataclass(frozen=True)
class Sweep:
    """A job, what varies in it, and how its cells are run."""

    job: Mapping[str, Any]
    """As in a job file."""
    axes: tuple[Axis, ...]
    seeds: int = 1
    """Each cell is run so often, with the job's seed and those that follow."""
    how: str = "simulated"
    name: str = ""
    """Of its folder."""
    title: str = ""
    """Of its pictures."""
    beside: Path | None = None
    """The folder of the job file, where a task of the user's own may lie."""

    def cells(self) -> list[Cell]:
        """All of them, seeds of a cell in a row, the first axis slowest.

        ConfigError for settings that cannot be. `delay` and `every` are left out where a strategy
        has none, so that cells can be equal: they share their digest.
        """
        count = self.seeds
        for each in self.axes:
            count *= len(each.values)
        if not self.axes or not 1 <= count <= MOST_CELLS or self.seeds < 1:
            raise ConfigError(
                f"a sweep over {len(self.axes)} axes and {self.seeds} seeds has {count} cells",
                f"allowed are 1 to {MOST_CELLS:,}: --rtt 0,50,100 --seeds 3",
            )
        return [
            self._cell(chosen, seed)
            for chosen in itertools.product(*(each.values for each in self.axes))
            for seed in range(self.seeds)
        ]

    def _cell(self, chosen: Sequence[Value], seed: int) -> Cell:
        overrides = [override for value in chosen for override in value.overrides]
        job = config.parse(self.job, overrides, "sweep")
        job = replace(fitting(job), seed=job.seed + seed)
        settings = job.to_dict() | {"name": "", "how": self.how}
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Cell(tuple(value.label for value in chosen), job, digest)

    def to_dict(self) -> dict[str, Any]:
        """As it is written into its folder."""
        return {
            "name": self.name,
            "title": self.title,
            "how": self.how,
            "seeds": self.seeds,
            "beside": None if self.beside is None else str(self.beside),
            "grid": [
                {
                    "name": each.name,
                    "values": [
                        {LABEL: value.label, "overrides": list(value.overrides)}
                        for value in each.values
                    ],
                }
                for each in self.axes
            ],
            "job": dict(self.job),
        }


def fitting(job: Job) -> Job:
    """The job without what its strategy does not have: a delay, a round of several steps."""
    strategy = strategies.find(job.strategy.name)
    table = replace(
        job.strategy,
        every=job.strategy.every if strategy.contributes == "displacement" else 0,
        delay=job.strategy.delay if strategy.delays else 0,
    )
    return replace(job, strategy=table)


def is_sweep(path: Path) -> bool:
    """Whether a TOML file is a sweep and not a job."""
    return "axes" in _read(path)


def load(path: Path) -> Sweep:
    """A sweep from a file: `job = {…}` or a job file's name, [axes], and perhaps title, seeds, how.

    Raises ConfigError naming what is wrong.
    """
    table = _read(path)
    known = ("title", "job", "axes", "seeds", "how")
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: no key '{key}' in a sweep", did_you_mean(key, known))
    job, axes = table.get("job", {}), table.get("axes", {})
    if isinstance(job, str):
        job = _read(path.parent / job)
    if not isinstance(axes, Mapping) or not isinstance(job, Mapping):
        raise ConfigError(f"{path}: 'axes' and 'job' are tables", "[axes]\nrtt = [0, 50, 100]")
    seeds, how = table.get("seeds", 1), table.get("how", HOW[0])
    if type(seeds) is not int or how not in HOW:
        raise ConfigError(f"{path}: seeds = {seeds!r}, how = '{how}'", f"how is {' or '.join(HOW)}")
    for name, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(f"{path}: axes.{name} = {values!r}", "a list of values is needed")
    found = tuple(axis(name, values) for name, values in axes.items())
    beside, title = path.resolve().parent, str(table.get("title", ""))
    return Sweep(dict(job), found, seeds, how, path.stem, title, beside)


def resume(folder: Path) -> Sweep:
    """The sweep that a folder was made for. Raises ConfigError if there is none."""
    if not (folder / FILE).exists():
        raise ConfigError(f"{folder} is no sweep: no {FILE} in it", "give one that sweep made")
    table = _read(folder / FILE)
    axes = tuple(
        Axis(
            each["name"],
            tuple(Value(v[LABEL], tuple(v["overrides"])) for v in each["values"]),
        )
        for each in table["grid"]
    )
    beside = Path(table["beside"]) if "beside" in table else None
    name, title = str(table.get("name", "")), str(table.get("title", ""))
    return Sweep(table["job"], axes, table["seeds"], table["how"], name, title, beside)


def write(folder: Path, sweep: Sweep) -> None:
    """Put the sweep into its folder, for `resume`."""
    (folder / FILE).write_text(runs.to_toml(sweep.to_dict()), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no file '{path}'", "write a job with `edgetrain init`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


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
        summary = runs.read_summary(folder)
    except ConfigError:  # half a file, of a machine that lost power
        return None
    return summary if summary is not None and summary.get("status") == "finished" else None


def _run_cell(cell: Cell, sweep: Sweep, folder: Path, plan: Plan, run_cell: Run) -> dict[str, Any]:
    inside = folder / cell.digest
    if inside.exists():
        shutil.rmtree(inside)
    inside = runs.create_inside(folder, cell.digest)
    try:
        return run_cell(plan(cell.job, sweep.beside), inside)
    except EdgetrainError as error:
        failed = {"status": "failed", "errors": [str(error)]}
        summary = (runs.read_summary(inside) or {}) | failed
        runs.write_summary(inside, summary)
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


def to_csv(rows: Sequence[Row]) -> str:
    """All rows, a column for every key that one of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


MEANT = (
    "fleet_steps_per_second", "final", "target_seconds", "sent_bytes", "received_bytes",
    "steps_per_second", "compute_s", "wait_s", "overhead_s",
)  # fmt: skip
"""Figures of which the median over the seeds is taken."""


def points(axes: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """One row for the seeds of each cell: medians of what finished, `low` and `high` of `final`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in axes), []).append(row)
    return [
        dict(zip(axes, labels, strict=True)) | _medians(group) for labels, group in groups.items()
    ]


def _medians(group: Sequence[Row]) -> Row:
    good = [row for row in group if row["status"] == "finished"]
    found: Row = {"runs": len(good), "failed": len(group) - len(good)}
    for key in MEANT:
        values = [row[key] for row in good if row.get(key) is not None]
        # A target that some seeds never reached was not reached by the typical one in that time.
        known = len(values) == len(good) if key == "target_seconds" else bool(values)
        found[key] = statistics.median(values) if values and known else None
    finals = [row["final"] for row in good if row.get("final") is not None]
    found["low"], found["high"] = (min(finals), max(finals)) if finals else (None, None)
    found["mean"] = statistics.fmean(finals) if finals else None
    return found


def series(
    axis: str, axes: Sequence[str], found: Sequence[Row], most: int = 8
) -> dict[str, dict[str, Row]]:
    """For each combination of the other axes its points along this one: label -> value -> point.

    Where that were more than `most` lines, the last other axes are left at their first value.
    """
    others = [name for name in axes if name != axis]
    varies = [name for name in others if len({point[name] for point in found}) > 1]
    kept = list(found)
    while len({tuple(point[name] for name in varies) for point in kept}) > most:
        last = varies.pop()
        kept = [point for point in kept if point[last] == kept[0][last]]
    lines: dict[str, dict[str, Row]] = {}
    for point in kept:
        label = ", ".join(_named(name, point[name]) for name in varies)
        lines.setdefault(label, {})[point[axis]] = point
    return lines


def _named(name: str, value: str) -> str:
    """A name says what it is; a number needs its axis beside it."""
    return f"{name} {value}" if value.replace(".", "", 1).lstrip("-").isdigit() else value


def relative(line: Mapping[str, Row]) -> Iterator[tuple[str, float]]:
    """(value, the fleet's steps a second against those of the first value) along a line."""
    first: float | None = None
    for value, point in line.items():
        rate = point["fleet_steps_per_second"]
        first = first or rate
        if rate and first:
            yield value, rate / first
