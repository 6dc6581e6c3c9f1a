"""Runs as curves of their metric, and the range of time that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.runs.folder import read_metrics
from edgetrain.runs.metrics.tally import Tally
from edgetrain.runs.reports.comparison import Row
from edgetrain.runs.reports.happenings import Happening, happenings
from edgetrain.runs.reports.plot.style import as_text, look_of

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
    happened: tuple[Happening, ...] = ()
    """Faults, absences, members given up, changes of the delay."""

    @property
    def plain_name(self) -> str:
        """The run's `name` before it is drawn as text."""
        return self.row.label + (" *" if self.row.trusted is False else "")

    @property
    def name(self) -> str:
        """The label beside bars, marked if the run is untrusted (a note explains the mark)."""
        return as_text(self.plain_name)


def seconds_until_visible(curves: Sequence[Curve], lowest: float) -> float:
    """Seconds until the first curve rises above `lowest`, the lower edge of the picture."""
    seen = (
        next((t for t, value in zip(curve.t, curve.values, strict=True) if value >= lowest), None)
        for curve in curves
    )
    return min((t for t in seen if t), default=1.0)


def end_of_time(curves: Sequence[Curve]) -> float:
    """Seconds to show: a third more than the slowest run took to the target, or all of them."""
    everything = max([curve.t[-1] for curve in curves if curve.t] or [1.0]) or 1.0
    reached = [curve.row.target_seconds for curve in curves]
    if any(seconds is None for seconds in reached):
        return everything
    return min(everything, 1.33 * max(seconds for seconds in reached if seconds is not None))


def needs_log(curves: Sequence[Curve], end: float) -> bool:
    """Whether a time axis up to `end` seconds has to be logarithmic to show the fastest run."""
    fastest = [curve.row.target_seconds for curve in curves if curve.row.target_seconds]
    return bool(fastest) and min(fastest) < _SQUEEZED * end


def read_tally(folder: Path) -> Tally:
    """What a curve needs of a run's metrics: all but steps, which are most lines."""
    return Tally().add_all(read_metrics(folder, "eval", "figure", "event", "round"))


def curve_of(tally: Tally, row: Row, metric: str, place: int) -> Curve:
    """A run's curve in the look of line number `place` (from 0)."""
    evaluations = sorted(tally.evaluations, key=lambda record: record["t"])
    points = [
        (record["t"], record["step"], record[metric])
        for record in evaluations
        if isinstance(record.get(metric), int | float)
    ]
    t, steps, values = zip(*points, strict=True) if points else ((), (), ())
    return Curve(row, t, steps, values, *look_of(place), happenings(tally.marked))
