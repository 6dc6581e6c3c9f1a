"""TOML: read from files that may be anything, and written from tables of plain values."""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.reading import read_bytes

MOST_BYTES = 1 << 20
"""Default limit of a file that is read; longer ones are not written by hand."""

MOST_DEPTH = 32
"""Tables and lists in each other."""


def read_toml(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The tables of a TOML file. Raises FileNotFoundError; ConfigError for a file that cannot be
    read, has more than `most` bytes or is not TOML."""
    content = read_bytes(path, most)
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            raise ConfigError(f"{path} is in {name}", _WAY_OUT)
    try:
        return parse_toml(content.decode())
    except UnicodeDecodeError as error:
        line, byte = 1 + content.count(b"\n", 0, error.start), content[error.start]
        raise ConfigError(
            f"{path} is not UTF-8: byte 0x{byte:02x} in line {line} (is it latin-1?)", _WAY_OUT
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


_WAY_OUT = "save it as UTF-8, without a byte order mark"
_MARKS = {
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
    codecs.BOM_UTF32_LE: "UTF-32",  # begins as UTF-16 does
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""How a file in another encoding than TOML's begins."""


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError, also beyond MOST_DEPTH."""
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
    import tomli_w  # reading needs no package

    return tomli_w.dumps(_plain(table, ()))


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """The value in types that TOML has: NumPy's float64 and enums of ints are numbers, too."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, path) for item in value]
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _plain(item, (*path, key)) for key, item in items if item is not None}
    raise ConfigError(
        f"{'.'.join(path)} = {value!r} cannot be written as TOML",
        "use text, numbers, booleans, lists and tables",
    )
