"""The look of all pictures (colours, dashes, letters, headings), and how to save one.

matplotlib is imported inside functions, and only its Figure: no window, no global state. The
colours are those of Okabe and Ito, which colour-blind people can tell apart; lines also differ in
their dashes. Nothing here knows what a picture shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.files import replacing
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
    """Names as text, without repetitions."""
    return names if isinstance(names, str) else ", ".join(dict.fromkeys(map(str, names)))


HEADING_POINTS = 34.0


def write_heading(figure: Figure, heading: str, room_points: float = HEADING_POINTS) -> None:
    """Write the heading at the top and reserve `room_points` for it and what is below it."""
    # A long list of devices and networks gets smaller letters, but readable on a phone.
    size = 18 * min(1.0, max(0.6, 6.2 * figure.get_figwidth() / max(1, len(heading))))
    place = {"x": 0.012, "y": below_top(figure, 8), "ha": "left", "va": "top"}
    title = figure.suptitle(heading, fontsize=size, fontweight="bold", **place)
    title.set_in_layout(False)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0, 1, below_top(figure, room_points)))


def below_top(figure: Figure, points: float) -> float:
    """The place `points` below the upper edge, as a share of the height from the bottom."""
    return 1 - points / 72 / float(figure.get_figheight())


def as_text(text: str) -> str:
    """Text to draw as it is: matplotlib would read text between dollar signs as a formula."""
    return units.printable(text).replace("$", r"\$")


def new_figure(inches: tuple[float, float] = INCHES) -> Figure:
    """An empty picture that lays out its parts by itself."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.09, hspace=0.03, wspace=0.03)
    return Figure(figsize=inches, dpi=_DPI, layout=layout)


def styled(more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A context with the settings of this module and `more`, whatever the user's own are."""
    import matplotlib as mpl

    settings: Any = mpl.rcParamsDefault | _STYLE | dict(more)
    return mpl.rc_context(settings)


def save(
    draw: Callable[[], Figure], path: Path, more: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Draw a figure and save it, whole or not at all, as its name ends. Returns `path`.

    `more` are settings as those of `styled`.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib", "pip install 'edgetrain[lab]'")
    figure = draw()
    try:
        with replacing(path) as draft, styled(more):
            figure.savefig(draft, format=path.suffix.removeprefix("."))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path
