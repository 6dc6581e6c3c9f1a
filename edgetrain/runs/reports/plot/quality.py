"""How good a run was against time and against steps, and what is written around such panels.

Shared by the picture of one run and the one of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.runs.folder import read_metrics
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison, Row
from edgetrain.runs.reports.plot.bars import unit_of_time
from edgetrain.runs.reports.plot.style import (
    HEADING_POINTS,
    TARGET,
    as_text,
    below_top,
    listed,
    look_of,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A time axis is logarithmic when the fastest run would else be squeezed into this part of it.
_SQUEEZED = 0.04


@dataclass(frozen=True)
class Curve:
    """One run in a picture: its row, its evaluations, and how its line looks."""

    row: Row
    t: tuple[float, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    colour: str
    dashes: str

    @property
    def name(self) -> str:
        """As it stands beside bars; a note explains the mark."""
        return as_text(self.row.label) + (" *" if self.row.trusted is False else "")


def draw_against_time(
    axes: Axes, curves: Sequence[Curve], compared: Comparison, end: float
) -> None:
    """The metric of each run against seconds, up to `end`."""
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
    axes.set_title(f"{compared.metric} against time")
    axes.set_xlabel(f"time since training began ({unit})")
    lowest = _scale_metric(axes, curves, compared)
    axes.set_xlim(0, end / seconds)
    if _needs_log(curves, end):
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.set_xlim(0.8 * _comes_into_sight(curves, lowest) / seconds, end / seconds)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())


def _comes_into_sight(curves: Sequence[Curve], lowest: float) -> float:
    """Seconds until the first curve rises above the lower edge of the picture."""
    seen = (
        next((t for t, value in zip(curve.t, curve.values, strict=True) if value >= lowest), None)
        for curve in curves
    )
    return min((t for t in seen if t), default=1.0)


def draw_against_steps(axes: Axes, curves: Sequence[Curve], compared: Comparison) -> None:
    """The metric of each run against the steps of a member."""
    for curve in curves:
        axes.plot(curve.steps, curve.values, curve.dashes, color=curve.colour)
    _draw_target(axes, compared)
    last = max((curve.steps[-1] for curve in curves if curve.steps), default=1)
    if compared.target is not None:
        # In the margin: within the panel there is always some curve near the target.
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
    """Sets the vertical range and returns its lower edge."""
    values = [value for curve in curves for value in curve.values]
    if units.is_fraction(compared.metric):
        # The way up from guessing is the same for all; what differs happens near the target.
        near = (compared.target or max(values, default=1.0)) - 0.45
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


def end_of_time(curves: Sequence[Curve]) -> float:
    """Seconds to show: a third more than the slowest needed for the target, else all there is."""
    everything = max([curve.t[-1] for curve in curves if curve.t] or [1.0]) or 1.0
    reached = [curve.row.target_seconds for curve in curves]
    if any(seconds is None for seconds in reached):
        return everything
    return min(everything, 1.33 * max(seconds for seconds in reached if seconds is not None))


def _needs_log(curves: Sequence[Curve], end: float) -> bool:
    fastest = [curve.row.target_seconds for curve in curves if curve.row.target_seconds]
    return bool(fastest) and min(fastest) < _SQUEEZED * end


def curve_of(folder: Path, row: Row, metric: str, place: int) -> Curve:
    """A run's curve, from its folder; it looks like the `place`-th line."""
    evaluations = sorted(read_metrics(folder, "eval"), key=lambda record: record["t"])
    points = [
        (record["t"], record["step"], record[metric])
        for record in evaluations
        if isinstance(record.get(metric), int | float)
    ]
    t, steps, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(row, t, steps, values, *look_of(place))


def heading_of(summary: Mapping[str, Any], *more: str | None) -> str:
    """Task, members, device and network, as far as they are known."""
    task = str(summary["task"] or "").rpartition(":")[2]
    members, device = summary["members"], summary["device"] or "host"
    mixed = not isinstance(device, str) or ":" in device or "," in device
    fleet = f"{members} members ({listed(device)})" if mixed else f"{members} x {device}"
    network = listed(summary["network"] or "none")
    network = "no network emulated" if network == "none" else network
    return ", ".join(as_text(str(part)) for part in (task, *more, fleet, network) if part)


def draw_header(
    figure: Figure, axes: Axes, compared: Comparison, summary: Mapping[str, Any], heading: str
) -> None:
    """The heading, and the legend of `axes` in as many columns as there is room for.

    matplotlib's layout lets a title and a legend above the panels overlap: the room is taken here.
    """
    handles, labels = axes.get_legend_handles_labels()
    widest = max(map(len, labels), default=0)
    ncols = max(1, min(len(labels), 126 // (widest + 6)))
    remark = _remark(compared, summary)
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.012, below_top(figure, HEADING_POINTS)),
        ncols=ncols,
        title=remark or None,
        title_fontsize=12,
        alignment="left",
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.6,
        handlelength=2.4,
    )
    legend.set_in_layout(False)
    legend.get_title().set_color(TARGET)
    rows = -(-len(labels) // ncols) + bool(remark)
    write_heading(figure, heading, HEADING_POINTS + 20 * rows)


def _remark(compared: Comparison, summary: Mapping[str, Any]) -> str:
    backend = (summary.get("emulation") or {}).get("backend")
    parts = [
        f"network emulated by '{as_text(str(backend))}'" if backend not in (None, "none") else ""
    ]
    if compared.target is not None and len(compared.rows) > 1:
        parts.append(f"speed-up against {as_text(compared.rows[0].label)}")
    return "; ".join(part for part in parts if part)


def draw_notes(figure: Figure, compared: Comparison) -> None:
    """Warnings at the bottom; as supxlabel, for which the layout keeps room."""
    untrusted = tuple(f"{row.label}:" for row in compared.rows if row.trusted is False)
    lines = [
        ("* " if note.startswith(untrusted) else "") + as_text(note) for note in compared.notes[:4]
    ]
    if lines:
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color="#B00020")
