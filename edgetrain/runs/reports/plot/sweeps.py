"""Draw one axis of a sweep in four panels, from the points of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgetrain.runs.reports import units
from edgetrain.runs.reports.message import sweep_message
from edgetrain.runs.reports.plot.ends import LineEnd, fits, label_ends
from edgetrain.runs.reports.plot.style import (
    as_text,
    legend_points,
    look_of,
    new_figure,
    styled,
    write_heading,
    write_legend,
)
from edgetrain.runs.reports.sweep_rows import numbers_of, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_sweep(
    axis: str,
    axes: Mapping[str, Sequence[str]],
    points: Sequence[Mapping[str, Any]],
    metric: str,
    title: str = "",
) -> Figure:
    """Speed, final metric, time to the target and bytes along one axis of a sweep.

    `axes` has the labels of every axis, in order; `points` are those of `sweep_rows.points` for
    these axes.
    """
    labels = axes[axis]
    lines = series(axis, list(axes), [dict(point) for point in points])
    with styled():
        figure = new_figure((12.0, 8.4))
        grid = figure.add_gridspec(2, 2)
        speed, final, target, size = (
            figure.add_subplot(grid[place // 2, place % 2]) for place in range(4)
        )
        _draw_along(speed, axis, labels, lines, "fleet_steps_per_second")
        speed.set_title(f"steps a second of the fleet, {as_text(axis)} {as_text(labels[0])} = 1")
        _from_zero(speed)
        _draw_along(final, axis, labels, lines, "final")
        # Widen the vertical axis to the least span, around its middle; a fraction ends at 1
        fraction = units.is_fraction(metric)
        low, high = final.get_ylim()
        if fraction and final.dataLim.y1 <= 1:
            high = min(high, 1.005)
        middle = (low + high) / 2
        lack = _LEAST_SPAN * (1.0 if fraction else abs(middle)) - (high - low)
        low, high = low - max(0.0, lack) / 2, high + max(0.0, lack) / 2
        over = max(0.0, high - 1.005) if fraction and final.dataLim.y1 <= 1 else 0.0
        final.set_ylim(low - over, high - over)
        final.set_title(f"final {as_text(metric)}")
        if units.is_fraction(metric):
            final.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.4g} %")
        if any(p["target_seconds"] is not None for line in lines.values() for p in line.values()):
            _draw_along(target, axis, labels, lines, "target_seconds")
            target.set_title("seconds until the target")
        else:
            _draw_along(target, axis, labels, lines, "wait_s", 1000.0)
            target.set_title("milliseconds of waiting per step")
        _from_zero(target)
        _draw_along(size, axis, labels, lines, "sent_bytes", 1e-6)
        size.set_title("megabytes that members sent")
        _from_zero(size)
        names = [label or "all" for label in lines]
        said = as_text(sweep_message(axis, labels, lines, metric))
        about = [as_text(title) or f"along {as_text(axis)}", seeds_in_words(points)]
        at_ends = numbers_of(labels) is not None and fits(names)
        handles = [] if at_ends or len(names) == 1 else speed.get_legend_handles_labels()[0]
        called = [str(handle.get_label()) for handle in handles]
        room = write_heading(figure, said, about, legend_points(called))
        if called:
            write_legend(figure, handles, called, room)
        if at_ends and len(names) > 1:
            label_ends(figure, {panel: _ends(panel) for panel in (speed, final, target, size)})
        return figure


def seeds_in_words(points: Sequence[Mapping[str, Any]]) -> str:
    seeds = max((point["runs"] + point.get("failed", 0) for point in points), default=1)
    if seeds == 1:
        return "one seed: how far a mark is off by chance is not known"
    return f"medians of {seeds} seeds; thin lines from the lowest to the highest"


def _ends(panel: Axes) -> list[LineEnd]:
    ends = []
    for line in panel.get_lines():
        points: Any = line.get_xydata()
        if not str(line.get_label()).startswith("_") and len(points):
            x, y = map(float, points[-1])
            ends.append(LineEnd(x, y, str(line.get_label()), str(line.get_color())))
    return ends


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.06 * (axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0))


_LEAST_SPAN = 0.05
"""Shortest vertical axis that does not begin at 0: points of a fraction, or a share of the value in
the middle. Less would draw chance as large as an effect."""


_SPREAD = 0.6
"""Share of the room of a name over which its marks are spread."""


def _draw_along(
    axes: Axes,
    axis: str,
    labels: Sequence[str],
    lines: Mapping[str, Mapping[str, Any]],
    key: str,
    unit: float = 1.0,
) -> None:
    """A figure of all points, each with its lowest and highest over the seeds; `unit` of it are
    one of the axis. Of the fleet's speed: relative to that at a line's first value."""
    numbers = numbers_of(labels)
    places = numbers if numbers is not None else [float(i) for i in range(len(labels))]
    at = dict(zip(labels, places, strict=True))
    for place, (label, line) in enumerate(lines.items()):
        colour, dashes = look_of(place)
        known = {value: point for value, point in line.items() if point[key] is not None}
        if key == "fleet_steps_per_second":
            unit = 1 / (next((p[key] for p in known.values() if p[key]), 0.0) or 1.0)
        # Marks over a name stand beside each other; over a number they stand where it is.
        beside = 0.0 if numbers is not None else _SPREAD * ((place + 0.5) / len(lines) - 0.5)
        x, y = [at[value] + beside for value in known], [p[key] * unit for p in known.values()]
        style = f"o{dashes}" if numbers is not None else "o"
        axes.plot(x, y, style, color=colour, label=as_text(label) or "all", ms=6)
        for spot, point in zip(x, known.values(), strict=True):
            ranges = point.get("ranges", {}) | {"final": (point["low"], point["high"])}
            if point["runs"] > 1 and key in ranges:
                limits = [limit * unit for limit in ranges[key]]
                axes.plot([spot] * 2, limits, color=colour, lw=1.2, alpha=0.6)
    axes.set_xlabel(as_text(_AXIS.get(axis, axis)))
    if numbers is None:
        axes.set_xticks(places, [as_text(label) for label in labels])
        axes.set_xlim(-0.5, len(places) - 0.5)
    elif len(places) <= 7 and min(places) > 0 and max(places) / min(places) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(places, labels)
        axes.minorticks_off()
    else:
        span = (max(places) - min(places)) or 1.0
        kept = [0]  # leave out labels that would overlap
        for place in range(1, len(places)):
            if abs(places[place] - places[kept[-1]]) >= 0.06 * span:
                kept.append(place)
        axes.set_xticks([places[i] for i in kept], [labels[i] for i in kept])


_AXIS = {"rtt": "round trip (milliseconds)", "delay": "delay (steps)", "local_steps": "local steps"}
