"""The places where a job fits, and why not elsewhere, as plain text from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgetrain.runs.reports.columns import as_text, column
from edgetrain.runs.reports.units import duration, size

Row = Mapping[str, Any]


def text(plan: Row) -> str:
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
    """What each member of a pipeline over members holds."""
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
