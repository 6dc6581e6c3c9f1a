"""TOML: read from files that may be anything, and written from tables of plain values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

MOST_BYTES = 1 << 20
"""Of a file that is read. Nobody writes a larger one."""

MOST_DEPTH = 32
"""Tables and lists in each other."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises FileNotFoundError; ConfigError for a file that cannot be
    read, is too large or is not TOML."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB", "is it the right file?")
    try:
        return parse_toml(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError, also for one that is nested more than
    MOST_DEPTH deep."""
    if _DOTTED.search(text):  # tomllib takes minutes for a key with a hundred thousand dots
        raise ValueError(_DEEP)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
    level: list[Any] = [tables]
    for _ in range(MOST_DEPTH):
        inner = [each for value in level for each in _items(value)]
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise ValueError(_DEEP)
    return tables


_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DOTTED = re.compile(rf"(?<![\w-])(?:{_PART}){{{2 * MOST_DEPTH}}}")

_DEEP = f"tables and lists are nested more than {MOST_DEPTH} deep"


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


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
