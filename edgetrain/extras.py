"""The command that installs an extra of edgetrain beside this copy of it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install_command(extra: str, root: Path = ROOT) -> str:
    """A shell command that adds the packages of `extra` ("lab", …): of a checkout at `root` by its
    path; of a wheel, which no index needs to know, by the names that its metadata have."""
    if (root / "pyproject.toml").exists():
        return f"pip install -e '{root}[{extra}]'"
    try:
        listed = requires("edgetrain") or []
    except PackageNotFoundError:
        listed = []
    of_extra = re.compile(rf"\bextra == ['\"]{extra}['\"]")
    names = [name.partition(";")[0].strip() for name in listed if of_extra.search(name)]
    return " ".join(["pip install", *(f"'{name}'" for name in names or [f"edgetrain[{extra}]"])])
