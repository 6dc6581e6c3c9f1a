"""Draw capacity.png from rows of a capacity plan: how a fleet grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.reports.message import capacity_message
from edgetrain.runs.reports.plot.bars import draw_stacked
from edgetrain.runs.reports.plot.style import (
    COLOURS,
    TARGET,
    as_text,
    new_figure,
    styled,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_capacity(rows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """Throughput and the time of a step against the number of members.

    Each row has `members`, `speed_up`, `compute_s`, `wait_s` and `bottleneck`.
    """
    if not rows:
        raise ConfigError("there is no fleet to draw")
    with styled():
        figure = new_figure((12.0, 5.4))
        largest = max(rows, key=lambda row: int(row["members"]))
        write_heading(figure, as_text(capacity_message(largest)), [as_text(title)])
        grid = figure.add_gridspec(1, 2, width_ratios=[1, 1.25])
        _draw_growth(figure.add_subplot(grid[0, 0]), rows)
        _draw_sizes(figure.add_subplot(grid[0, 1]), rows)
        return figure


def _draw_growth(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    members = [row["members"] for row in rows]
    axes.plot(members, members, color=TARGET, lw=1.2, ls=(0, (4, 3)), label="nobody ever waits")
    growth = [row["speed_up"] for row in rows]
    axes.plot(members, growth, "o-", color=COLOURS[1], label="this fleet")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("throughput of one member, times")
    axes.set_xlabel("members")
    axes.legend(loc="upper left")


def _draw_sizes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    parts = [(row["compute_s"], row["wait_s"], 0.0) for row in rows]
    names = [f"{row['members']:,}" for row in rows]
    draw_stacked(axes, names, parts, ["#000000"] * len(rows))
    axes.set_ylabel("members")
    for place, row in enumerate(rows):
        text = as_text(str(row["bottleneck"]))
        axes.annotate(text, (0, place + 0.45), xytext=(3, 0), textcoords="offset points",
                      va="center", fontsize=9, color=TARGET)  # fmt: skip
