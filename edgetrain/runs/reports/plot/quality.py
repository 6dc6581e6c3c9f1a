"""Panels of a run's metric against time and against steps.

Shared by the picture of one run and the picture of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison
from edgetrain.runs.reports.plot.bars import unit_of_time
from edgetrain.runs.reports.plot.curves import Curve, needs_log, seconds_until_visible
from edgetrain.runs.reports.plot.ends import LineEnd
from edgetrain.runs.reports.plot.marks import Marked, draw_marks
from edgetrain.runs.reports.plot.style import TARGET, as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_against_time(
    axes: Axes, curves: Sequence[Curve], compared: Comparison, end: float
) -> None:
    """The metric of each run against seconds, up to `end`, with marks where something happened."""
    unit, seconds = unit_of_time(end)
    for curve in curves:
        t = [value / seconds for value in curve.t]
        label = _with_target_time(curve, compared)
        axes.plot(t, curve.values, curve.dashes, color=curve.colour, label=label)
    _draw_target(axes, compared)
    for curve in curves:
        if compared.target is not None and curve.row.target_seconds is not None:
            at = curve.row.target_seconds / seconds
            axes.plot([at], [compared.target], "o", color=curve.colour, ms=9, zorder=5)
    goal = None if compared.target is None else units.goal(compared.metric, compared.target)
    dots = f" (dot: {goal})" if goal and any(curve.row.target_seconds for curve in curves) else ""
    axes.set_title(f"{compared.metric} against time{dots}")
    axes.set_xlabel(f"time since training began ({unit})")
    lowest, begin = _scale_metric(axes, curves, compared), 0.0
    axes.set_xlim(0, end / seconds)
    if needs_log(curves, end):
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        begin = 0.8 * seconds_until_visible(curves, lowest)
        axes.set_xlim(begin / seconds, end / seconds)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    for curve in curves:
        shown = tuple(each for each in curve.happened if begin <= each.t <= end)
        points = list(zip(curve.t, curve.values, strict=True))
        draw_marks(axes, Marked(shown, curve.colour), points, end, seconds)


def time_ends(curves: Sequence[Curve], compared: Comparison, end: float) -> list[LineEnd]:
    """The ends of the lines of `draw_against_time`, with the time to the target."""
    _, seconds = unit_of_time(end)
    ends = []
    for curve in curves:
        points = [point for point in zip(curve.t, curve.values, strict=True) if point[0] <= end]
        if points:
            text = f"{curve.plain_name}{_time_to_target(curve, compared)}"
            ends.append(LineEnd(points[-1][0] / seconds, points[-1][1], text, curve.colour))
    return ends


def step_ends(curves: Sequence[Curve], compared: Comparison) -> list[LineEnd]:
    """The ends of the lines of `draw_against_steps`, with the last value, and the target."""
    ends = [
        LineEnd(
            curve.steps[-1],
            curve.values[-1],
            f"{curve.plain_name} {units.figure(compared.metric, curve.values[-1])}",
            curve.colour,
        )
        for curve in curves
        if curve.values
    ]
    if compared.target is not None:
        last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
        goal = f"target {units.goal(compared.metric, compared.target)}"
        ends.append(LineEnd(last, compared.target, goal, TARGET, bold=False))
    return ends


def _time_to_target(curve: Curve, compared: Comparison) -> str:
    row = curve.row
    if compared.target is None:
        return ""
    if row.target_seconds is None:
        return ", not reached"
    faster = ""
    if row.speedup_at_least is not None:
        faster = f", over {units.times(row.speedup_at_least)}"
    elif row.speedup is not None and row is not compared.rows[0]:
        faster = f", {units.times(row.speedup)}"
    return f" {units.duration(row.target_seconds)}{faster}"


def draw_against_steps(
    axes: Axes, curves: Sequence[Curve], compared: Comparison, *, name_target: bool = False
) -> None:
    """The metric of each run against steps. `name_target`: in the margin."""
    for curve in curves:
        axes.plot(curve.steps, curve.values, curve.dashes, color=curve.colour)
    _draw_target(axes, compared)
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
    if compared.target is not None and name_target:
        # In the margin: inside the panel a curve is always near the target.
        goal = units.goal(compared.metric, compared.target)
        axes.annotate(
            f"target\n{goal}",
            (last, compared.target),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=TARGET,
            fontsize=12,
            annotation_clip=False,
        )
    axes.set_title(f"{compared.metric} against steps")
    axes.set_xlabel("steps of each member")
    axes.set_xlim(0, last)
    axes.tick_params(labelleft=False)


def _with_target_time(curve: Curve, compared: Comparison) -> str:
    row = curve.row
    name = as_text(row.label) + (" (untrusted)" if row.trusted is False else "")
    if compared.target is None:
        return name
    goal = units.goal(compared.metric, compared.target)
    if row.target_seconds is None:
        return f"{name}: {goal} never reached"
    text = f"{name}: {goal} at {units.duration(row.target_seconds)}"
    if row.speedup_at_least is not None:
        return f"{text}, over {units.times(row.speedup_at_least)} sooner"
    if row.speedup is None or row is compared.rows[0]:
        return text
    if row.speedup >= 1:
        return f"{text}, {units.times(row.speedup)} sooner"
    return f"{text}, {units.times(1 / row.speedup)} later"


def _draw_target(axes: Axes, compared: Comparison) -> None:
    if compared.target is not None:
        axes.axhline(compared.target, color=TARGET, lw=1.2, ls=(0, (4, 3)), zorder=1)


def _scale_metric(axes: Axes, curves: Sequence[Curve], compared: Comparison) -> float:
    """Set the vertical range and return its lower edge."""
    values = [value for curve in curves for value in curve.values]
    if units.is_fraction(compared.metric):
        # All runs rise from guessing alike; they differ near the target.
        near = (compared.target or max(values, default=1.0)) - 0.45
        # A run that never comes near the target is still to be seen.
        best = [max(curve.values) for curve in curves if curve.values]
        near = min([near, *(each - 0.1 for each in best)])
        axes.set_ylim(max(0.0, min(values, default=0.0), near), 1.0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    else:
        axes.set_ylabel(compared.metric)
        if min(values, default=0.0) >= 0:
            axes.set_ylim(bottom=0)
    if not values:
        where = axes.transAxes
        axes.text(0.5, 0.5, "not evaluated yet", transform=where, ha="center", color=TARGET)
    return float(axes.get_ylim()[0])
