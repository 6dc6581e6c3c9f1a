"""The look of all pictures (colours, dashes, letters, headings), and how to save one.

matplotlib is imported inside functions, and only its Figure: no window, no global state. The
colours are those of Okabe and Ito, which colour-blind people can tell apart; lines also differ in
their dashes. Nothing here knows what a picture shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgetrain.errors import explain_os_errors, require
from edgetrain.files.writing import replacing
from edgetrain.runs.reports import units

if TYPE_CHECKING:
    from matplotlib.figure import Figure


INCHES, _DPI = (12.0, 8.0), 150
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
TARGET = "#555555"
_STYLE: dict[str, Any] = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "lines.linewidth": 2.4,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "hatch.color": "#8C8C8C",
}


def look_of(place: int) -> tuple[str, str]:
    """Colour and dashes of line number `place`, from 0; 28 lines differ."""
    turn, colour = divmod(place, len(COLOURS))
    dashes = (colour + turn) % len(_DASHES)
    return COLOURS[colour], _DASHES[dashes]


def listed(names: Any) -> str:
    return names if isinstance(names, str) else ", ".join(dict.fromkeys(map(str, names)))


_HEADING_LETTERS, _ABOUT_LETTERS = 18.0, 12.5
_SMALLEST = 0.72
"""Smallest share of a heading's letter size, where it is long; longer ones get several lines."""


def write_heading(
    figure: Figure, heading: str, about: Sequence[str] = (), room_points: float = 0.0
) -> float:
    """Write the heading at the top and lines of `about` below it, and reserve room for them and
    `room_points` more. Returns the points from the upper edge to that room."""
    # A letter is about 0.6 of its size wide.
    broad = 72 * float(figure.get_figwidth()) / (0.64 * _HEADING_LETTERS)
    size = _HEADING_LETTERS * min(1.0, max(_SMALLEST, broad / max(1, len(heading))))
    lines = textwrap.wrap(heading, int(broad / _SMALLEST)) or [""]
    place: dict[str, Any] = {"x": 0.012, "ha": "left", "va": "top"}
    title = figure.suptitle("\n".join(lines), y=below_top(figure, 8), fontsize=size,
                            fontweight="bold", **place)  # fmt: skip
    title.set_in_layout(False)
    room = 12 + 1.25 * size * len(lines)
    for line in filter(None, about):
        wide = textwrap.wrap(line, int(72 * float(figure.get_figwidth()) / (0.56 * _ABOUT_LETTERS)))
        text = figure.text(y=below_top(figure, room), s="\n".join(wide), color=TARGET,
                           fontsize=_ABOUT_LETTERS, **place)  # fmt: skip
        text.set_in_layout(False)
        room += 1.35 * _ABOUT_LETTERS * len(wide)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1, below_top(figure, room + 4 + room_points)))
    return room


def write_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], at: float) -> None:
    """Write a legend `at` points below the upper edge, in as many columns as fit."""
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.012, below_top(figure, at)),
        ncols=_columns(labels),
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.6,
        handlelength=2.4,
    )
    legend.set_in_layout(False)


def legend_points(labels: Sequence[str]) -> float:
    """The room that `write_legend` needs for these labels."""
    return 20.0 * -(-len(labels) // _columns(labels)) if labels else 0.0


def _columns(labels: Sequence[str]) -> int:
    widest = max(map(len, labels), default=0)
    return max(1, min(len(labels), 120 // (widest + 6)))


def below_top(figure: Figure, points: float) -> float:
    """The place `points` below the upper edge, as a share of the height from the bottom."""
    return 1 - points / 72 / float(figure.get_figheight())


def as_text(text: str) -> str:
    """Text to draw as it is: matplotlib would read text between dollar signs as a formula."""
    return units.printable(text).replace("$", r"\$")


def new_figure(inches: tuple[float, float] = INCHES) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.09, hspace=0.03, wspace=0.03)
    return Figure(figsize=inches, dpi=_DPI, layout=layout)


def styled(more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    import matplotlib as mpl

    settings: dict[Any, Any] = dict(mpl.rcParamsDefault) | _STYLE | dict(more)
    del settings["backend"]  # setting it imports pyplot, which no picture of ours needs
    return mpl.rc_context(settings)


def save(
    draw: Callable[[], Figure], path: Path, more: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Draw a figure and save it, whole or not at all, as its name ends. Returns `path`.

    `more` are settings as those of `styled`.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    require("a picture", "lab", "matplotlib")
    figure = draw()
    with explain_os_errors(f"cannot write {path}"), replacing(path) as file, styled(more):
        figure.savefig(file, format=path.suffix.removeprefix("."))
    return path
