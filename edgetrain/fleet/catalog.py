"""Find and read the files of the catalogs `devices/` and `netem/`.

In a checkout the catalogs are at the top level, in a wheel they are `edgetrain/_catalog/<kind>/`.
This module reads TOML; `devices` and `networks` interpret the keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from edgetrain import extensions
from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.files.toml import read_toml
from edgetrain.fleet.interpreters import PACKAGE_PARENT

T = TypeVar("T")

_WHAT = {"devices": "device profile", "netem": "network profile"}
MOST_BYTES = 4 << 20
"""Limit of a profile: some hold the trace of a link."""


def folder(kind: str) -> Path:
    """Return the folder of a catalog; `kind` is "devices" or "netem"."""
    packaged = PACKAGE_PARENT / "edgetrain" / "_catalog" / kind
    return packaged if packaged.is_dir() else PACKAGE_PARENT / kind


def names(kind: str) -> list[str]:
    return sorted(path.stem for path in folder(kind).glob("*.toml"))


def own(kind: str, name: str, cls: type[T]) -> T | None:
    """A user's own profile that is not in the catalog; None: there is none of this name."""
    what = _WHAT[kind]
    if name.endswith(".toml") or (folder(kind) / f"{name}.toml").exists():
        return None
    return None if extensions.own(what, name) is None else extensions.find(what, name, {}, cls)


def load(kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Read one profile, by its name or by the path of a .toml file; return the path and the table.

    Raises ConfigError for an unknown name (with the closest known one) and for invalid TOML.
    """
    path = Path(name).expanduser() if name.endswith(".toml") else folder(kind) / f"{name}.toml"
    try:
        return path, read_toml(path, MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"no {_WHAT[kind]} '{name}'", did_you_mean(name, names(kind))) from None
