"""Where the catalogs lie: `devices/` and `netem/`, data files of this repository.

Inside a wheel they are `edgetrain/_catalog/<kind>/`; in a checkout they stand at the top level.
This module finds files and reads TOML; what the keys mean is known by `devices` and `networks`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.fleet.interpreters import PACKAGE_PARENT


def folder(kind: str) -> Path:
    """The folder of a catalog, `kind` being "devices" or "netem"."""
    packaged = PACKAGE_PARENT / "edgetrain" / "_catalog" / kind
    return packaged if packaged.is_dir() else PACKAGE_PARENT / kind


def names(kind: str) -> list[str]:
    """The names of all profiles of a catalog, sorted."""
    return sorted(path.stem for path in folder(kind).glob("*.toml"))


def load(kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """One profile by name, or by the path of a file of the user's own that ends in .toml.

    Raises ConfigError for an unknown name (with the near miss) and for a file that is not TOML.
    """
    path = Path(name) if name.endswith(".toml") else folder(kind) / f"{name}.toml"
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = {"devices": "device profile", "netem": "network profile"}[kind]
        raise ConfigError(f"no {what} '{name}'", did_you_mean(name, names(kind))) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
