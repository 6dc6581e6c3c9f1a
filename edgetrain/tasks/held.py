"""Tasks that are objects of this process: a notebook's own, which no module has by a name.

A job names one as it names every task, and another process cannot load it. Only simulations, which
are one process, may have one.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

_numbers = itertools.count(1)


def spelled(task: object) -> str:
    """ "module:object" of a task, its class or its factory, for a job. One that a module has by its
    name is spelled so; any other is kept here until the process ends."""
    name, module = getattr(task, "__qualname__", ""), getattr(task, "__module__", "")
    if name and getattr(sys.modules.get(module), name, None) is task:
        return f"{module}:{name}"

    def factory() -> Any:
        return task

    held = f"{type(task).__name__}_{next(_numbers)}"
    globals()[held] = task if callable(task) else factory
    return f"{__name__}:{held}"
