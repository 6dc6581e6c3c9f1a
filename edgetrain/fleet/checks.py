"""Check values from TOML tables. Each error names the file or table, the key and the range.

`where` is the beginning of an error, such as "mine.toml: up.delay_ms" or "faults[0].at_s".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean

Limits = tuple[float, float, str]
"""Lowest and highest allowed value, and their unit."""


def number(value: Any, limits: Limits, where: str, whole: bool = False) -> float:
    """Return `value` as a float within `limits` (and integral, if `whole`). ConfigError."""
    low, high, unit = limits
    allowed = f"allowed: {low:g} to {high:g}{' ' + unit if unit else ''}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} = {value!r} is not a number", allowed)
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{where} = {value:g} is out of range", allowed)
    if whole and value != int(value):
        raise ConfigError(f"{where} = {value:g} is not a whole number", allowed)
    return float(value)


def known(table: Iterable[str], keys: Iterable[str], where: str = "", prefix: str = "") -> None:
    """Raise ConfigError for a key of a table that is not one of `keys`. The error begins with
    `where`; keys in it begin with `prefix`, such as "faults[0]."."""
    keys = list(keys)
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}unknown key '{prefix}{key}'", did_you_mean(key, keys))


def text(value: Any, where: str) -> str:
    """Return `value`, if it is a text. Raises ConfigError for anything else."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} = {value!r} is not a text", "put it in quotes")
    return value


def seconds(value: Any, most: str, where: str) -> float:
    """Return `value` as seconds, if it is from 0 to `most`. Raises ConfigError otherwise."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 <= value <= float(most):
        raise ConfigError(f"{where} = {value!r} is out of range", f"allowed: 0 to {most} s")
    return float(value)


def node_numbers(value: Any, count: int, where: str, what: str = "member") -> tuple[int, ...]:
    """Return `value` as a tuple of numbers of members (or `what`) below `count`. ConfigError."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where} = {value!r} is not a list of {what} numbers", "[0, 3]")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < count:
            raise ConfigError(f"{where} has {item!r}, out of range", f"allowed: 0 to {count - 1}")
    return tuple(value)
