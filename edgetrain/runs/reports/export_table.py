"""The table of exported files as plain text. A row is one of export.json's `files`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgetrain.runs.reports.columns import as_text, column
from edgetrain.runs.reports.units import figure, size


def text(said: Mapping[str, Any]) -> str:
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
