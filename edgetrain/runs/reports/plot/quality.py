"""Runs as curves of their metric, and the panels of these against time and against steps.

Marks say where something happened: faults, absences, members given up and back, and changes of the
delay. Each kind has a shape of its own, and the legend names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgetrain.runs.data import RunData
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison, Row
from edgetrain.runs.reports.happenings import KINDS, Happening, happenings, placed
from edgetrain.runs.reports.plot.bars import unit_of_time
from edgetrain.runs.reports.plot.ends import LineEnd
from edgetrain.runs.reports.plot.style import TARGET, as_text, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D

    from edgetrain.runs.over_members import OwnData

_SQUEEZED = 0.04
"""A time axis becomes logarithmic if the fastest run would take less than this part of it."""


@dataclass(frozen=True)
class Curve:
    """One run in a picture: its row, its evaluations, and how its line looks."""

    row: Row
    t: tuple[float, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    colour: str
    dashes: str
    own: OwnData | None = None
    """Evaluations on members' own data, if there are any."""
    happened: tuple[Happening, ...] = ()
    """Faults, absences, members given up, changes of the delay."""

    @property
    def plain_name(self) -> str:
        """The run's `name` before it is drawn as text."""
        return self.row.label + (" *" if self.row.timing_ok is False else "")

    @property
    def name(self) -> str:
        """The label beside bars, marked if the run is untrusted (a note explains the mark)."""
        return as_text(self.plain_name)


def end_of_time(curves: Sequence[Curve]) -> float:
    """Seconds to show: a third more than the slowest run took to the target, or all of them."""
    everything = max([curve.t[-1] for curve in curves if curve.t] or [1.0]) or 1.0
    reached = [curve.row.target_seconds for curve in curves]
    if any(seconds is None for seconds in reached):
        return everything
    return min(everything, 1.33 * max(seconds for seconds in reached if seconds is not None))


def curve_of(data: RunData, row: Row, metric: str, place: int) -> Curve:
    """A run's curve in the look of line number `place` (from 0)."""
    evaluations = sorted(data.evaluations, key=lambda record: record["t"])
    points = [
        (record["t"], record["step"], record[metric])
        for record in evaluations
        if isinstance(record.get(metric), int | float)
    ]
    t, steps, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(row, t, steps, values, *look_of(place), data.own_data, happenings(data.marked))


_SHAPES = {"fault": "X", "absence": "v", "gone": "s", "back": "^", "error": "P", "delay": "D"}


def _draw_marks(axes: Axes, curve: Curve, begin: float, end: float, unit: float) -> None:
    """Draw marks on the line of a run from `begin` to `end` seconds; `unit`: seconds in a unit of
    the axis. Without a line they lie at the lower edge."""
    shown = [each for each in curve.happened if begin <= each.t]
    line = list(zip(curve.t, curve.values, strict=True))
    marks = placed(shown, line, axes.get_ylim(), end)
    for kind in dict.fromkeys(each.kind for each, _ in marks):
        axes.plot(
            [each.t / unit for each, _ in marks if each.kind == kind],
            [height for each, height in marks if each.kind == kind],
            _SHAPES[kind], color=curve.colour, mfc="white", mew=1.6, ms=8, zorder=6, clip_on=False,
        )  # fmt: skip


def legend_of(happenings: Sequence[Happening]) -> list[Line2D]:
    """An entry for each kind of mark that is there, with their number."""
    from matplotlib.lines import Line2D

    counts = Counter(each.kind for each in happenings)
    return [
        Line2D(
            [], [], ls="", marker=_SHAPES[kind], color="#333333", mfc="white", mew=1.6, ms=8,
            label=f"{said}: {counts[kind]}",
        )
        for kind, said in KINDS.items()
        if counts[kind]
    ]  # fmt: skip


def draw_against_time(
    axes: Axes, curves: Sequence[Curve], compared: Comparison, end: float
) -> None:
    """The metric of each run against seconds, up to `end`, with marks where something happened."""
    unit, seconds = unit_of_time(end)
    for curve in curves:
        t = [value / seconds for value in curve.t]
        label = as_text(f"{curve.plain_name}{_time_to_target(curve, compared)}")
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
    fastest = [curve.row.target_seconds for curve in curves if curve.row.target_seconds]
    if fastest and min(fastest) < _SQUEEZED * end:
        from matplotlib.ticker import LogLocator, NullFormatter

        seen = (
            t for curve in curves for t, y in zip(curve.t, curve.values, strict=True) if y >= lowest
        )
        begin = 0.8 * min(filter(None, seen), default=1.0)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(begin / seconds, end / seconds)
    for curve in curves:
        _draw_marks(axes, curve, begin, end, seconds)


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


def value_ends(
    curves: Sequence[Curve], compared: Comparison, places: Sequence[Sequence[float]]
) -> list[LineEnd]:
    """The ends of lines whose points are at these `places`, with the last value, and the target."""
    ends = [
        LineEnd(
            each[-1],
            curve.values[-1],
            f"{curve.plain_name} " * (len(curves) > 1)
            + units.figure(compared.metric, curve.values[-1]),
            curve.colour,
        )
        for curve, each in zip(curves, places, strict=True)
        if each
    ]
    if compared.target is not None and ends:
        goal = f"target {units.goal(compared.metric, compared.target)}"
        last = max(end.x for end in ends)
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


def draw_against_steps(axes: Axes, curves: Sequence[Curve], compared: Comparison) -> None:
    """The metric of each run against steps."""
    for curve in curves:
        axes.plot(curve.steps, curve.values, curve.dashes, color=curve.colour)
    _draw_target(axes, compared)
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
    axes.set_title(f"{compared.metric} against steps")
    axes.set_xlabel("steps of each member")
    axes.set_xlim(0, last)
    axes.tick_params(labelleft=False)


def _draw_target(axes: Axes, compared: Comparison) -> None:
    if compared.target is not None:
        said = f"target {units.goal(compared.metric, compared.target)}"
        axes.axhline(compared.target, color=TARGET, lw=1.2, ls=(0, (4, 3)), zorder=1, label=said)


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


# -- what members found on data that they hold out of their own ------------------------------------

_OWN_BARS = 20


def draw_course(axes: Axes, runs: Sequence[tuple[Curve, OwnData]], metric: str) -> None:
    """The mean over all members' data against steps, and a band with four fifths of members."""
    for curve, own in runs:
        if course := own.course(metric):
            steps, means, low, high = zip(*course, strict=True)
            axes.fill_between(steps, low, high, color=curve.colour, alpha=0.15, lw=0)
            axes.plot(steps, means, curve.dashes, color=curve.colour)
    axes.set_title(f"{metric} on members' own data")
    axes.set_xlabel("steps of a member; shaded: four fifths of the members")
    axes.set_xlim(left=0)
    _say_metric(axes.yaxis, metric)


def draw_members(axes: Axes, runs: Sequence[tuple[Curve, OwnData]], metric: str) -> None:
    """How many members are where at the end."""
    from matplotlib.ticker import MaxNLocator

    found = [(curve, own.values_at_the_end(metric)) for curve, own in runs]
    every = [value for _, values in found for value in values]
    if every:
        ends = min(every), max(every)
        for curve, values in found:
            counts, edges = np.histogram(values, _OWN_BARS, ends)
            axes.stairs(counts, edges, color=curve.colour, ls=curve.dashes, lw=2.0)
    axes.set_title("members at the end")
    axes.set_xlabel(metric)
    axes.set_ylabel("members")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _say_metric(axes.xaxis, metric)


def _say_metric(axis: Axis, metric: str) -> None:
    if units.is_fraction(metric):
        axis.set_major_formatter(lambda value, _: f"{value * 100:.4g} %")
