"""The result of runs in one sentence: the title of a picture and of a page.

Pure functions of a comparison or of a sweep's points. A sentence claims only what the figures hold:
ties, targets that no run reached, single runs, runs that failed and runs that are not to be trusted
have words of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison, Row

TIE = 1.05
"""Two times that differ by less than this factor are called equal."""
_STATUS = {
    "failed": "ended by an error",
    "interrupted": "interrupted",
    "incomplete": "incomplete: members failed",
}
_MOST_NAMES = 4


def message(compared: Comparison) -> str:
    """The result of these runs; the others are compared with the first."""
    rows = compared.rows
    if not rows:
        return "No run"
    said = _of_one(compared, rows[0]) if len(rows) == 1 else _of_several(compared)
    doubtful = any(row.timing_ok is False for row in rows)
    return f"{said} (late emulation: not to be trusted)" if doubtful else said


def _of_one(compared: Comparison, row: Row) -> str:
    status = f" ({_STATUS[row.status]})" if row.status in _STATUS else ""
    if row.final is None and row.target_seconds is None:
        steps = f"{row.steps:,} steps in {units.duration(row.seconds)}" if row.steps else "no step"
        return f"{row.label}: {steps}, not evaluated{status}"
    said = f"{row.label}: {compared.metric} {units.figure(compared.metric, row.final)}"
    if compared.target is None:
        return f"{said} after {_time_of_figure(row)}{status}"
    goal = units.goal(compared.metric, compared.target)
    if row.target_seconds is not None:
        return f"{said}, {goal} after {units.duration(row.target_seconds)}{status}"
    return f"{said} after {_time_of_figure(row)}, {goal} not reached{status}"


def _time_of_figure(row: Row) -> str:
    """When the run's last figure was taken, and how long the run took where it went on."""
    end = units.duration(row.seconds)
    if row.final_seconds is None or row.seconds < TIE * row.final_seconds:
        return end
    return f"{units.duration(row.final_seconds)} of {end}"


def _of_several(compared: Comparison) -> str:
    reached = [row for row in compared.rows if row.target_seconds is not None]
    if compared.target is None or not reached or not all(row.comparable for row in compared.rows):
        return _ends(compared)
    goal = units.goal(compared.metric, compared.target)
    first, others = compared.rows[0], [row for row in reached if row is not compared.rows[0]]
    if not others:
        after = units.duration(first.target_seconds)
        return f"Only {first.label} reaches {goal}, after {after}"
    best = min(others, key=_seconds_to_target)
    after = units.duration(best.target_seconds)
    if first.target_seconds is None:
        if best.speedup_at_least is not None:
            factor = units.times(best.speedup_at_least).removesuffix("x")
            least = f"over {factor} times sooner than {first.label}, which does not"
            return f"{best.label} reaches {goal} {least}"
        return f"{best.label} reaches {goal} after {after}; {first.label} does not ({_end(first)})"
    ratio = _seconds_to_target(first) / max(_seconds_to_target(best), 1e-9)
    if ratio >= TIE:
        factor = units.times(ratio).removesuffix("x")
        return f"{best.label} reaches {goal} {factor} times sooner than {first.label}"
    if ratio > 1 / TIE:
        return f"{best.label} and {first.label} reach {goal} equally soon, after {after}"
    factor = units.times(1 / ratio).removesuffix("x")
    return f"{first.label} reaches {goal} first, {factor} times sooner than {best.label}"


def _seconds_to_target(row: Row) -> float:
    return row.target_seconds or 0.0


def _end(row: Row) -> str:
    return _STATUS.get(row.status) or f"it ends after {units.duration(row.seconds)}"


def _ends(compared: Comparison) -> str:
    """The figures at the end, where no run reached the target or there is none."""
    rows, metric = compared.rows, compared.metric
    if all(row.final is None for row in rows):
        return f"{len(rows)} runs, not evaluated"
    named = any("," in row.label for row in rows)  # of a sweep: by the values of its axes
    shown = ("; " if named else ", ").join(
        f"{row.label}{':' if named else ''} {units.figure(metric, row.final)} in "
        f"{_time_of_figure(row)}"
        for row in rows[:_MOST_NAMES]
    )
    more = f" and {len(rows) - _MOST_NAMES} more" if len(rows) > _MOST_NAMES else ""
    if compared.target is None:
        return f"{metric.capitalize()} at the end: {shown}{more}"
    goal = units.goal(metric, compared.target)
    if reached := sum(row.target_seconds is not None for row in rows):
        return f"{reached} of {len(rows)} runs reach {goal}: {shown}{more}"
    return f"No run reaches {goal}: {shown}{more}"


# -- along an axis -----------------------------------------------------------------------------

Line = Mapping[str, Mapping[str, Any]]
"""Value of an axis -> point of a sweep, as `sweep_rows.series` has them."""


def speeds_message(axis: str, end: str, speeds: Mapping[str, float], base: str) -> str:
    """Speed of each line at the value `end` of an axis, relative to its speed at `base`."""
    if not speeds:
        return f"Along {axis}: nothing was measured at both ends"
    ranked = sorted(speeds, key=lambda name: -speeds[name])
    parts = []
    for name in ranked[:_MOST_NAMES]:
        speed = speeds[name]
        rate = units.times(speed) if speed >= 2 else f"{speed * 100:.0f} %"
        parts.append(f"{name} {rate}".strip())
    more = f", {len(ranked) - _MOST_NAMES} more" if len(ranked) > _MOST_NAMES else ""
    return f"Steps a second at {axis} {end} ({axis} {base} = 100 %): {', '.join(parts)}{more}"


def sweep_message(axis: str, labels: Sequence[str], lines: Mapping[str, Line], metric: str) -> str:
    first, last = labels[0], labels[-1]
    ends = {
        name: (line[first], line[last]) for name, line in lines.items() if {first, last} <= {*line}
    }
    speeds = {
        name: b["fleet_steps_per_second"] / a["fleet_steps_per_second"]
        for name, (a, b) in ends.items()
        if a["fleet_steps_per_second"] and b["fleet_steps_per_second"]
    }
    if any(not 0.9 <= speed <= 1.1 for speed in speeds.values()):
        return speeds_message(axis, last, speeds, first)
    finals = [
        f"{name} {units.figure(metric, a['final'])} to {units.figure(metric, b['final'])}".strip()
        for name, (a, b) in ends.items()
        if a["final"] is not None and b["final"] is not None
    ]
    if not finals:
        return f"Along {axis}: {len(labels)} values"
    more = f" and {len(finals) - _MOST_NAMES} more" if len(finals) > _MOST_NAMES else ""
    said = ", ".join(finals[:_MOST_NAMES])
    return f"Final {metric}, {axis} {first} to {last}: {said}{more}"


def capacity_message(row: Mapping[str, Any]) -> str:
    """The result for the largest fleet of a capacity plan."""
    members, speed = row["members"], row["speed_up"]
    share = units.share(speed / members) if members else units.ABSENT
    return (
        f"{members:,} members train as fast as {speed:,.0f} that never wait ({share}); "
        f"bottleneck: {row['bottleneck']}"
    )
