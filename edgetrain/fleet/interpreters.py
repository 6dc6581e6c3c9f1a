"""The command that starts another interpreter with a module of this package."""

from __future__ import annotations

import os
from pathlib import Path

import edgetrain

PACKAGE_PARENT = Path(edgetrain.__file__).resolve().parents[1]
"""The folder that holds the package: a checkout, or site-packages."""


def environment() -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH set so that it imports this edgetrain."""
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
