"""Draw how far simulated runs are from emulated ones: a bar for each job, or a cell of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.runs.reports.calibration import GOOD, Pair
from edgetrain.runs.reports.message import calibration_message
from edgetrain.runs.reports.plot.style import (
    COLOURS,
    TARGET,
    as_text,
    new_figure,
    save,
    styled,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = tuple[tuple[str, str, str], Pair]
"""A job of a grid: its table, row and column; and how it ran."""

_SLOW, _FAST, _GOOD = COLOURS[0], COLOURS[1], "#EAF3EC"
_STRONGEST = 0.3
"""An error that has the strongest colour."""


def calibration_figure(pairs: Sequence[Pair], path: Path) -> Path:
    """Draw a bar for each job: how much longer its steps are simulated than emulated.

    Raises ConfigError if matplotlib is missing or the file cannot be written. Returns `path`.
    """
    return save(lambda: draw_calibration(pairs), path)


def draw_calibration(pairs: Sequence[Pair]) -> Figure:
    """The figure of `calibration_figure`."""
    with styled():
        figure = new_figure((9.6, 2.0 + 0.5 * len(pairs)))
        title = calibration_message([pair.time_error for pair in pairs], GOOD)
        write_heading(figure, title, ["seconds per step, simulated against emulated"])
        axes = figure.add_subplot()
        errors = [100 * pair.time_error for pair in pairs]
        names = [as_text(pair.name) for pair in pairs]
        axes.axvspan(-100 * GOOD, 100 * GOOD, color="#EAF3EC", zorder=0)
        axes.axvline(0, color=TARGET, lw=1.2, zorder=1)
        axes.barh(range(len(pairs)), errors, color=COLOURS[1], height=0.55, zorder=2)
        axes.set_yticks(range(len(pairs)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        most = max(2 * 100 * GOOD, *(1.25 * abs(error) for error in errors))
        axes.set_xlim(-most, most)
        axes.set_xlabel("error of the simulation (per cent); within the band it is called good")
        for place, error in enumerate(errors):
            side, shift = ("left", 4) if error >= 0 else ("right", -4)
            axes.annotate(
                f"{error:+.1f} %", (error, place), xytext=(shift, 0), textcoords="offset points",
                ha=side, va="center", fontsize=11,
            )  # fmt: skip
        return figure


def grid_figure(cells: Sequence[Cell], path: Path) -> Path:
    """Draw the jobs of a grid in tables, a number and a colour each.

    Raises ConfigError if there is none, if matplotlib is missing or if the file cannot be written.
    Returns `path`.
    """
    return save(lambda: draw_grid(cells), path)


def draw_grid(cells: Sequence[Cell]) -> Figure:
    """The figure of `grid_figure`."""
    if not cells:
        raise ConfigError("there is no job to draw")
    tables, rows, columns = (list(dict.fromkeys(c[0][part] for c in cells)) for part in range(3))
    across = min(len(tables), 3)
    down = math.ceil(len(tables) / across)
    with styled():
        figure = new_figure((2.4 + 3.2 * across, 1.9 + down * (0.9 + 0.27 * len(rows))))
        title = calibration_message([pair.time_error for _, pair in cells], GOOD)
        write_heading(figure, title, [
            "per cent by which a step is simulated longer (+) or shorter (-) than emulated, below "
            "round trips in ms; pale: within what is called good; ?: the emulation was itself late"
        ])  # fmt: skip
        grid = figure.add_gridspec(down, across)
        for place, table in enumerate(tables):
            axes = figure.add_subplot(grid[place // across, place % across])
            axes.set_title(as_text(table))
            axes.set_xlim(-0.5, len(columns) - 0.5)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xticks(range(len(columns)), [as_text(column) for column in columns])
            shown = [as_text(row) for row in rows] if place % across == 0 else [""] * len(rows)
            axes.set_yticks(range(len(rows)), shown)
            axes.tick_params(length=0, labelsize=10, top=True, labeltop=True, bottom=False,
                             labelbottom=False)  # fmt: skip
            axes.grid(visible=False)
            for spine in axes.spines.values():
                spine.set_visible(False)
            for (of, row, column), pair in cells:
                if of == table:
                    _draw_cell(axes, columns.index(column), rows.index(row), pair)
        return figure


def _draw_cell(axes: Axes, x: int, y: int, pair: Pair) -> None:
    error = pair.time_error
    good = abs(error) <= GOOD
    colour = _GOOD if good else _SLOW if error > 0 else _FAST
    # Letters stay black, so no colour is darker than they can be read on.
    strength = 1.0 if good else 0.15 + 0.45 * min(abs(error) / _STRONGEST, 1.0)
    axes.fill([x - 0.47, x + 0.47, x + 0.47, x - 0.47], [y - 0.45, y - 0.45, y + 0.45, y + 0.45],
              color=colour, alpha=strength, lw=0)  # fmt: skip
    doubt = "?" if pair.trusted is False else ""
    axes.text(x, y, f"{round(100 * error):+d}{doubt}", ha="center", va="center", fontsize=10,
              fontweight="normal" if good else "bold")  # fmt: skip
