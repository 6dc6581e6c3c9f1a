"""Every strategy of the table, spelled as a job would."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.strategies import TABLE

SPELLED = [
    replace(row, arguments=(0.25,) * len(row.parameters), correction=correction).spelled
    for row in TABLE.values()
    for correction in row.corrections or [""]
]
"""Those with parameters have 0.25 for each; those with corrections are there with each."""
