"""Marks in a picture where something happened: faults, absences, members given up and back, and
changes of the delay. Each kind has a shape of its own, and the legend names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.runs.reports.happenings import KINDS, Happening, height_at, marked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_SHAPES = {"fault": "X", "absence": "v", "gone": "s", "back": "^", "error": "P", "delay": "D"}


@dataclass(frozen=True)
class Marked:
    """The happenings in a run, and the colour of its line."""

    found: tuple[Happening, ...]
    colour: str


def draw_marks(
    axes: Axes,
    line_marks: Marked,
    line: Sequence[tuple[float, float]],
    end: float,
    unit: float,
) -> None:
    """Draw marks on a line of (seconds, figure), up to `end` seconds; `unit`: seconds in a unit of
    the axis. Without a line they lie at the lower edge."""
    low, high = axes.get_ylim()
    for kind in KINDS:
        times = [each.t for each in marked(line_marks.found, kind, end)]
        if not times:
            continue
        heights = [min(max(height_at(line, t, low), low), high) for t in times]
        axes.plot(
            [t / unit for t in times], heights, _SHAPES[kind], color=line_marks.colour, mfc="white",
            mew=1.6, ms=8, zorder=6, clip_on=False,
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
