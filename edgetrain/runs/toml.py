"""Write tables of plain values as TOML, which tomllib reads back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgetrain.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML of nested tables of text, numbers, booleans and lists.

    A key whose value is None is left out: TOML has no null. Raises ConfigError for any other value.
    """
    return "\n".join(_toml_table(table, ())).strip("\n") + "\n"


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lists = {key: value for key, value in table.items() if not path and _is_tables(value)}
    plain = {
        key: value
        for key, value in table.items()
        if not isinstance(value, Mapping) and key not in lists
    }
    lines = [
        f"{_toml_key(key)} = {_toml_value(value, (*path, key))}"
        for key, value in plain.items()
        if value is not None
    ]
    inner = [(key, value) for key, value in table.items() if isinstance(value, Mapping)]
    if path and (lines or not inner):
        lines = ["", f"[{'.'.join(map(_toml_key, path))}]", *lines]
    for key, value in inner:
        lines += _toml_table(value, (*path, key))
    for key, tables in lists.items():
        for item in tables:
            lines += ["", f"[[{_toml_key(key)}]]"]
            lines += [
                f"{_toml_key(name)} = {_toml_value(value, (key, name))}"
                for name, value in item.items()
                if value is not None
            ]
    return lines


def _is_tables(value: Any) -> bool:
    """Whether this is written as [[key]], a table for each item."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _toml_text(key)


def _toml_text(text: str) -> str:
    escaped = (
        _ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or char == "\x7f" else char)
        for char in text
    )
    return '"' + "".join(escaped) + '"'


def _toml_value(value: Any, path: tuple[str, ...]) -> str:
    # Format with the base class: NumPy's float64 and enums of ints have another repr.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (
            f"{_toml_key(key)} = {_toml_value(item, (*path, key))}"
            for key, item in value.items()
            if item is not None
        )
        return "{ " + ", ".join(items) + " }"
    raise ConfigError(
        f"{'.'.join(path)} = {value!r} cannot be written as TOML",
        "use text, numbers, booleans, lists and tables",
    )
