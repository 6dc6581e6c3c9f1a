"""Labels at the ends of lines: in the margin, moved apart where they would overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.runs.reports.plot.style import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 7
"""Lines that are labelled at their ends; more are named in a legend."""
_LONGEST = 18
"""Characters of a name, at most; longer ones go into a legend."""
_LETTERS, _PITCH = 12.0, 15.5
"""Size of the letters, and of a line of text, in points."""
_MARGIN = 0.03
"""Distance from the right edge of the panel to the labels, as a share of its width."""


@dataclass(frozen=True)
class LineEnd:
    """The end of a line, in the units of its panel, and its label."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = True


def fits(labels: Sequence[str]) -> bool:
    """Whether lines with these names can be labelled at their ends."""
    return len(labels) <= MOST and max(map(len, labels), default=0) <= _LONGEST


def label_ends(figure: Figure, ends: Mapping[Axes, Sequence[LineEnd]]) -> None:
    """Write all labels into the right margins of their panels. Call it when the figure is drawn:
    it lays the figure out, to know how high the panels are."""
    written = {
        axes: [
            axes.annotate(
                as_text(end.text),
                (end.x, end.y),
                xytext=(1 + _MARGIN, end.y),
                textcoords=axes.get_yaxis_transform(),
                va="center",
                color=end.colour,
                fontsize=_LETTERS,
                fontweight="bold" if end.bold else "normal",
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": end.colour,
                    "lw": 0.8,
                    "alpha": 0.7,
                    "shrinkA": 1,
                    "shrinkB": 1,
                    "relpos": (0, 0.5),
                },
            )
            for end in each
        ]
        for axes, each in ends.items()
    }
    figure.draw_without_rendering()
    for axes, each in ends.items():
        low, high = axes.get_ylim()
        points = axes.get_position().height * figure.get_figheight() * 72
        pitch = _PITCH / points * (high - low)
        # Half a line below the upper edge: the panel's title stands there.
        places = spread([end.y for end in each], pitch, low, high - 0.5 * pitch)
        for text, place in zip(written[axes], places, strict=True):
            text.set_position((1 + _MARGIN, place))


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near these values, in their order, at least `gap` apart and between `low` and `high`
    as far as there is room."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    places = [min(max(values[i], low), high) for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if places and places[-1] > high:
        places[-1] = high
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    spaced = [0.0] * len(values)
    for place, i in zip(places, order, strict=True):
        spaced[i] = place
    return spaced
