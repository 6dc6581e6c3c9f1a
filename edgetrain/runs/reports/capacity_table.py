"""The answer of a capacity plan, as plain text: time, bytes, the bottleneck, other sizes of fleet.

A row is one fleet as plain values, in seconds, bytes and fractions: the keys of
`jobs.capacity.estimate.Answer`, which are also those in summary.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from edgetrain.runs.reports.columns import Column, as_text, column
from edgetrain.runs.reports.units import duration, share, size, times

Row = Mapping[str, Any]

WIDTH = 80
"""Characters of a line of prose, at most."""


def text(heading: str, row: Row, table: Sequence[Row], picture: Path | None = None) -> str:
    """The fleet in `row`, and below it the same fleet in other sizes."""
    lines = [
        *wrap(heading, WIDTH),
        "",
        f"time per step   {duration(row['seconds_per_step'])} (rounds: median "
        f"{duration(row['seconds_per_step_median'])}, 95 % below "
        f"{duration(row['seconds_per_step_p95'])})",
        f"of that         {duration(row['compute_s'])} computing, "
        f"{duration(row['wait_s'])} waiting ({100 * row['wait_share']:.1f} %; "
        f"{100 * row['steady_wait_share']:.1f} % in the second half)",
        f"throughput      {times(row['speed_up'])} one member's",
        f"a member        sends {size(row['member_sent_bytes'])}, receives "
        f"{size(row['member_received_bytes'])} in {row['steps']} steps, "
        f"{duration(row['seconds'])}; delay {row['delay']}",
        f"each hub        receives {size(row['hub_received_bytes_per_s'])} a second, sends "
        f"{size(row['hub_sent_bytes_per_s'])}",
        f"busy            {_busiest(row)}",
        f"late            {row['late']} contributions" if row["late"] else "",
        f"bottleneck      {row['bottleneck']}",
        "",
        *as_text(columns_of(table)),
        *left_out(table),
    ]
    return "\n".join(lines if picture is None else [*lines, "", f"picture: {picture}"])


def columns_of(table: Sequence[Row]) -> list[Column]:
    return [
        column("members", (f"{row['members']:,}".rjust(7) for row in table)),
        column("time", (duration(row["seconds_per_step"]) for row in table), below="per step"),
        column("waiting", (share(row["wait_share"]) for row in table)),
        column("throughput", (times(row["speed_up"]) for row in table), below="of one member"),
        column("hub sends", (size(row["hub_sent_bytes_per_s"]) for row in table), below="a second"),
        column("  bottleneck", _aligned_left(f"  {row['bottleneck']}" for row in table)),
    ]


def left_out(table: Sequence[Row]) -> list[str]:
    """A line for each thing that figures of fleets in the table leave out, with those fleets."""
    sizes: dict[str, list[str]] = {}
    for row in table:
        if row.get("left_out"):
            sizes.setdefault(row["left_out"], []).append(f"{row['members']:,}")
    lines = []
    for said, members in sizes.items():
        where = "" if len(members) == len(table) else f", with {' and '.join(members)} members"
        lines += wrap(f"left out: {said}{where}", WIDTH, subsequent_indent="  ")
    return lines


def _busiest(row: Row, most: int = 3) -> str:
    named = sorted(row["busy"].items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {100 * busy:.0f} %" for name, busy in named)


def _aligned_left(cells: Iterable[str]) -> list[str]:
    texts = list(cells)
    return [cell.ljust(max(map(len, texts))) for cell in texts]
