"""Draw horizontal bars with their values beside them; choose the units of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.runs.reports import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The parts of a step are grey, because colours stand for strategies.
_IN_ORDER = (0, 2, 3, 1, 4)
"""Parts in the order in which they are stacked: what a member does, then what it waits for."""
_PARTS = (
    ("compute", "#4A4A4A", ""),
    ("wait", "#D9D9D9", "///"),
    ("overhead", "#000000", ""),
    ("evaluation", "#A8A8A8", ""),
    ("last replies", "#F2F2F2", "\\\\\\"),
)


def unit_of_time(end: float) -> tuple[str, float]:
    """The unit for an axis that ends at `end` seconds, and its length in seconds."""
    if end < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if end < 3 * 3600 else ("hours", 3600.0)


def draw_stacked(
    axes: Axes,
    names: Sequence[str],
    parts: Sequence[tuple[float, ...]],
    colours: Sequence[str],
) -> None:
    """Draw a bar of (compute, wait, overhead) in seconds for each name, the first on top. Where
    there is more, it is evaluation and the wait for the last replies. What a member does comes
    first, its waits last."""
    places = range(len(names))
    longest = max(map(sum, parts), default=0.0) or 1.0
    unit, seconds = ("milliseconds", 1e-3) if longest < 1 else ("seconds", 1.0)
    left = [0.0] * len(names)
    some = [part for part in range(3, len(parts[0]) if parts else 3) if any(p[part] for p in parts)]
    shown = [part for part in _IN_ORDER if part < 3 or part in some]
    for part in shown:
        name, colour, hatch = _PARTS[part]
        widths = [split[part] / seconds for split in parts]
        axes.barh(places, widths, 0.62, left, color=colour, hatch=hatch, label=name, lw=0)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, split in enumerate(parts):
        write_beside(axes, sum(split) / seconds, place, units.duration(sum(split)))
    name_bars(axes, names, colours)
    axes.set_xlim(0, 1.2 * longest / seconds)
    axes.set_title(f"{unit} per step")
    # Below the axis: at the side it would lie over a long bar. It may be wider than the bars, and
    # must not make them narrower.
    crowded = len(shown) > 4
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        ncols=len(shown),
        borderpad=0,
        borderaxespad=2.5 if crowded else 1.9,
        handlelength=1.2 if crowded else 1.4,
        columnspacing=1.0 if crowded else 1.4,
        fontsize="small" if crowded else None,
    )
    legend.set_in_layout(False)


def write_beside(axes: Axes, end: float, place: float, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center")


def unit_of_bytes(most: float) -> tuple[str, float]:
    """The unit for an axis that ends at `most` bytes, and its size in bytes."""
    for unit, size in (("bytes", 1.0), ("kilobytes", 1e3), ("megabytes", 1e6)):
        if most < 1000 * size:
            return unit, size
    return "gigabytes", 1e9


def name_bars(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    """Write the names of bars, the first on top, each in its bar's colour."""
    axes.set_yticks(range(len(names)), names)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
        tick.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
