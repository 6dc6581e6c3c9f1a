"""The closing table of a comparison, as plain text or in colour (with rich)."""

from __future__ import annotations

from pathlib import Path

from edgetrain.runs.reports import units
from edgetrain.runs.reports.columns import Column, as_text, column, fit, optional
from edgetrain.runs.reports.comparison import Comparison, Row


def columns_of(comparison: Comparison) -> list[Column]:
    """The columns of the closing table, without those that have nothing to show.

    Columns with a rank may be left out on a narrow terminal; the footnotes name an untrusted run
    in any case.
    """
    rows, metric, target = comparison.rows, comparison.metric, comparison.target
    shown = [
        column(
            comparison.of, (units.printable(row.label) for row in rows), styles=["bold"] * len(rows)
        ),
        column("final", (units.figure(metric, row.final) for row in rows), below=metric),
    ]
    own = (units.figure(metric, row.own_mean) for row in rows)
    worst = (units.figure(metric, row.own_worst_tenth) for row in rows)
    shown += optional("on members'", own, below="own data")
    shown += optional("their worst", worst, below="tenth")
    if target is not None:
        goal = units.goal(metric, target)
        shown.append(column("time to", map(_reached, rows), below=goal))
        if any(row.comparable for row in rows[1:]):
            shown.append(column("speed-up", map(_faster, rows), styles=map(_speed_style, rows)))
    per_step = (units.duration(row.seconds_per_step) for row in rows)
    shown += [
        column("time", per_step, below="per step"),
        column("waiting", (units.share(row.wait_share) for row in rows), rank=1),
        column("sent", (units.size(row.sent_bytes) for row in rows)),
        column("received", (units.size(row.received_bytes) for row in rows), rank=3),
    ]
    shown += optional("WAN", (units.size(row.wan_bytes) for row in rows), below="both ways")
    shown += optional("LAN", (units.size(row.lan_bytes) for row in rows), below="both ways")
    pace = (units.pace(row.local_steps, row.delay) for row in rows)
    shown += optional("steps,", pace, below="delay", rank=3)
    if any(row.codec not in (None, "fp32", "dense") for row in rows):
        codecs = (units.printable(row.codec or units.ABSENT) for row in rows)
        shown.append(column("codec", codecs, rank=3))
    shown += optional("energy", map(_energy, rows), rank=2)
    trust, styles = (_TRUST[row.timing_ok] for row in rows), map(_trust_style, rows)
    return shown + optional("timing", trust, below="ok", rank=4, styles=styles)


_TRUST = {True: "yes", False: "NO", None: units.ABSENT}


def _reached(row: Row) -> str:
    return "never" if row.target_seconds is None else units.duration(row.target_seconds)


def _faster(row: Row) -> str:
    if row.speedup_at_least is not None:
        return f"over {units.times(row.speedup_at_least)}"
    return units.times(row.speedup)


def _energy(row: Row) -> str:
    mark = "~" if row.joules_source == "estimated" and row.joules is not None else ""
    return mark + units.energy(row.joules)


def footnotes(comparison: Comparison, picture: Path | None = None) -> list[str]:
    """The lines below the table: warnings first, the picture last."""
    lines = [units.printable(note) for note in comparison.notes]
    if any(row.joules_source == "estimated" for row in comparison.rows):
        lines.append("~ energy is estimated from the device profile, not measured")
    if any(row.delay for row in comparison.rows):
        lines.append("steps, delay: local steps of a round; steps trained while it is averaged")
    if picture is not None:
        lines.append(f"picture: {picture}")
    return lines


def text(comparison: Comparison, picture: Path | None = None, width: int | None = None) -> str:
    """The closing table as plain text, at most `width` characters wide (None: any)."""
    lines = as_text(fit(columns_of(comparison), width, gap=2))
    return "\n".join([*lines, "", *footnotes(comparison, picture)]).rstrip() + "\n"


def _speed_style(row: Row) -> str:
    faster = row.speedup or row.speedup_at_least or 0
    return "bold green" if faster > 1.05 else ""


def _trust_style(row: Row) -> str:
    return "bold red" if row.timing_ok is False else ""
