"""Tables of plans, topologies, sweeps and exported files as plain text.

A row is plain values, in seconds, bytes and fractions: the keys of `jobs.capacity.estimate.Answer`,
of `jobs.topology.TopologyRow`, or of export.json's `files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from edgetrain.runs.reports.columns import Column, as_text, column
from edgetrain.runs.reports.comparison import seconds_per_step, wait_share
from edgetrain.runs.reports.sweep_rows import Row as Point
from edgetrain.runs.reports.sweep_rows import numbers_of, relative, series
from edgetrain.runs.reports.units import duration, figure, printable, share, size, times

Row = Mapping[str, Any]

WIDTH = 80
"""Characters of a line of prose, at most."""


def capacity_text(heading: str, row: Row, table: Sequence[Row]) -> str:
    """The fleet in `row`, and below it the same fleet in other sizes."""
    columns = [
        column("members", (f"{row['members']:,}".rjust(7) for row in table)),
        column("time", (duration(row["seconds_per_step"]) for row in table), below="per step"),
        column("waiting", (share(row["wait_share"]) for row in table)),
        column("throughput", (times(row["speed_up"]) for row in table), below="of one member"),
        column("hub sends", (size(row["hub_sent_bytes_per_s"]) for row in table), below="a second"),
        column("  bottleneck", _aligned_left(f"  {row['bottleneck']}" for row in table)),
    ]
    return "\n".join([
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
        *as_text(columns),
        *left_out(table),
    ])  # fmt: skip


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


def placement_text(plan: Row) -> str:
    """The choice, the places that hold the job, what each rank holds, and what was refused."""
    chosen, model = plan["chosen"], plan["model"]
    where = {"edge": "on its devices", "": "nowhere"}.get(chosen, f"on servers: {chosen}")
    lines = [
        f"{plan['name']}: {model['parameters']:,} parameters in {len(model['layers'])} layers, "
        f"{plan['samples']} samples a step",
        "",
        f"runs      {where}",
        f"because   {plan['why']}",
        "",
        *as_text(_places(plan)),
    ]
    if plan["placements"]:
        lines += ["", f"{plan['placements'][0]['placement']}:", *as_text(_ranks(plan))]
    if plan["refused"]:
        lines += ["", "refused", *(f"  {each}" for each in plan["refused"])]
    lines += [f"note: {each}" for each in plan["notes"]]
    return "\n".join(lines)


def stages_text(plan: Row) -> str:
    """The parts of each member of a pipeline."""
    stages = plan["stages"]
    columns = [
        column("stage", (f"m{place}" for place in range(len(stages)))),
        column("device", (each["device"] for each in stages)),
        column("layers", (each["layers"] for each in stages)),
        column("needs", (size(each["needs_bytes"]) for each in stages)),
        column("has", (size(each["usable_bytes"]) for each in stages)),
        column("under way", (str(each["window"]) for each in stages), below="at most"),
    ]
    return "\n".join([
        f"{plan['name']}: {plan['parameters']:,} parameters, {plan['samples']} samples a step",
        "",
        f"runs      on its devices: {plan['placement']}",
        f"a step    {duration(plan['seconds'])}",
        "",
        *as_text(columns),
    ])  # fmt: skip


def _places(plan: Row) -> list[Any]:
    edge = plan["edge"]
    rows = [
        (
            f"{plan['members']} x {edge['device']}",
            duration(edge["seconds"]),
            size(edge["needs_bytes"]),
            size(edge["usable_bytes"]),
            "no" if edge["problem"] else "yes",
        )
    ]
    rows += [
        (
            each["placement"],
            duration(each["seconds"]),
            size(max(each["bytes"])),
            size(min(each["usable_bytes"])),
            "yes",
        )
        for each in plan["placements"]
    ]
    titles = (("place", ""), ("a step", ""), ("needs", "each"), ("has", "each"), ("fits", ""))
    return [
        column(title, (row[at] for row in rows), below=below)
        for at, (title, below) in enumerate(titles)
    ]


def _ranks(plan: Row) -> list[Any]:
    best = plan["placements"][0]
    return [
        column("stage", (str(rank) for rank in range(len(best["bytes"])))),
        column("layers", best["layers"]),
        column("memory", (size(each) for each in best["bytes"])),
        column("server", best["servers"]),
    ]


def topology_text(heading: str, rows: Sequence[Row], choice: str) -> str:
    """The table, what is refused in it, and what `auto` takes."""
    against: dict[str, list[str]] = {}
    for row in rows:
        if row["refused"]:
            why = f"{row['refused']} ({row['way_out']})"
            against.setdefault(why, []).append(row["name"])
    refused = [
        line for why, names in against.items() for line in wrap(f"{', '.join(names)}: {why}", WIDTH)
    ]
    columns = [
        column("", (f"{row['name']}{' *' if row['refused'] else ''}" for row in rows)),
        column("averaging", (duration(row["open_s"]) for row in rows), below="windows open"),
        column("averaging", (duration(row["idle_s"]) for row in rows), below="from idle"),
        column("averaging", (duration(row["averaging_s"]) for row in rows), below="in this job"),
        column("steps", (f"{row['steps_per_second']:.3g}" for row in rows), below="a second"),
        column("a round", (size(row["wan_bytes"]) for row in rows), below="WAN"),
        column("a round", (size(row["lan_bytes"]) for row in rows), below="LAN"),
    ]
    lines = [*wrap(heading, WIDTH), "", *as_text(columns)]
    if refused:
        lines += ["", "* not in this job:", *refused]
    return "\n".join([*lines, "", *wrap(choice, WIDTH)])


def export_text(said: Row) -> str:
    """Each file's size, figure and outputs, below those of the trained model."""
    metric, rows = said["metric"], said["files"]
    differ = [row.get("outputs_differ") for row in rows]
    return "\n".join(
        as_text(
            [
                column("file", ["as trained", *(row["file"] for row in rows)]),
                column("size", ["", *(size(row["bytes"]) for row in rows)]),
                column(
                    metric,
                    (figure(metric, each[metric])
                     for each in [said["trained"], *(row["figures"] for row in rows)]),
                ),
                column(
                    "outputs differ",
                    ["", *("-" if each is None else f"{each:.1e}" for each in differ)],
                    below="by at most",
                ),
                column(
                    "bar", ["", *("holds" if row["holds"] else "BELOW IT" for row in rows)]
                ),
            ]
        )
    )  # fmt: skip


def sweep_text(axes: Mapping[str, Sequence[str]], points: Sequence[Point], metric: str) -> str:
    """The table of `sweep_rows.points` for these axes (name -> labels), and the gains below it."""
    return "\n".join(
        ["", *as_text(_sweep_columns(list(axes), points, metric)), "", *_gains(axes, points)]
    )


def _sweep_columns(names: Sequence[str], points: Sequence[Point], metric: str) -> list[Column]:
    def spread(point: Point) -> str:
        middle, low, high = (figure(metric, point[key]) for key in ("final", "low", "high"))
        return middle if point["runs"] < 2 else f"{middle} ({low} to {high})"

    shown = [column(name, (printable(point[name]) for point in points)) for name in names]
    shown += [column("final", map(spread, points), below=metric)]
    if any(point["target_seconds"] for point in points):
        reached = (duration(point["target_seconds"]) for point in points)
        shown += [column("time to", reached, below="target")]
    return [
        *shown,
        column("time", (duration(seconds_per_step(p)) for p in points), below="per step"),
        column("waiting", (share(wait_share(point)) for point in points)),
        column("sent", (size(point["sent_bytes"]) for point in points)),
    ]


def _gains(axes: Mapping[str, Sequence[str]], points: Sequence[Point]) -> list[str]:
    """For each axis of numbers, the fleet's steps a second relative to those at its first value."""
    lines = []
    for name, labels in axes.items():
        if numbers_of(labels) is None or len(labels) < 2:
            continue
        for label, line in series(name, list(axes), points).items():
            at = f" ({label})" if label else ""
            steps = ", ".join(f"{value}: {gain:.2f}x" for value, gain in relative(line))
            lines.append(f"steps a second of the fleet by {name}{at}: {steps}")
    return [*lines, ""] if lines else []
