"""The content of a page, read from a run's folder: curves, steps, exchanges, rounds, events.

Reading only. Times are seconds since training began.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import (
    read_environment,
    read_job,
    read_metrics,
    read_summary,
    runs_in,
)
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.metrics.tally import Tally
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import complete
from edgetrain.runs.reports.happenings import Happening, happenings
from edgetrain.runs.reports.sweep_rows import labels_in
from edgetrain.runs.shapes import PARTS
from edgetrain.runs.summary import summarise

MOST_RUNS = 24
"""Runs on one page."""
MOST_EVENTS = 200
_ROUTINE = ("joined", "started", "finished", "left")


Parts = tuple[float, float, float, float, float]
"""Seconds of computing, waiting, overhead, evaluation, and of the wait at the end."""


@dataclass
class Step:
    """One line of steps: when it ended, how many steps it stands for, and where its time went."""

    t: float
    steps: int
    step: int
    loss: float | None
    compute_s: float
    wait_s: float
    overhead_s: float
    eval_s: float = 0.0
    end_s: float = 0.0

    @property
    def parts(self) -> Parts:
        """Computing, waiting, overhead, evaluation, the wait at the end: seconds."""
        return self.compute_s, self.wait_s, self.overhead_s, self.eval_s, self.end_s

    @property
    def began(self) -> float:
        return self.t - sum(self.parts)


@dataclass(frozen=True)
class ExchangeTimes:
    round: int
    submitted: float
    arrived: float
    applied: float
    submit_s: float = 0.0
    """Encoding and handing over; `decode_s` and `apply_s` are of the reply."""
    decode_s: float = 0.0
    apply_s: float = 0.0
    sent_bytes: float | None = None
    """Encoded bytes of the contribution, and of the reply; None in older folders."""
    received_bytes: float | None = None


@dataclass
class MemberStory:
    name: str
    steps: list[Step] = field(default_factory=list)
    exchanges: list[ExchangeTimes] = field(default_factory=list)
    sent: list[tuple[float, float]] = field(default_factory=list)
    """(t, bytes sent and received so far)."""
    enrolled: str = ""
    """The name under which its machine was enrolled, if a hub says so."""

    @property
    def called(self) -> str:
        """Its name, and that of its machine beside it, cut to 20 characters."""
        whole = units.beside(self.name, self.enrolled)
        return whole if len(whole) <= 20 else whole[:19] + "…"

    @property
    def seconds(self) -> Parts:
        """The parts of all steps. They add up to the time of the last one."""
        compute, wait, overhead, evaluation, end = (
            (sum(each) for each in zip(*(step.parts for step in self.steps), strict=True))
            if self.steps
            else (0.0,) * 5
        )
        return compute, wait, overhead, evaluation, end

    @property
    def count(self) -> int:
        return sum(step.steps for step in self.steps)


@dataclass
class Story:
    """One run. `label` tells it from the others on a page."""

    label: str
    folder: Path
    summary: Mapping[str, Any]
    job: Mapping[str, Any]
    environment: Mapping[str, Any]
    members: dict[str, MemberStory] = field(default_factory=dict)
    evaluations: list[Record] = field(default_factory=list)
    rounds: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    reducers: str = ""
    """Who adds up what; "": one hub everything."""
    happened: tuple[Happening, ...] = ()
    """Faults, absences, members given up and back, changes of the delay: all of them."""
    enrolled: dict[str, str] = field(default_factory=dict)
    """Names of machines by member, as reported to a hub."""
    events_left_out: int = 0
    damaged: int = 0
    """Lines of metrics that are not ours, or torn."""

    def in_order(self) -> list[MemberStory]:
        """Its members, m2 before m10."""
        return sorted(self.members.values(), key=lambda member: units.natural(member.name))

    def bytes_at(self, t: float) -> float:
        total = 0.0
        for member in self.members.values():
            place = bisect.bisect_right(member.sent, (t, float("inf")))
            total += member.sent[place - 1][1] if place else 0.0
        return total

    @property
    def seconds(self) -> float:
        """When the last step of the last member ended."""
        return max((m.steps[-1].t for m in self.members.values() if m.steps), default=0.0)


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
    for story in stories:
        for member in story.members.values():
            member.enrolled = story.enrolled.get(member.name, "")
    tasks = sorted({str(story.summary.get("task")) for story in stories})
    if len(tasks) > 1:
        raise ConfigError(
            f"these runs train different tasks: {', '.join(tasks)}", "make a report of each"
        )
    _label(stories)
    return stories


def _read(folder: Path) -> Story:
    job = read_job(folder)
    summary = read_summary(folder)
    story = Story(folder.name, folder, {}, job, read_environment(folder))
    lines, tally = read_metrics(folder), Tally()
    for record in lines:
        tally.add(record)
        try:
            add_record(story, record)
        except (KeyError, TypeError, ValueError):
            story.damaged += 1
    story.damaged += lines.damaged
    story.summary = complete(summarise(folder, tally=tally) if summary is None else summary)
    story.evaluations = sorted(tally.evaluations, key=lambda record: record["t"])
    trained = any(member.steps or member.exchanges for member in story.members.values())
    if summary is None and not (tally.marked or trained or story.evaluations):
        raise ConfigError(
            f"there is nothing to report of {folder}: "
            + (f"none of its {story.damaged} lines can be read" if story.damaged else _NO_LINE),
            "is it damaged, or did the run end before it began? `edgetrain runs` lists the others",
        )
    story.reducers = units.printable(tally.reducers)
    story.happened = happenings(tally.marked)
    story.enrolled = {
        name: units.printable(member.name) for name, member in tally.members.items() if member.name
    }
    for member in story.members.values():
        member.steps.sort(key=lambda step: step.t)
        member.sent.sort()
    story.rounds.sort(key=lambda record: record["t"])
    return story


def add_record(story: Story, record: Record) -> None:
    """Add a line. KeyError, TypeError or ValueError for one that is not ours."""
    kind, name = record["kind"], record["member"]
    if kind == "step":
        member = story.members.setdefault(name, MemberStory(name))
        member.steps.append(_step(record))
        used = float(record["sent_bytes"]) + float(record["received_bytes"])
        member.sent.append((record["t"], used))
    elif kind == "exchange":
        member = story.members.setdefault(name, MemberStory(name))
        submitted, arrived = float(record["submitted_t"]), float(record["arrived_t"])
        member.exchanges.append(
            ExchangeTimes(
                round=int(record["round"]),
                submitted=submitted,
                arrived=arrived,
                applied=record["t"],
                submit_s=_known(record.get("submit_s")) or 0.0,
                decode_s=_known(record.get("decode_s")) or 0.0,
                apply_s=_known(record.get("apply_s")) or 0.0,
                sent_bytes=_known(record.get("sent_bytes")),
                received_bytes=_known(record.get("received_bytes")),
            )
        )
    elif kind == "round":
        story.rounds.append(record)
    elif kind == "event" and record.get("event") not in _ROUTINE:
        if len(story.events) < MOST_EVENTS:
            story.events.append(record)
        else:
            story.events_left_out += 1


_NO_LINE = "no line has been written to its metrics.jsonl"


def _known(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _step(record: Record) -> Step:
    loss = record.get("loss")
    return Step(
        float(record["t"]),
        int(record.get("steps", 1)),
        int(record["step"]),
        float(loss) if isinstance(loss, int | float) else None,
        *(float(record.get(part) or 0.0) for part in PARTS),
    )


def _joined(stories: list[Story]) -> list[Story]:
    """A hub's folder and its members' folders become one story, that of the hub."""
    hubs = [story for story in stories if story.rounds and not story.members]
    parts = [story for story in stories if story.members and not story.rounds]
    if len(hubs) != 1 or not parts or len(hubs) + len(parts) != len(stories):
        return stories
    whole = hubs[0]
    for part in parts:
        whole.members |= part.members
        whole.events += part.events
        whole.damaged += part.damaged
    # A hub has the figures that it was sent only where members keep none.
    own = [each for part in parts for each in part.evaluations]
    whole.evaluations = sorted(own or whole.evaluations, key=lambda record: record["t"])
    whole.events.sort(key=lambda record: record["t"])
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
