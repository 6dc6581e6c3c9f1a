"""The table of topologies as plain text: seconds of one averaging, steps a second, bytes, refusals.

A row is a topology as plain values, in seconds and bytes: the keys of `jobs.topology.TopologyRow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from edgetrain.runs.reports.columns import Column, as_text, column
from edgetrain.runs.reports.units import duration, size

Row = Mapping[str, Any]

WIDTH = 80
"""Characters of a line of prose, at most."""


def text(heading: str, rows: Sequence[Row], choice: str) -> str:
    """The table, what is refused in it, and what `auto` takes."""
    refused = [
        line
        for row in rows
        if row["refused"]
        for line in wrap(f"{row['name']}: {row['refused']} ({row['way_out']})", WIDTH)
    ]
    lines = [*wrap(heading, WIDTH), "", *as_text(columns_of(rows))]
    if refused:
        lines += ["", "* not in this job:", *refused]
    return "\n".join([*lines, "", *wrap(choice, WIDTH)])


def columns_of(rows: Sequence[Row]) -> list[Column]:
    return [
        column("", (f"{row['name']}{' *' if row['refused'] else ''}" for row in rows)),
        column("averaging", (duration(row["open_s"]) for row in rows), below="windows open"),
        column("averaging", (duration(row["idle_s"]) for row in rows), below="from idle"),
        column("averaging", (duration(row["averaging_s"]) for row in rows), below="in this job"),
        column("steps", (f"{row['steps_per_second']:.3g}" for row in rows), below="a second"),
        column("a round", (size(row["wan_bytes"]) for row in rows), below="WAN"),
        column("a round", (size(row["lan_bytes"]) for row in rows), below="LAN"),
    ]
