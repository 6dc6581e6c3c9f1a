"""The rows of a sweep: as CSV, as points (medians over seeds), as lines of a picture."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.runs.folder import read_summary
from edgetrain.runs.reports import units

CSV = "sweep.csv"
"""The rows of a sweep, in its folder."""

Row = dict[str, Any]
"""One run: the labels of its axes, its seed, and figures of its summary. Seconds and bytes."""


def to_csv(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


MEANT = (
    "fleet_steps_per_second", "final", "target_seconds", "sent_bytes", "received_bytes",
    "seconds_per_step", "steps_per_second", "compute_s", "wait_s", "overhead_s", "eval_s", "end_s",
)  # fmt: skip
"""Figures whose median over the seeds is taken."""


RANGED = ("fleet_steps_per_second", "target_seconds", "wait_s", "sent_bytes")
"""Figures whose lowest and highest value over the seeds is kept, beside those of `final`."""


def points(axes: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """One row for all seeds of a cell of `axes`: medians of finished runs, range of `final`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in axes), []).append(row)
    return [
        dict(zip(axes, labels, strict=True)) | _medians(group) for labels, group in groups.items()
    ]


def _medians(group: Sequence[Row]) -> Row:
    good = [row for row in group if row["status"] == "finished"]
    point: Row = {"runs": len(good), "failed": len(group) - len(good)}
    for key in MEANT:
        values = [row[key] for row in good if row.get(key) is not None]
        # If some seeds never reached the target, a median over the others would be too early.
        known = len(values) == len(good) if key == "target_seconds" else bool(values)
        point[key] = statistics.median(values) if values and known else None
    point["ranges"] = {
        key: (min(values), max(values))
        for key in RANGED
        if point[key] is not None and (values := [row[key] for row in good if row[key] is not None])
    }
    finals = [row["final"] for row in good if row.get("final") is not None]
    point["low"], point["high"] = (min(finals), max(finals)) if finals else (None, None)
    point["mean"] = statistics.fmean(finals) if finals else None
    return point


def series(
    axis: str, axes: Sequence[str], rows: Sequence[Row], most: int = 8
) -> dict[str, dict[str, Row]]:
    """For each combination of the other axes, the points along `axis`: label -> value -> point.

    If there are more than `most` lines, the last of the other axes stay at their first value.
    """
    others = [name for name in axes if name != axis]
    varies = [name for name in others if len({point[name] for point in rows}) > 1]
    kept = list(rows)
    while len({tuple(point[name] for name in varies) for point in kept}) > most:
        last = varies.pop()
        kept = [point for point in kept if point[last] == kept[0][last]]
    lines: dict[str, dict[str, Row]] = {}
    for point in kept:
        label = ", ".join(_named(name, point[name]) for name in varies)
        lines.setdefault(label, {})[point[axis]] = point
    return lines


def rows_in(folder: Path) -> list[dict[str, str]]:
    """The rows of the sweep in `folder`, as text; []: no sweep, or none of it is over."""
    try:
        with (folder / CSV).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        return []


def labels_in(folder: Path) -> dict[str, str]:
    """Labels of the runs of the sweep in `folder`, by the name of its folder: the values
    of its axes and, where there are several, its seed. {}: no sweep, or none of it is over."""
    try:
        axes = list((read_summary(folder) or {}).get("axes") or {})
        rows = rows_in(folder)
    except (ValueError, TypeError, ConfigError):
        return {}
    several = len({row.get("seed") for row in rows}) > 1
    labels: dict[str, str] = {}
    for row in rows:
        parts = [_named(name, row.get(name) or "") for name in axes]
        parts += [f"seed {row.get('seed')}"] if several else []
        labels.setdefault(str(row.get("cell")), units.printable(", ".join(filter(None, parts))))
    return labels


def numbers_of(labels: Sequence[str]) -> list[float] | None:
    """The labels of an axis as numbers, or None where one of them is a name."""
    try:
        return [float(label) for label in labels]
    except ValueError:
        return None


def _named(name: str, value: str) -> str:
    """A value as part of a line's label: a number is shown with its axis, a name without."""
    return f"{name} {value}" if value.replace(".", "", 1).lstrip("-").isdigit() else value


def relative(line: Mapping[str, Row]) -> Iterator[tuple[str, float]]:
    """Along a line: (value, the fleet's steps a second relative to those at the first value)."""
    first: float | None = None
    for value, point in line.items():
        rate = point["fleet_steps_per_second"]
        first = first or rate
        if rate and first:
            yield value, rate / first
