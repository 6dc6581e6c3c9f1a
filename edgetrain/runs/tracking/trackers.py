"""A run folder that is handed to a tracker: TensorBoard, MLflow, Weights & Biases, or a package's.

Each library is imported where it is used, and is an extra: it is called back through `Tracker`.
Another tracker is a user's own (`extensions`), a function that is given an `About` and returns a
`Tracker`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.extras import install_command
from edgetrain.runs.folder import metrics_path, read_job, read_summary
from edgetrain.runs.metrics.lines import HUB, Follower, Record, figures, told_evaluation


@dataclass(frozen=True)
class Point:
    """A number of one curve."""

    tag: str
    """The curve's name: "eval/accuracy"."""
    member: str
    """Name of the member; "": the fleet."""
    axis: str
    """Unit of `at`: "step" or "round"."""
    at: int
    t: float
    """Seconds since training began."""
    value: float


_STATUS = {
    "pace_s": "time/pace_s",
    "round_trip_s": "network/round_trip_s",
    "celsius": "machine/celsius",
}
_MEMBER = {
    "compute_s": "time/compute_s",
    "wait_s": "time/wait_s",
    "overhead_s": "time/overhead_s",
    "sent_bytes": "network/sent_bytes",
    "received_bytes": "network/received_bytes",
    "peak_bytes": "machine/peak_bytes",
    "joules": "machine/joules",
}
TABLE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "step": ("step", {"loss": "train/loss", **_MEMBER, "cpu_s": "machine/cpu_s"}),
    "status": ("step", {**_STATUS, **_MEMBER}),
    "exchange": ("round", {
        "sent_bytes": "exchange/sent_bytes", "received_bytes": "exchange/received_bytes",
        "submit_s": "exchange/submit_s", "decode_s": "exchange/decode_s",
        "apply_s": "exchange/apply_s",
    }),
    "round": ("round", {
        "members": "round/members", "missing": "round/missing", "close_s": "round/close_s",
        "delay": "round/delay", "local_steps": "round/local_steps", "sent_bytes": "hub/sent_bytes",
        "received_bytes": "hub/received_bytes", "cpu_s": "hub/cpu_s",
        "peak_bytes": "hub/peak_bytes",
    }),
}  # fmt: skip
"""Of each kind of line: what its points stand at, and the curve of each key. Lists count their
names. Figures of evaluations are "eval/" and their own name."""


class Curves:
    """The points in records of one run. Members beyond the first `most` that have lines are left
    out, and counted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: set[str] = set()
        self.left_out: set[str] = set()
        """Members whose own curves are not drawn."""
        self._evaluates = ""

    def points(self, records: Iterable[Record]) -> Iterator[Point]:
        """In the order of the records; what is not known (null) is no point."""
        for record in records:
            kind = record["kind"]
            told = told_evaluation(record) if kind == "figure" else record
            if kind in TABLE:
                axis, keys = TABLE[kind]
                who = record.get("about") if kind == "status" else record["member"]
                member = "" if who == HUB else who
                there = {tag: record.get(key) for key, tag in keys.items()}
                found = {tag: len(v) if isinstance(v, list) else v for tag, v in there.items()}
            elif told is not None and kind in ("eval", "figure"):
                record, axis, who = told, "step", told["member"]
                self._evaluates = self._evaluates or who
                member = "" if who == self._evaluates else who
                found = {f"eval/{name}": value for name, value in figures(told).items()}
            else:
                continue
            at = record.get(axis)
            if isinstance(at, int) and isinstance(member, str) and self._takes(member):
                for tag, value in found.items():
                    if isinstance(value, int | float):
                        yield Point(tag, member, axis, at, record["t"], float(value))

    def _takes(self, member: str) -> bool:
        if not member or member in self._taken:
            return True
        if len(self._taken) < self._most:
            self._taken.add(member)
            return True
        self.left_out.add(member)
        return False


def parameters(job: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """A job as one table of texts: "train.steps" and so on."""
    found: dict[str, str] = {}
    for key, value in job.items():
        if isinstance(value, Mapping):
            found |= parameters(value, f"{under}{key}.")
        else:
            found[f"{under}{key}"] = str(value)
    return found


_PART = 20_000
"""Lines whose points are handed over at once."""


@dataclass(frozen=True)
class About:
    """A run's description for a tracker, before its points."""

    name: str
    project: str
    folder: Path
    parameters: Mapping[str, str]
    """Every key of the job."""
    began: float
    """When training began: seconds since 1970."""
    into: str
    """Destination: a folder, or an address; "": the tracker's default."""
    offline: bool


class Tracker(Protocol):
    """Takes the points of one run. Whatever it raises ends the tracking, and nothing else."""

    def write(self, points: Sequence[Point]) -> None:
        """Take some more, in the order in which they were written."""

    def close(self, ok: bool) -> None:
        """There are no more: the run is over, or was interrupted (not `ok`)."""


class _TensorBoard:
    """Event files; a folder for each member, so that TensorBoard draws them in one chart."""

    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._writer = Event, Summary, EventFileWriter
        self._folder = Path(about.into) / about.name if about.into else about.folder / "tensorboard"
        if self._folder.exists():
            raise ConfigError(f"{self._folder} is there already", "choose another --into")
        self._began = about.began
        self._writers: dict[str, Any] = {}

    def write(self, points: Sequence[Point]) -> None:
        for each in points:
            writer = self._writers.get(each.member)
            if writer is None:
                folder = self._folder / _safe(each.member) if each.member else self._folder
                writer = self._writers[each.member] = self._writer(str(folder))
            value = self._summary.Value(tag=each.tag, simple_value=each.value)
            summary, wall = self._summary(value=[value]), self._began + each.t
            writer.add_event(self._event(step=each.at, wall_time=wall, summary=summary))
        for writer in self._writers.values():
            writer.flush()

    def close(self, ok: bool) -> None:
        for writer in self._writers.values():
            writer.close()


class _MLflow:
    """A run of an experiment. `into` is a tracking URI: sqlite:///runs.db, http://…"""

    _MOST, _MOST_PARAMETERS = 1000, 100
    """Limits of one call to MLflow."""

    def __init__(self, about: About) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._began = Metric, about.began
        self._client = MlflowClient(tracking_uri=about.into or None)
        known = self._client.get_experiment_by_name(about.project)
        within = known.experiment_id if known else self._client.create_experiment(about.project)
        start = round(1000 * about.began)
        run = self._client.create_run(within, start_time=start, run_name=about.name)
        self._run = run.info.run_id
        given = [Param(key, value[:500]) for key, value in about.parameters.items()]
        for at in range(0, len(given), self._MOST_PARAMETERS):
            some = given[at : at + self._MOST_PARAMETERS]
            self._client.log_batch(self._run, params=some)

    def write(self, points: Sequence[Point]) -> None:
        for at in range(0, len(points), self._MOST):
            metrics = [
                self._metric(_tag(p), p.value, round(1000 * (self._began + p.t)), p.at)
                for p in points[at : at + self._MOST]
            ]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if ok else "KILLED")


class _WandB:
    """A run of a project; `offline` writes files that `wandb sync` sends later."""

    def __init__(self, about: About) -> None:
        import wandb

        self._run = wandb.init(
            project=about.project, name=about.name, config=dict(about.parameters),
            dir=about.into or str(about.folder), mode="offline" if about.offline else None,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        for tags in ("round/*", "hub/*", "exchange/*"):
            self._run.define_metric(tags, step_metric="round")

    def write(self, points: Sequence[Point]) -> None:
        for (axis, at, t), some in groupby(points, lambda p: (p.axis, p.at, p.t)):
            self._run.log({axis: at, "t": t, **{_tag(p): p.value for p in some}})

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


OWN: Mapping[str, Callable[[About], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
}


def find_tracker(name: str) -> Callable[[About], Tracker]:
    """One of `OWN`, or a user's own, whose module may be in the current folder. ConfigError for one
    that is not known, or not installed."""
    extensions.load(name, Path.cwd())
    found = extensions.find("tracker", name, OWN)
    if name in OWN and find_spec(name) is None:
        raise _missing(name, name)
    return found


def _missing(name: str, package: str) -> ConfigError:
    way_out = install_command(name) if name in OWN else f"pip install {name}"
    return ConfigError(f"--to {name} needs the package {package}", way_out)


def _safe(name: str) -> str:
    """A name that every tracker takes, and that is one folder."""
    return re.sub(r"[^\w\-. ]", "_", name).lstrip(".") or "_"


def _tag(point: Point) -> str:
    tag = "/".join(map(_safe, point.tag.split("/")))
    return f"{tag}/{_safe(point.member)}" if point.member else tag


class HandedRun:
    """A run, its tracker, and how far it is handed over. A context: leaving it closes the tracker.

    ConfigError, one line, for whatever the tracker's library raises.
    """

    def __init__(
        self, folder: Path, to: str, *, into: str, project: str, offline: bool, members: int
    ) -> None:
        """`members`: how many have curves of their own."""
        self.curves = Curves(members)
        self.points = 0
        """Handed over so far."""
        self._folder, self._to = folder, to
        self._lines = Follower(metrics_path(folder))
        job = read_job(folder)
        began = (read_summary(folder) or {}).get("began")
        at = datetime.fromisoformat(began).timestamp() if began else folder.stat().st_mtime
        project = project or str(job.get("name") or "edgetrain")
        about = About(folder.name, project, folder, parameters(job), at, into, offline)
        with self._faults():
            begin = find_tracker(to)
            try:
                self._tracker = begin(about)
            except ImportError as error:
                raise _missing(to, error.name or to) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        after = contextlib.suppress(ConfigError) if error else contextlib.nullcontext()
        with after, self._faults():
            self._tracker.close(read_summary(self._folder) is not None)

    def hand_over(self, is_over: bool) -> None:
        while records := self._lines.read():
            for at in range(0, len(records), _PART):
                self._write(records[at : at + _PART])
        if is_over:
            self._write(self._lines.rest())

    def _write(self, records: list[dict[str, Any]]) -> None:
        points = list(self.curves.points(records))
        self.points += len(points)
        with self._faults():
            self._tracker.write(points)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """A tracker's library raises what it likes: one line of it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{self._to} took no more of {self._folder}: {said}",
                "the run goes on; track it again when that is mended",
            ) from error
