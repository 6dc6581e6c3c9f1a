"""Values from TOML tables, checked: each error names the file or table, the key and the range.

`where` is what an error begins with, as "mine.toml: up.delay_ms" or "faults[0].at_s".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edgetrain.errors import ConfigError

Limits = tuple[float, float, str]
"""The lowest and the highest value, both allowed, and their unit."""


def number(value: Any, limits: Limits, where: str, whole: bool = False) -> float:
    """`value` as a float within `limits`, if `whole` an integral one. ConfigError otherwise."""
    low, high, unit = limits
    allowed = f"allowed: {low:g} to {high:g}{' ' + unit if unit else ''}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} = {value!r} is not a number", allowed)
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{where} = {value:g} is out of range", allowed)
    if whole and value != int(value):
        raise ConfigError(f"{where} = {value:g} is not a whole number", allowed)
    return float(value)


def text(value: Any, where: str) -> str:
    """`value`, if it is a text. ConfigError for anything else."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} = {value!r} is not a text", "put it in quotes")
    return value


def seconds(value: Any, most: str, where: str) -> float:
    """`value` as seconds from 0 to `most`. ConfigError for anything else, None included."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 <= value <= float(most):
        raise ConfigError(f"{where} = {value!r} is out of range", f"allowed: 0 to {most} s")
    return float(value)


def member_numbers(value: Any, members: int, where: str) -> tuple[int, ...]:
    """`value` as numbers of members of a fleet of this size. ConfigError for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where} = {value!r} is not a list of member numbers", "[0, 3]")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < members:
            raise ConfigError(f"{where} has {item!r}, out of range", f"allowed: 0 to {members - 1}")
    return tuple(value)
