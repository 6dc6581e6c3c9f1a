"""Draw the seconds of one averaging by topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.reports import units
from edgetrain.runs.reports.plot.bars import name_bars, write_beside
from edgetrain.runs.reports.plot.style import (
    COLOURS,
    TARGET,
    as_text,
    new_figure,
    styled,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
