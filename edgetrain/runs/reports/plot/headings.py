"""Write above and below the panels of a picture: heading, legend, warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgetrain.runs.reports.comparison import Comparison
from edgetrain.runs.reports.plot.style import (
    HEADING_POINTS,
    TARGET,
    as_text,
    below_top,
    listed,
    write_heading,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def heading_of(summary: Mapping[str, Any], *more: str | None) -> str:
    """Task, `more`, members, device and network, as far as they are known."""
    task = str(summary["task"] or "").rpartition(":")[2]
    members, device = summary["members"], summary["device"] or "host"
    mixed = not isinstance(device, str) or ":" in device or "," in device
    fleet = f"{members} members ({listed(device)})" if mixed else f"{members} x {device}"
    network = listed(summary["network"] or "none")
    network = "no network emulated" if network == "none" else network
    return ", ".join(as_text(str(part)) for part in (task, *more, fleet, network) if part)


def draw_header(
    figure: Figure, axes: Axes, compared: Comparison, summary: Mapping[str, Any], heading: str
) -> None:
    """Write the heading, and the legend of `axes` in as many columns as fit.

    matplotlib's layout lets a title and a legend above the panels overlap; this reserves the room.
    """
    handles, labels = axes.get_legend_handles_labels()
    widest = max(map(len, labels), default=0)
    ncols = max(1, min(len(labels), 126 // (widest + 6)))
    remark = _remark(compared, summary)
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.012, below_top(figure, HEADING_POINTS)),
        ncols=ncols,
        title=remark or None,
        title_fontsize=12,
        alignment="left",
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.6,
        handlelength=2.4,
    )
    legend.set_in_layout(False)
    legend.get_title().set_color(TARGET)
    rows = -(-len(labels) // ncols) + bool(remark)
    write_heading(figure, heading, HEADING_POINTS + 20 * rows)


def _remark(compared: Comparison, summary: Mapping[str, Any]) -> str:
    backend = (summary.get("emulation") or {}).get("backend")
    parts = [""]
    if backend == "simulated":
        parts = ["simulated, in virtual time"]
    elif backend not in (None, "none"):
        parts = [f"network emulated by '{as_text(str(backend))}'"]
    if compared.target is not None and len(compared.rows) > 1:
        parts.append(f"speed-up against {as_text(compared.rows[0].label)}")
    return "; ".join(part for part in parts if part)


def draw_notes(figure: Figure, compared: Comparison) -> None:
    """Write remarks at the bottom, as supxlabel: the layout reserves room for that. They are red
    only if a run failed or is not to be trusted."""
    untrusted = tuple(f"{row.label}:" for row in compared.rows if row.trusted is False)
    lines = [
        ("* " if note.startswith(untrusted) else "") + as_text(note) for note in compared.notes[:4]
    ]
    if lines:
        text = "\n".join(lines)
        wrong = untrusted or any(row.status != "finished" for row in compared.rows)
        colour = "#B00020" if wrong else "#333333"
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color=colour)
