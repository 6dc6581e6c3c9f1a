"""The content of a page, read from a run's folder: curves, steps, exchanges, rounds, events.

Reading only. Times are seconds since training began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import (
    read_environment,
    read_job,
    read_metrics,
    read_summary,
    runs_in,
)
from edgetrain.runs.kept import MemberLines, RunLines
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import complete
from edgetrain.runs.reports.happenings import Happening, happenings
from edgetrain.runs.reports.sweep_rows import labels_in
from edgetrain.runs.shapes import PARTS
from edgetrain.runs.summary import summarise

MOST_RUNS = 24
"""Runs on one page."""


@dataclass
class Story:
    """One run: its summary, and its lines."""

    label: str
    folder: Path
    summary: dict[str, Any]
    job: dict[str, Any]
    environment: dict[str, Any]
    data: RunLines
    damaged: int = 0
    """Lines that could not be read."""
    evaluations: list[Record] = field(default_factory=list)

    @property
    def members(self) -> dict[str, MemberLines]:
        """Those whose lines are here."""
        return self.data.writers

    @property
    def happened(self) -> tuple[Happening, ...]:
        return happenings(self.data.marked)

    @property
    def rounds(self) -> list[Record]:
        return sorted(self.data.merged, key=lambda record: record["t"])

    def in_order(self) -> list[MemberLines]:
        """Members by number: m2 before m10."""
        return sorted(self.members.values(), key=lambda member: units.natural(member.name))

    @cached_property
    def steps(self) -> NDArray[Any]:
        """Those of `data`."""
        return self.data.steps()

    def bytes_at(self, t: NDArray[Any]) -> NDArray[Any]:
        """Sent and received by all members until each `t` [moments]."""
        steps = self.steps
        so_far = [0.0, *(steps["sent_bytes"] + steps["received_bytes"])]
        return np.array(so_far)[np.searchsorted(steps["t"], t, side="right")]

    @property
    def seconds(self) -> float:
        """When the last step of the last member ended."""
        ends = (float(m.steps["t"][-1]) for m in self.members.values() if len(m.steps))
        return max(ends, default=0.0)


def report_of(folders: Sequence[Path]) -> list[Story]:
    """The runs in these folders: run folders, or folders of runs (comparisons, sweeps).

    A hub's folder and the folders of its members, given together, are one run. Raises ConfigError
    for what is no run folder, for runs of different tasks, and for more than MOST_RUNS.
    """
    runs = [run for folder in folders for run in runs_in(folder)]
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"{len(runs)} runs are too many for one page", f"give at most {MOST_RUNS}"
        )
    stories = _joined([_read(run) for run in runs])
    tasks = sorted({str(story.summary.get("task")) for story in stories})
    if len(tasks) > 1:
        raise ConfigError(
            f"these runs train different tasks: {', '.join(tasks)}", "make a report of each"
        )
    _label(stories)
    return stories


def _read(folder: Path) -> Story:
    job, summary = read_job(folder), read_summary(folder)
    lines = read_metrics(folder)
    data = RunLines().add_all(lines)
    damaged = lines.damaged + data.damaged
    if summary is None and not (data.marked or data.writers or data.evaluations):
        raise ConfigError(
            f"there is nothing to report of {folder}: "
            + (f"none of its {damaged} lines can be read" if damaged else _NO_LINE),
            "is it damaged, or did the run end before it began? `edgetrain runs` lists the others",
        )
    known = complete(summarise(folder, data=data) if summary is None else summary)
    evaluations = sorted(data.evaluations, key=lambda record: record["t"])
    environment = read_environment(folder)
    return Story(folder.name, folder, dict(known), job, environment, data, damaged, evaluations)


_NO_LINE = "no line has been written to its metrics.jsonl"


def _joined(stories: list[Story]) -> list[Story]:
    """A hub's folder and its members' folders become one story, that of the hub."""
    hubs = [story for story in stories if story.rounds and not story.members]
    parts = [story for story in stories if story.members and not story.rounds]
    if len(hubs) != 1 or not parts or len(hubs) + len(parts) != len(stories):
        return stories
    whole = hubs[0]
    enrolled = {name: member.enrolled for name, member in whole.data.members.items()}
    for part in parts:
        for name, member in part.members.items():
            member.enrolled = enrolled.get(name, "")
            whole.data.members[name] = member
        whole.data.events += part.data.events
        whole.damaged += part.damaged
    whole.data.events.sort(key=lambda record: record["t"])
    for each in parts:  # of what members found the hub was told the newest, or nothing
        if each.data.own_data is not None:
            whole.data.own_data = whole.data.own_data or type(each.data.own_data)()
            whole.data.own_data.merge(each.data.own_data)
    # A hub has the figures that it was sent only where members keep none.
    own = [each for part in parts for each in part.evaluations]
    whole.evaluations = sorted(own or whole.evaluations, key=lambda record: record["t"])
    known = dict(parts[0].summary)
    for part in parts:
        known |= {key: value for key, value in part.summary.items() if value}
    best = next((p.summary for p in parts if (p.summary.get("final") or {})), parts[0].summary)
    sums = ("sent_bytes", "received_bytes", "cpu_s")
    totals = {key: sum(p.summary.get(key) or 0 for p in parts) for key in sums}
    whole.summary = {
        **known,
        **{key: value for key, value in whole.summary.items() if value},
        # A hub knows few of the figures, and not what the task counts as trained.
        **{key: best.get(key) for key in _OF_THE_TASK},
        **_speed_of(parts),
        **totals,
    }
    if (found := whole.data.own_data) is not None:
        words = str(whole.summary.get("metric")), str(whole.summary.get("better"))
        whole.summary["own_data"] = found.at_the_end(*words)
    return [whole]


_OF_THE_TASK = (
    "metric", "better", "target", "final", "target_seconds", "target_steps", "final_seconds",
)  # fmt: skip


def _speed_of(parts: Sequence[Story]) -> dict[str, Any]:
    """The steps of several members' summaries: the most of them, and means of their times."""
    rates = [rate for part in parts if (rate := part.summary.get("steps_per_second"))]
    speed: dict[str, Any] = {
        "steps": max(part.summary["steps"] for part in parts),
        "seconds": max(part.summary["seconds"] for part in parts),
        "steps_per_second": sum(rates) / len(rates) if rates else None,
    }
    for key in ("seconds_per_step", *PARTS):
        values = [part.summary[key] for part in parts if part.summary.get(key) is not None]
        speed[key] = sum(values) / len(values) if values else None
    return speed


def _label(stories: Sequence[Story]) -> None:
    """Name the runs after what tells them apart: the axes of their sweep, or the strategies."""
    sweeps = {folder: labels_in(folder) for folder in {story.folder.parent for story in stories}}
    cells = [sweeps[story.folder.parent].get(story.folder.name, "") for story in stories]
    strategies = [str(story.summary.get("strategy") or story.folder.name) for story in stories]
    folders = [story.folder.name for story in stories]
    labels = strategies if len(set(strategies)) == len(strategies) else folders
    if all(cells) and len(set(cells)) == len(cells):
        labels = cells
    if len(set(labels)) < len(labels):
        labels = [f"{label} {number}" for number, label in enumerate(labels, 1)]
    for story, label in zip(stories, labels, strict=True):
        story.label = label
