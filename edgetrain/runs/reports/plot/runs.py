"""Draw compare.png: several runs of one job, or one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.errors import ConfigError
from edgetrain.runs.data import RunData
from edgetrain.runs.folder import read_metrics, read_summary
from edgetrain.runs.reports import units
from edgetrain.runs.reports.comparison import Comparison, compare
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.plot.bars import (
    draw_stacked,
    name_bars,
    unit_of_bytes,
    write_beside,
)
from edgetrain.runs.reports.plot.ends import fits, label_ends
from edgetrain.runs.reports.plot.quality import (
    Curve,
    curve_of,
    draw_against_steps,
    draw_against_time,
    draw_course,
    draw_members,
    end_of_time,
    legend_of,
    time_ends,
    value_ends,
)
from edgetrain.runs.reports.plot.style import (
    INCHES,
    as_text,
    legend_points,
    listed,
    new_figure,
    styled,
    write_heading,
    write_legend,
)
from edgetrain.runs.summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OWN_INCHES = 3.4
"""Height of the row about members' own data."""
_LINES = ("eval", "figure", "own_eval", "event", "round")
"""Kinds that a curve is made of: all but steps, which are most lines."""


def draw_comparison(folders: Sequence[Path]) -> Figure:
    if not folders:
        raise ConfigError("there is no run to draw")
    summaries = [read_summary(folder) or summarise(folder) for folder in folders]
    compared = compare(summaries)
    curves = [
        curve_of(RunData().add_all(read_metrics(folder, *_LINES)), row, compared.metric, place)
        for place, (folder, row) in enumerate(zip(folders, compared.rows, strict=True))
    ]
    with styled():
        summary = summaries[0]
        crowd = max(0, len(curves) - 4)
        own = [(curve, curve.own) for curve in curves if curve.own is not None]
        tall = INCHES[1] + 0.35 * max(0, crowd - 2) + _OWN_INCHES * bool(own)
        figure = new_figure((INCHES[0], tall))
        ratios = [1.6, 1 + 0.12 * crowd, *([1.2] if own else [])]
        # Each row has margins of its own: labels beside lines take no room from the bars.
        rows = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
        above, below, *more = (
            rows[row].subgridspec(1, 2, width_ratios=[1.2, 1]) for row in range(len(ratios))
        )
        for each in more:
            draw_course(figure.add_subplot(each[0, 0]), own, compared.metric)
            draw_members(figure.add_subplot(each[0, 1]), own, compared.metric)
        against_time = figure.add_subplot(above[0, 0])
        against_steps = figure.add_subplot(above[0, 1], sharey=against_time)
        end = end_of_time(curves)
        at_ends = fits([curve.name for curve in curves])
        draw_against_time(against_time, curves, compared, end)
        draw_against_steps(against_steps, curves, compared)
        axes = figure.add_subplot(below[0, 0])
        parts = [
            (
                curve.row.compute_s or 0.0,
                curve.row.wait_s or 0.0,
                curve.row.overhead_s or 0.0,
                curve.row.eval_s,
                curve.row.end_s,
            )
            for curve in curves
        ]
        colours = [curve.colour for curve in curves]
        draw_stacked(axes, [curve.name for curve in curves], parts, colours)
        _draw_bytes(figure.add_subplot(below[0, 1]), curves)
        lines: list[Any] = [] if at_ends else against_time.get_legend_handles_labels()[0]
        marks = legend_of([each for curve in curves for each in curve.happened if each.t <= end])
        draw_header(figure, compared, summary, heading_of(summary), [*lines, *marks])
        draw_notes(figure, compared)
        if at_ends:
            steps = value_ends(curves, compared, [curve.steps for curve in curves])
            label_ends(
                figure, {against_time: time_ends(curves, compared, end), against_steps: steps}
            )
        return figure


def _draw_bytes(axes: Axes, curves: Sequence[Curve]) -> None:
    rows = [curve.row for curve in curves]
    most = max([max(row.sent_bytes, row.received_bytes) for row in rows], default=0)
    unit, size = unit_of_bytes(most)
    for place, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        sent, received = row.sent_bytes / size, row.received_bytes / size
        axes.barh(place - 0.16, sent, 0.3, color=curve.colour, lw=0)
        axes.barh(place + 0.16, received, 0.3, color=curve.colour, alpha=0.45, hatch="///", lw=0)
        both = f"{units.size(row.sent_bytes)}, {units.size(row.received_bytes)}"
        write_beside(axes, max(sent, received), place, both)
    name_bars(axes, [curve.name for curve in curves], [curve.colour for curve in curves])
    axes.set_xlim(0, 1.75 * (most / size or 1.0))
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(f"{unit} of all members")
    axes.set_xlabel("at the socket: sent, received (hatched)")


# -- above and below the panels ----------------------------------------------------------------

NOTE_CHARACTERS = 120
"""Characters of a remark that fit beside each other below the panels."""


def heading_of(summary: Mapping[str, Any], *more: str | None) -> str:
    task = str(summary["task"] or "").rpartition(":")[2]
    members, device = summary["members"], summary["device"]
    mixed = not isinstance(device, str) or ":" in device or "," in device
    if device is None:
        fleet = f"{members} members"
    else:
        fleet = f"{members} members ({listed(device)})" if mixed else f"{members} x {device}"
    network = listed(summary["network"]) if summary["network"] else None
    network = "no network emulated" if network == "none" else network
    return ", ".join(as_text(str(part)) for part in (task, *more, fleet, network) if part)


def draw_header(
    figure: Figure,
    compared: Comparison,
    summary: Mapping[str, Any],
    about: str,
    legend: Sequence[Any] = (),
) -> None:
    """Write the heading, what was run below it, and a legend; reserve the room for them."""
    labels = [str(handle.get_label()) for handle in legend]
    backend = (summary.get("emulation") or {}).get("backend")
    parts = [""]
    if backend == "simulated":
        parts = ["simulated, in virtual time"]
    elif backend not in (None, "none"):
        parts = [f"network emulated by '{as_text(str(backend))}'"]
    if any(row.speedup is not None for row in compared.rows[1:]):
        parts.append(f"speed-up against {as_text(compared.rows[0].label)}")
    lines = [about, "; ".join(part for part in parts if part)]
    room = write_heading(figure, as_text(message(compared)), lines, legend_points(labels))
    if labels:
        write_legend(figure, legend, labels, room)


def draw_notes(figure: Figure, compared: Comparison) -> None:
    """Write remarks at the bottom, as supxlabel: the layout reserves room for that. They are red
    only if a run failed or is not to be trusted."""
    untrusted = tuple(f"{row.label}:" for row in compared.rows if row.timing_ok is False)
    lines = [
        ("* " if note.startswith(untrusted) else "") + as_text(note) for note in compared.notes[:4]
    ]
    if lines:
        rows = [row for line in lines for row in textwrap.wrap(line, NOTE_CHARACTERS)]
        text = "\n".join(rows)
        wrong = untrusted or any(row.status != "finished" for row in compared.rows)
        colour = "#B00020" if wrong else "#333333"
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color=colour)
