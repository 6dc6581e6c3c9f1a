"""The picture of `edgetrain bench codecs`: how small a codec makes a vector, and what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.runs.reports.plot.style import as_text, new_figure, save, styled, write_heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES = (9.0, 5.5)
HEIGHTS = (5, 16, -12)
"""Of labels above their points, in points of 1/72 inch."""

Point = tuple[str, float, float, float]
"""(codec, times smaller than float32, relative error of a payload, speed as a share of r += g)"""


def draw_codecs(points: Sequence[Point], path: Path) -> Path:
    """Write the picture, as PNG, to `path` and return it.

    Raises ConfigError if there is no matplotlib or the file cannot be written.
    """
    return save(lambda: codecs_figure(points), path)


def codecs_figure(points: Sequence[Point]) -> Figure:
    """Error against size, each point labelled with its codec; the colour is the speed."""
    _, smaller, errors, speeds = zip(*points, strict=True)
    with styled():
        figure = new_figure(INCHES)
        name, most, error, _ = max(points, key=_size)
        title = f"{name} is {most:,.0f} times smaller than float32, one payload {error:.0%} off"
        write_heading(figure, as_text(title))
        axes = figure.add_subplot()
        dots = axes.scatter(smaller, errors, c=speeds, cmap="viridis", s=60)
        # Neighbours in size may lie so close that their labels need different heights.
        for (name, x, y, _), height in zip(sorted(points, key=_size), cycle(HEIGHTS), strict=False):
            axes.annotate(
                as_text(name), (x, y), xytext=(5, height), textcoords="offset points", fontsize=8
            )
        axes.set_xscale("log")
        axes.set_xlabel("times smaller than float32")
        axes.set_ylabel("relative error of one payload\n(feedback sends the rest later)")
        axes.margins(x=0.15)
        figure.colorbar(dots, label="speed with feedback, as a share of r += g")
    return figure


def _size(point: Point) -> float:
    return point[1]
