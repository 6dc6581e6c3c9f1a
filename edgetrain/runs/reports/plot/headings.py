"""Write above and below the panels of a picture: message, what was run, legend, warnings."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgetrain.runs.reports.comparison import Comparison
from edgetrain.runs.reports.message import message
from edgetrain.runs.reports.plot.style import (
    as_text,
    legend_points,
    listed,
    write_heading,
    write_legend,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    lines = [about, _remark(compared, summary)]
    room = write_heading(figure, as_text(message(compared)), lines, legend_points(labels))
    if labels:
        write_legend(figure, legend, labels, room)


def _remark(compared: Comparison, summary: Mapping[str, Any]) -> str:
    backend = (summary.get("emulation") or {}).get("backend")
    parts = [""]
    if backend == "simulated":
        parts = ["simulated, in virtual time"]
    elif backend not in (None, "none"):
        parts = [f"network emulated by '{as_text(str(backend))}'"]
    if any(row.speedup is not None for row in compared.rows[1:]):
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
        rows = [row for line in lines for row in textwrap.wrap(line, NOTE_CHARACTERS)]
        text = "\n".join(rows)
        wrong = untrusted or any(row.status != "finished" for row in compared.rows)
        colour = "#B00020" if wrong else "#333333"
        figure.supxlabel(text, x=0.012, ha="left", fontsize=11.5, color=colour)
