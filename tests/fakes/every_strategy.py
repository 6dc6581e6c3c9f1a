"""Every strategy of the table, spelled as a job would."""

from __future__ import annotations

from dataclasses import replace

from edgetrain.strategies import TABLE, Strategy, find

ARGUMENTS = {"fedbuff": (2.0, 0.25), "ssp": (0.0,), "async-sgd": (3.0,)}
"""Where they are whole numbers: for two members in rounds of three steps."""


def arguments_of(row: Strategy) -> tuple[float, ...]:
    """Arguments that a row accepts."""
    return ARGUMENTS.get(row.name, tuple(max(p.low, 0.25) for p in row.parameters))


_ALL = [
    replace(row, arguments=arguments_of(row), correction=correction).spelled
    for row in TABLE.values()
    if not row.deals
    for correction in row.corrections or [""]
]
"""Those with parameters have some value for each; those with corrections are there with each. Whose
hub hands out work is tested by itself (tests/exchange/hub/test_dealing.py)."""

SPELLED = [spelled for spelled in _ALL if find(spelled).is_synchronous]
OUT_OF_STEP = [spelled for spelled in _ALL if spelled not in SPELLED]
"""Of two members without a delay these are in step, too."""
