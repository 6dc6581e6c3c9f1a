"""Runs under way as Prometheus reads them: text, a line for each figure of each run. Pure.

Of the fleet as a whole: a series for each of a thousand members would cost the reader more than it
tells. Names and units as Prometheus wants them: base units, `_total` for what only grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from edgetrain.runs.reports.live.watch import RunState

TYPE = "text/plain; version=0.0.4; charset=utf-8"

Series = tuple[str, dict[str, str], float | None]
"""Name, labels beside the run's, value; None is left out."""

HELP = {
    "step": "mean step of its members",
    "steps": "steps of the job",
    "loss": "mean of the members' last training losses",
    "figure": "the task's figure on held-out data",
    "seconds_per_step": "seconds of a member's step since training began",
    "wait_share": "part of their time that members wait",
    "sent_bytes_total": "bytes that members have sent",
    "received_bytes_total": "bytes that members have received",
    "late_total": "contributions that missed their round",
    "members": "members, by state",
    "unread": "1: the run's folder cannot be read, or not yet",
}
"""Description of each name, in the order of the text."""


def exposition(runs: Iterable[tuple[str, RunState | str]]) -> str:
    """The text of runs, each with the id that is its label. Of one that cannot be read: why."""
    lines: dict[str, list[str]] = {name: [] for name in HELP}
    for run, state in runs:
        for name, labels, value in _series(state):
            if value is not None:
                said = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
                said = f'run="{_escaped(run)}"' + (f",{said}" if said else "")
                lines[name].append(f"edgetrain_{name}{{{said}}} {value:.10g}\n")
    whole = []
    for name, found in lines.items():
        if found:
            kind = "counter" if name.endswith("_total") else "gauge"
            head = f"# HELP edgetrain_{name} {HELP[name]}\n# TYPE edgetrain_{name} {kind}\n"
            whole += [head, *found]
    return "".join(whole)


def _series(state: RunState | str) -> Iterator[Series]:
    if isinstance(state, str):
        yield "unread", {"why": state}, 1.0
        return
    spent = state.compute_s + state.wait_s + state.overhead_s
    yield "step", {}, state.step
    yield "steps", {}, state.steps
    yield "loss", {}, state.loss
    yield "figure", {"metric": state.metric}, state.figure
    yield "seconds_per_step", {}, state.seconds_per_step
    yield "wait_share", {}, state.wait_s / spent if spent else None
    yield "sent_bytes_total", {}, state.sent_bytes
    yield "received_bytes_total", {}, state.received_bytes
    yield "late_total", {}, state.late
    for standing, count in sorted(Counter(each.standing for each in state.members).items()):
        yield "members", {"state": standing or "in"}, count


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
