"""Who takes the points of a run: TensorBoard, MLflow, Weights & Biases, and what a package adds.

Each library is imported where it is used, and is an extra. Nothing here reads a run folder.
Another tracker is an entry point of the group "edgetrain.trackers": a name, and a function that is
given an `About` and returns a `Tracker`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.runs.tracking.points import Point


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


def trackers() -> dict[str, Callable[[About], Tracker]]:
    """All that are known here, by name: ours, and those of other packages."""
    found = dict(OWN)
    for each in entry_points(group="edgetrain.trackers"):
        found.setdefault(each.name, _loaded_when_used(each))
    return found


def _loaded_when_used(point: EntryPoint) -> Callable[[About], Tracker]:
    def begin(about: About) -> Tracker:
        made: Tracker = point.load()(about)
        return made

    return begin


def find_tracker(name: str) -> Callable[[About], Tracker]:
    """ConfigError for one that is not known, or not installed."""
    known = trackers()
    if name not in known:
        raise ConfigError(f"no tracker '{name}'", did_you_mean(name, known))
    if name in OWN and find_spec(name) is None:
        raise _missing(name, name)
    return known[name]


def open_tracker(name: str, about: About) -> Tracker:
    """ConfigError for one that is not known, not installed, or that cannot begin."""
    begin = find_tracker(name)
    try:
        return begin(about)
    except ImportError as error:
        raise _missing(name, error.name or name) from None


def _missing(name: str, package: str) -> ConfigError:
    way_out = f"pip install 'edgetrain[{name}]'" if name in OWN else f"pip install {name}"
    return ConfigError(f"--to {name} needs the package {package}", way_out)


def _safe(name: str) -> str:
    """A name that every tracker takes, and that is one folder."""
    return re.sub(r"[^\w\-. ]", "_", name).lstrip(".") or "_"


def _tag(point: Point) -> str:
    tag = "/".join(map(_safe, point.tag.split("/")))
    return f"{tag}/{_safe(point.member)}" if point.member else tag
