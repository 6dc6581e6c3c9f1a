"""A run folder that is handed to a tracker: TensorBoard, MLflow, Weights & Biases, or a package's.

Each library is imported where it is used, and is an extra: it is called back through `Tracker`.
Another tracker is a user's own (`extensions`), a function that is given an `About` and returns a
`Tracker`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.runs.folder import metrics_path, read_job, read_summary
from edgetrain.runs.metrics.lines import Follower
from edgetrain.runs.tracking.points import Curves, Point, parameters

_PART = 20_000
"""Lines whose points are handed over at once."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run before its points."""

    name: str
    project: str
    folder: Path
    parameters: Mapping[str, str]
    """Every key of the job."""
    began: float
    """When training began: seconds since 1970."""
    into: str
    """Where to: a folder, or an address; "": the tracker's own place."""
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
    """Of one call, as MLflow allows."""

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
    way_out = f"pip install 'edgetrain[{name}]'" if name in OWN else f"pip install {name}"
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
