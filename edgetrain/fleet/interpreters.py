"""Interpreters that are started to run a module of this package."""

from __future__ import annotations

import os
from pathlib import Path

import edgetrain

PACKAGE_PARENT = Path(edgetrain.__file__).resolve().parents[1]
"""The folder that holds the package: a checkout, or site-packages."""


def environment() -> dict[str, str]:
    """This process's environment, in which the same edgetrain is found from any folder."""
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
