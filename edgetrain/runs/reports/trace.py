"""Runs as a trace in Chrome's JSON format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A run is a process, a member is a thread. Steps are slices with their parts nested in them.
Exchanges overlap each other, and slices of a thread must not: they are asynchronous events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

from edgetrain.runs.kept import MemberLines
from edgetrain.runs.reports.happenings import event_in_words
from edgetrain.runs.reports.page.charts import begin_of, called, in_time
from edgetrain.runs.reports.page.story import Story
from edgetrain.runs.shapes import PARTS

HUB = 0
"""The thread of the hub; members count from 1."""


def trace(stories: Sequence[Story]) -> str:
    events = (event for pid, story in enumerate(stories, 1) for event in _events(story, pid))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _events(story: Story, pid: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", story.label, pid, HUB)
    yield _name("thread_name", "hub", pid, HUB)
    threads = {member.name: tid for tid, member in enumerate(story.in_order(), 1)}
    for record in story.rounds:
        told = ("local_steps", "delay", "missing")
        what = {key: record.get(key) for key in told if record.get(key)}
        yield _instant(f"round {record.get('round')} merged", record["t"], pid, HUB) | {
            "args": what
        }
    for record in story.data.events:
        about, event, reason = event_in_words(record)
        tid, said = threads.get(about, HUB), {"reason": reason}
        yield _instant(event, record["t"], pid, tid) | {"args": said}
    for name, tid in threads.items():
        member = story.members[name]
        yield _name("thread_name", called(member), pid, tid)
        before = 0.0
        for step in member.steps:
            yield from _slices(step, before, pid, tid)
            before = float(step["t"])
        yield from _flights(member, pid, tid)


def _slices(step: Any, before: float, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """A step, and its parts inside it. None begins `before` the end of the last step."""
    many = f"{'steps to' if step['steps'] > 1 else 'step'} {step['step']:.0f}"
    end, loss = float(step["t"]), float(step["loss"])
    at = min(max(float(begin_of(step)), before), end)
    said = {"loss": loss if isfinite(loss) else None}
    yield _slice(many, at, end - at, pid, tid) | {"args": said}
    for kind, seconds in in_time(step):
        if seconds > 0:
            seconds = min(seconds, end - at)
            yield _slice(kind, at, seconds, pid, tid)
            at += seconds


def _flights(member: MemberLines, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    for exchange in member.exchanges:
        round = int(exchange["round"])
        place = {"cat": "exchange", "id": f"{pid}.{tid}.{round}", "pid": pid, "tid": tid}
        name = f"{member.name} round {round}"
        for phase, key in (("b", "submitted_t"), ("n", "arrived_t"), ("e", "t")):
            said = {"args": {"what": "answered"}} if phase == "n" else {}
            yield {"name": name, "ph": phase, "ts": _micro(float(exchange[key])), **place, **said}


def _slice(name: str, at: float, seconds: float, pid: int, tid: int) -> dict[str, Any]:
    times = {"ts": _micro(at), "dur": _micro(max(seconds, 0.0))}
    return {"name": name, "ph": "X", **times, "pid": pid, "tid": tid}


def _instant(name: str, at: float, pid: int, tid: int) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "ts": _micro(at), "pid": pid, "tid": tid}


def _name(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


COLUMNS = ("run", "member", "t", "step", "steps", "loss", *PARTS)


def table(stories: Sequence[Story]) -> Iterable[Sequence[object]]:
    """A row for each line of steps, below their headings: seconds as in metrics.jsonl."""
    yield COLUMNS
    for story in stories:
        for member in story.in_order():
            for step in member.steps:
                t, loss, *parts = (float(step[key]) for key in ("t", "loss", *PARTS))
                counts = int(step["step"]), int(step["steps"])
                yield story.label, member.name, t, *counts, loss if isfinite(loss) else "", *parts
