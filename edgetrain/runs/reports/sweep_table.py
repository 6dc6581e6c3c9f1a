"""The closing table of a sweep, as plain text: a line for each point, and gains along its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, as_text, column
from edgetrain.runs.reports.comparison import seconds_per_step, wait_share
from edgetrain.runs.reports.sweep_rows import Row, numbers_of, relative, series


def text(axes: Mapping[str, Sequence[str]], points: Sequence[Row], metric: str) -> str:
    """The table of `sweep_rows.points` for these axes (name -> labels), and the gains below it."""
    return "\n".join(
        ["", *as_text(columns_of(list(axes), points, metric)), "", *gains(axes, points)]
    )


def columns_of(names: Sequence[str], points: Sequence[Row], metric: str) -> list[Column]:
    def spread(point: Row) -> str:
        middle, low, high = (units.figure(metric, point[key]) for key in ("final", "low", "high"))
        return middle if point["runs"] < 2 else f"{middle} ({low} to {high})"

    shown = [column(name, (units.printable(point[name]) for point in points)) for name in names]
    shown += [column("final", map(spread, points), below=metric)]
    if any(point["target_seconds"] for point in points):
        reached = (units.duration(point["target_seconds"]) for point in points)
        shown += [column("time to", reached, below="target")]
    return [
        *shown,
        column("time", (units.duration(seconds_per_step(p)) for p in points), below="per step"),
        column("waiting", (units.share(wait_share(point)) for point in points)),
        column("sent", (units.size(point["sent_bytes"]) for point in points)),
    ]


def gains(axes: Mapping[str, Sequence[str]], points: Sequence[Row]) -> list[str]:
    """For each axis of numbers, the fleet's steps a second relative to those at its first value."""
    lines = []
    for name, labels in axes.items():
        if numbers_of(labels) is None or len(labels) < 2:
            continue
        for label, line in series(name, list(axes), points).items():
            at = f" ({label})" if label else ""
            steps = ", ".join(f"{value}: {gain:.2f}x" for value, gain in relative(line))
            lines.append(f"steps a second of the fleet by {name}{at}: {steps}")
    return [*lines, ""] if lines else []
