"""A run in plain lines of ASCII: its state, and the events that people should see."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from edgetrain.runs.metrics.lines import HUB, Record
from edgetrain.runs.reports import units
from edgetrain.runs.reports.live.watch import RunState

_ROUTINE = ("joined", "started", "finished", "left")
"""Events of every member of a healthy run: counted together, not shown one by one."""


def plain_line(state: RunState) -> str:
    """A run in one line of ASCII."""
    if not state.step:
        return f"{state.name}: {state.phase}"
    steps = f"/{state.steps}" if state.steps else ""
    parts = [
        f"step {state.step:.0f}{steps}",
        f"loss {units.figure('loss', state.loss)}",
        f"held-out {state.metric} {units.figure(state.metric, state.figure)}",
        f"{units.duration(state.seconds_per_step)}/step ({_split_in_words(state)})",
        f"sent {units.size(state.sent_bytes)} received {units.size(state.received_bytes)}",
    ]
    if state.late:
        parts.append(f"{state.late} times late")
    if state.left_s is not None:
        parts.append(f"{units.duration(state.left_s)} left")
    if state.trusted is False:
        parts.append("untrusted: the emulated network was late")
    return f"{state.name}: " + ", ".join(parts)


def _split_in_words(state: RunState) -> str:
    parts = ("compute", state.compute_s), ("wait", state.wait_s), ("overhead", state.overhead_s)
    return ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in parts)


def news(name: str, records: Iterable[Record], *, routine: bool = True) -> list[str]:
    """A line for each event of the run `name` that people should see.

    Events of every member of a healthy run are counted together, or left out without `routine`.
    A late member is not reported: a slow one is late in every round. States and plain lines have
    the count.
    """
    lines, counts = [], Count[str]()
    for record in records:
        if record["kind"] != "event" or record.get("event") == "late":
            continue
        event = units.printable(str(record.get("event")))
        about = units.printable(str(record.get("about") or record["member"]))
        if event in _ROUTINE and about != HUB:
            counts[event] += 1
        else:
            reason = units.printable(str(record.get("reason") or ""))
            when = units.duration(max(0.0, record["t"]))
            lines.append(f"{name}: {about} {event} at {when}" + (f": {reason}" if reason else ""))
    counted = [
        f"{name}: {count} member{'s' if count > 1 else ''} {event}"
        for event, count in counts.items()
    ]
    return counted + lines if routine else lines
