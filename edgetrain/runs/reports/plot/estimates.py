"""Draw estimates: how a fleet grows, topologies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.reports import units
from edgetrain.runs.reports.message import capacity_message
from edgetrain.runs.reports.plot.bars import draw_stacked, name_bars, write_beside
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
        axes = figure.add_subplot(grid[0, 0])
        members = [row["members"] for row in rows]
        axes.plot(members, members, color=TARGET, lw=1.2, ls=(0, (4, 3)), label="nobody ever waits")
        growth = [row["speed_up"] for row in rows]
        axes.plot(members, growth, "o-", color=COLOURS[1], label="this fleet")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title("throughput of one member, times")
        axes.set_xlabel("members")
        axes.legend(loc="upper left")
        _draw_sizes(figure.add_subplot(grid[0, 1]), rows)
        return figure


def _draw_sizes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    parts = [(row["compute_s"], row["wait_s"], 0.0) for row in rows]
    names = [f"{row['members']:,}" for row in rows]
    draw_stacked(axes, names, parts, ["#000000"] * len(rows))
    axes.set_ylabel("members")
    for place, row in enumerate(rows):
        text = as_text(str(row["bottleneck"]))
        axes.annotate(text, (0, place + 0.45), xytext=(3, 0), textcoords="offset points",
                      va="center", fontsize=9, color=TARGET)  # fmt: skip


_BARS = (("open_s", "windows open", 0.0), ("averaging_s", "in this job", 0.27),
         ("idle_s", "from idle", 0.54))  # fmt: skip


def draw_topologies(rows: Sequence[Mapping[str, Any]], title: str, choice: str) -> Figure:
    """A group of bars for each topology.

    Each row has `name`, `open_s`, `averaging_s`, `idle_s` and `refused`.
    """
    if not rows:
        raise ConfigError("there is no topology to draw")
    with styled():
        figure = new_figure((12.0, 2.4 + 0.75 * len(rows)))
        write_heading(figure, as_text(choice), [as_text(title)])
        axes = figure.add_subplot()
        for place, (key, label, down) in enumerate(_BARS):
            spots = [at + down - 0.27 for at in range(len(rows))]
            axes.barh(spots, [row[key] for row in rows], 0.25, color=COLOURS[place], label=label)
            for spot, row in zip(spots, rows, strict=True):
                write_beside(axes, row[key], spot, units.duration(row[key]))
        names = [f"{row['name']}{' *' if row['refused'] else ''}" for row in rows]
        name_bars(axes, names, [TARGET if row["refused"] else "#000000" for row in rows])
        axes.set_xlim(0, 1.12 * max(row[key] for row in rows for key, *_ in _BARS))
        axes.set_title("seconds of one averaging (* not in this job)")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(_BARS), borderpad=0)
        return figure
