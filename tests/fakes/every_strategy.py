"""Every strategy of the table, spelled as a job would."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.strategies import TABLE

SPELLED = [
    replace(
        row, arguments=tuple(max(p.low, 0.25) for p in row.parameters), correction=correction
    ).spelled
    for row in TABLE.values()
    for correction in row.corrections or [""]
]
"""Those with parameters have 0.25 for each, or 1; those with corrections are there with each."""
