"""Panels about what members found on data that they hold out of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgetrain.runs.reports import units
from edgetrain.runs.reports.plot.quality import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from edgetrain.runs.over_members import OwnData

_BARS = 20


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
    _say(axes.yaxis, metric)


def draw_members(axes: Axes, runs: Sequence[tuple[Curve, OwnData]], metric: str) -> None:
    """How many members are where at the end."""
    from matplotlib.ticker import MaxNLocator

    found = [(curve, own.values_at_the_end(metric)) for curve, own in runs]
    every = [value for _, values in found for value in values]
    if every:
        ends = min(every), max(every)
        for curve, values in found:
            counts, edges = np.histogram(values, _BARS, ends)
            axes.stairs(counts, edges, color=curve.colour, ls=curve.dashes, lw=2.0)
    axes.set_title("members at the end")
    axes.set_xlabel(metric)
    axes.set_ylabel("members")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _say(axes.xaxis, metric)


def _say(axis: Axis, metric: str) -> None:
    if units.is_fraction(metric):
        axis.set_major_formatter(lambda value, _: f"{value * 100:.4g} %")
