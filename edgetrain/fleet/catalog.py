"""Find and read the files of the catalogs `devices/` and `netem/`.

In a checkout the catalogs are at the top level, in a wheel they are `edgetrain/_catalog/<kind>/`.
This module reads TOML; `devices` and `networks` interpret the keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.interpreters import PACKAGE_PARENT


def folder(kind: str) -> Path:
    """Return the folder of a catalog; `kind` is "devices" or "netem"."""
    packaged = PACKAGE_PARENT / "edgetrain" / "_catalog" / kind
    return packaged if packaged.is_dir() else PACKAGE_PARENT / kind


def names(kind: str) -> list[str]:
    """Return the names of all profiles of a catalog, sorted."""
    return sorted(path.stem for path in folder(kind).glob("*.toml"))


def load(kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Read one profile, by its name or by the path of a .toml file; return the path and the table.

    Raises ConfigError for an unknown name (with the closest known one) and for invalid TOML.
    """
    path = Path(name) if name.endswith(".toml") else folder(kind) / f"{name}.toml"
    try:
        return path, read_toml(path)
    except FileNotFoundError:
        what = {"devices": "device profile", "netem": "network profile"}[kind]
        raise ConfigError(f"no {what} '{name}'", did_you_mean(name, names(kind))) from None


MOST_BYTES = 4 << 20
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
