"""Draw one axis of a sweep in four panels, from the points of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.runs.reports import units
from edgetrain.runs.reports.message import sweep_message
from edgetrain.runs.reports.plot.ends import End, fits, label_ends
from edgetrain.runs.reports.plot.style import (
    as_text,
    legend_points,
    look_of,
    new_figure,
    save,
    styled,
    write_heading,
    write_legend,
)
from edgetrain.runs.reports.sweep_rows import numbers_of, relative, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sweep_figure(
    axis: str,
    axes: Mapping[str, Sequence[str]],
    points: Sequence[Mapping[str, Any]],
    metric: str,
    path: Path,
    title: str = "",
) -> Path:
    """Draw speed, final metric, time to the target and bytes along one axis of a sweep.

    `axes` has the labels of every axis, in order; `points` are those of `sweep_rows.points` for
    these axes. Raises ConfigError if matplotlib is missing or the file cannot be written. Returns
    `path`.
    """
    return save(lambda: draw_sweep(axis, axes, points, metric, title), path)


def draw_sweep(
    axis: str,
    axes: Mapping[str, Sequence[str]],
    points: Sequence[Mapping[str, Any]],
    metric: str,
    title: str = "",
) -> Figure:
    """The figure of `sweep_figure`."""
    labels = axes[axis]
    lines = series(axis, list(axes), [dict(point) for point in points])
    with styled():
        figure = new_figure((12.0, 8.4))
        grid = figure.add_gridspec(2, 2)
        speed, final, target, size = (
            figure.add_subplot(grid[place // 2, place % 2]) for place in range(4)
        )
        _draw_along(
            speed, axis, labels, {label: dict(relative(line)) for label, line in lines.items()}
        )
        speed.set_title(f"steps a second of the fleet, {as_text(axis)} {as_text(labels[0])} = 1")
        _from_zero(speed)
        _draw_along(final, axis, labels, _values(lines, "final"), _ranges(lines))
        final.set_title(f"final {as_text(metric)}")
        if units.is_fraction(metric):
            final.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.4g} %")
        reached = _values(lines, "target_seconds")
        if any(reached.values()):
            _draw_along(target, axis, labels, reached)
            target.set_title("seconds until the target")
        else:
            _draw_along(target, axis, labels, _values(lines, "wait_s", 1000.0))
            target.set_title("milliseconds of waiting per step")
        _from_zero(target)
        _draw_along(size, axis, labels, _values(lines, "sent_bytes", 1e-6))
        size.set_title("megabytes that members sent")
        _from_zero(size)
        names = [label or "all" for label in lines]
        said = as_text(sweep_message(axis, labels, lines, metric))
        about = [as_text(title) or f"along {as_text(axis)}"]
        at_ends = numbers_of(labels) is not None and fits(names)
        handles = [] if at_ends or len(names) == 1 else speed.get_legend_handles_labels()[0]
        called = [str(handle.get_label()) for handle in handles]
        room = write_heading(figure, said, about, legend_points(called))
        if called:
            write_legend(figure, handles, called, room)
        if at_ends and len(names) > 1:
            label_ends(figure, {panel: _ends(panel) for panel in (speed, final, target, size)})
        return figure


def _ends(panel: Axes) -> list[End]:
    """The ends of the lines of a panel that have a name."""
    found = []
    for line in panel.get_lines():
        points: Any = line.get_xydata()
        if not str(line.get_label()).startswith("_") and len(points):
            x, y = map(float, points[-1])
            found.append(End(x, y, str(line.get_label()), str(line.get_color())))
    return found


def _from_zero(axes: Axes) -> None:
    """Set the vertical axis from 0 to a little above the highest mark."""
    axes.set_ylim(0, 1.06 * (axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0))


Along = dict[str, dict[str, float]]
"""For each line: value of the axis -> figure."""


def _values(lines: Mapping[str, Mapping[str, Any]], key: str, unit: float = 1.0) -> Along:
    return {
        label: {value: point[key] * unit for value, point in line.items() if point[key] is not None}
        for label, line in lines.items()
    }


def _ranges(lines: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Lowest and highest over the seeds, for points with several."""
    return {
        label: {v: (p["low"], p["high"]) for v, p in line.items() if p["runs"] > 1}
        for label, line in lines.items()
    }


_SPREAD = 0.6
"""Of the place of a name, the part over which its marks are spread."""


def _draw_along(
    axes: Axes,
    axis: str,
    labels: Sequence[str],
    lines: Along,
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> None:
    """Draw lines over an axis of numbers, marks over an axis of names."""
    numbers = numbers_of(labels)
    places = numbers if numbers is not None else [float(i) for i in range(len(labels))]
    at = dict(zip(labels, places, strict=True))
    for place, (label, line) in enumerate(lines.items()):
        colour, dashes = look_of(place)
        # Marks over a name stand beside each other; over a number they stand where it is.
        beside = 0.0 if numbers is not None else _SPREAD * ((place + 0.5) / len(lines) - 0.5)
        x, y = [at[value] + beside for value in line], list(line.values())
        style = f"o{dashes}" if numbers is not None else "o"
        axes.plot(x, y, style, color=colour, label=as_text(label) or "all", ms=6)
        for value, (low, high) in ((ranges or {}).get(label) or {}).items():
            axes.plot([at[value] + beside] * 2, [low, high], color=colour, lw=1.2, alpha=0.6)
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


_AXIS = {"rtt": "round trip (milliseconds)", "delay": "delay (steps)", "every": "every (steps)"}
