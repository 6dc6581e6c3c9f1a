"""Draw run.png from a run folder: the course of one run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.metrics.tally import Tally
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison, compare
from edgetrain.runs.reports.plot.bars import (
    busy_seconds,
    draw_stacked,
    unit_of_bytes,
    unit_of_time,
)
from edgetrain.runs.reports.plot.curves import Curve, curve_of
from edgetrain.runs.reports.plot.ends import LineEnd, label_ends
from edgetrain.runs.reports.plot.headings import draw_header, draw_notes, heading_of
from edgetrain.runs.reports.plot.marks import legend_of
from edgetrain.runs.reports.plot.quality import draw_against_time
from edgetrain.runs.reports.plot.style import COLOURS, TARGET, as_text, new_figure, styled
from edgetrain.runs.summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_run(folder: Path) -> Figure:
    summary = read_summary(folder) or summarise(folder)
    compared = compare([summary])
    history = History(max(1, summary["steps"]))
    for record in read_metrics(folder):
        history.add(record)
    curve = curve_of(history.tally, compared.rows[0], compared.metric, 1)
    curve = replace(curve, dashes="-")
    with styled():
        figure = new_figure()
        grid = figure.add_gridspec(2, 2)
        quality = figure.add_subplot(grid[0, 0])
        draw_against_time(quality, [curve], compared, curve.t[-1] if curve.t else 1.0)
        _draw_loss(figure.add_subplot(grid[0, 1]), history)
        _draw_members(figure.add_subplot(grid[1, 0]), history.tally)
        _draw_traffic(figure.add_subplot(grid[1, 1]), history)
        about = heading_of(summary, summary["strategy"])
        seen = [each for each in curve.happened if curve.t and each.t <= curve.t[-1]]
        draw_header(figure, compared, summary, about, legend_of(seen))
        draw_notes(figure, compared)
        label_ends(figure, {quality: _ends(curve, compared)})
        return figure


def _ends(curve: Curve, compared: Comparison) -> list[LineEnd]:
    if not curve.values:
        return []
    last, end = curve.values[-1], curve.t[-1]
    _, unit = unit_of_time(end or 1.0)
    ends = [LineEnd(end / unit, last, units.figure(compared.metric, last), curve.colour)]
    if compared.target is not None:
        goal = f"target {units.goal(compared.metric, compared.target)}"
        ends.append(LineEnd(end / unit, compared.target, goal, TARGET, bold=False))
    return ends


class History:
    """The course of a run of any length, in at most 400 intervals of equally many steps."""

    _INTERVALS = 400

    def __init__(self, steps: int) -> None:
        self.tally = Tally()
        self._each = -(-steps // self._INTERVALS)
        self._losses: dict[int, list[float]] = {}
        self._traffic: dict[int, tuple[float, float, float]] = {}

    def add(self, record: Record) -> None:
        """Add one record; call it in file order."""
        self.tally.add(record)
        if record["kind"] != "step":
            return
        interval = (int(record.get("step") or 1) - 1) // self._each
        if isinstance(record.get("loss"), int | float):
            self._losses.setdefault(interval, []).append(record["loss"])
        members = self.tally.members.values()
        self._traffic[interval] = (
            self.tally.t,
            sum(member.sent_bytes.total for member in members),
            sum(member.received_bytes.total for member in members),
        )

    def losses(self) -> list[tuple[float, float, float, float]]:
        """(step, median, least, greatest) training loss of the members, for each interval."""
        middle = (self._each + 1) / 2
        return [
            (interval * self._each + middle, statistics.median(points), min(points), max(points))
            for interval, points in sorted(self._losses.items())
        ]

    def traffic(self) -> list[tuple[float, float, float]]:
        """(seconds, bytes sent, bytes received) of all members so far, for each interval."""
        return [self._traffic[interval] for interval in sorted(self._traffic)]


def _draw_loss(axes: Axes, history: History) -> None:
    losses = history.losses()
    axes.set_ylim(bottom=min([0.0, *(least for _, _, least, _ in losses)]))
    if losses:
        step, middle, least, greatest = zip(*losses, strict=True)
        axes.fill_between(step, least, greatest, color=COLOURS[1], alpha=0.2, lw=0)
        axes.plot(step, middle, color=COLOURS[1], lw=1.8)
    axes.set_title("training loss: median, range of members")
    axes.set_xlabel("steps of each member")
    axes.set_xlim(left=0)
    axes.set_ylim(top=max(0.1, 1.05 * _top(losses)))


def _top(losses: Sequence[tuple[float, float, float, float]]) -> float:
    """The greatest loss to show: not that of a member that diverged."""
    finite = [each for *_, each in losses if math.isfinite(each)]
    if not finite:
        return 0.0
    usual = statistics.median(each for _, each, _, _ in losses if math.isfinite(each))
    return min(max(finite), max(20 * usual, 3 * losses[0][1]))


def _draw_members(axes: Axes, tally: Tally, most: int = 10) -> None:
    bars = [(as_text(name), member.parts) for name, member in tally.members.items() if member.lines]
    # To a microsecond: what is noise must not decide the order.
    bars.sort(key=lambda item: -round(busy_seconds(item[1]), 6))
    shown = bars[:most]
    names, parts = [name for name, _ in shown], [split for _, split in shown]
    draw_stacked(axes, names, parts, ["#000000"] * len(shown))
    unit = axes.get_title(loc="left").split()[0]
    if len(bars) > len(shown):
        axes.set_title(f"{unit} per step: {most} busiest of {len(bars)}")
    elif len(bars) > 1:
        axes.set_title(f"{unit} per step, busiest member first")


def _draw_traffic(axes: Axes, history: History) -> None:
    traffic = history.traffic()
    t, sent, received = zip(*traffic, strict=True) if traffic else ((0.0,), (0.0,), (0.0,))
    time_unit, seconds = unit_of_time(t[-1])
    unit, size = unit_of_bytes(max(sent[-1], received[-1]))
    for way, values, dashes, colour in (
        ("sent", sent, "-", COLOURS[0]),
        ("received", received, "--", COLOURS[2]),
    ):
        x, y = [value / seconds for value in t], [value / size for value in values]
        axes.plot(x, y, dashes, color=colour, label=f"{way}, {units.size(values[-1])}")
    axes.legend(loc="upper left")
    axes.set_title(f"{unit} of all members, at the socket")
    axes.set_xlabel(f"time since training began ({time_unit})")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * (max(sent[-1], received[-1]) / size or 1.0))
