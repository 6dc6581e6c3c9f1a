"""Runs as a trace in Chrome's JSON format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A run is a process, a member is a thread. Steps are slices with their parts nested in them.
Exchanges overlap each other, and slices of a thread must not: they are asynchronous events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edgetrain.runs.reports.page.charts import in_time
from edgetrain.runs.reports.page.story import MemberStory, Step, Story

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
        what = {key: record.get(key) for key in ("every", "delay", "missing") if record.get(key)}
        yield _instant(f"round {record.get('round')} merged", record["t"], pid, HUB) | {
            "args": what
        }
    for record in story.events:
        tid = threads.get(str(record.get("about") or record["member"]), HUB)
        said = {"reason": str(record.get("reason") or "")}
        yield _instant(str(record.get("event")), record["t"], pid, tid) | {"args": said}
    for name, tid in threads.items():
        member = story.members[name]
        yield _name("thread_name", member.called, pid, tid)
        before = 0.0
        for step in member.steps:
            yield from _slices(step, before, pid, tid)
            before = step.t
        yield from _flights(member, pid, tid)


def _slices(step: Step, before: float, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """A step, and its parts inside it. None begins `before` the end of the last step."""
    many = f"steps to {step.step}" if step.steps > 1 else f"step {step.step}"
    at = min(max(step.began, before), step.t)
    yield _slice(many, at, step.t - at, pid, tid) | {"args": {"loss": _finite(step.loss)}}
    for kind, seconds in in_time(step):
        if seconds > 0:
            seconds = min(seconds, step.t - at)
            yield _slice(kind, at, seconds, pid, tid)
            at += seconds


def _flights(member: MemberStory, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    for exchange in member.exchanges:
        place = {"cat": "exchange", "id": f"{pid}.{tid}.{exchange.round}", "pid": pid, "tid": tid}
        name = f"{member.name} round {exchange.round}"
        ends = ("b", exchange.submitted), ("n", exchange.arrived), ("e", exchange.applied)
        for phase, at in ends:
            said = {"args": {"what": "answered"}} if phase == "n" else {}
            yield {"name": name, "ph": phase, "ts": _micro(at), **place, **said}


def _slice(name: str, at: float, seconds: float, pid: int, tid: int) -> dict[str, Any]:
    times = {"ts": _micro(at), "dur": _micro(max(seconds, 0.0))}
    return {"name": name, "ph": "X", **times, "pid": pid, "tid": tid}


def _instant(name: str, at: float, pid: int, tid: int) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "ts": _micro(at), "pid": pid, "tid": tid}


def _name(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


COLUMNS = (
    "run", "member", "t", "step", "steps", "loss",
    "compute_s", "wait_s", "overhead_s", "eval_s", "end_s",
)  # fmt: skip


def table(stories: Sequence[Story]) -> Iterable[Sequence[object]]:
    """A row for each line of steps, below their headings: seconds as in metrics.jsonl."""
    yield COLUMNS
    for story in stories:
        for member in story.in_order():
            for step in member.steps:
                loss = "" if step.loss is None else step.loss
                yield story.label, member.name, step.t, step.step, step.steps, loss, *step.parts
