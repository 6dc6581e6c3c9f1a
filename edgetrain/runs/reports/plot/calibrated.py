"""Draw how far simulated runs are from emulated ones: a bar for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgetrain.runs.reports.calibration import GOOD, CalibratedPair
from edgetrain.runs.reports.message import calibration_message
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


def draw_calibration(pairs: Sequence[CalibratedPair]) -> Figure:
    """A bar for each job: how much longer its steps are simulated than emulated."""
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
