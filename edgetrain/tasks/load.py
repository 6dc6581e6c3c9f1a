"""From "module:object" in a job to a task. Imports what the job names, and knows no task itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import EdgetrainError, TaskError, did_you_mean, quoted
from edgetrain.extensions.modules import GROUPS, attribute_of, check_origin, module_of
from edgetrain.tasks import spelling
from edgetrain.tasks.protocol import MEMBERS_OF_TASK, METHODS_OF_TASK, Task

GROUP = GROUPS["task"]
"""Entry points by which an installed package says that its modules have tasks."""


def load_task(
    spec: str,
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    beside: Path | None = None,
    within: Path | None = None,
    called: str | None = None,
) -> Task:
    """The task that `spec`, "module:object", makes of the job's [data] table.

    The object is a factory: a function or class that takes these options as keyword arguments.
    `defaults` are passed too, unless an option says otherwise or the factory does not take them.
    `beside` is the job file's folder: modules in it are found too, after installed ones. `within`
    is a folder that the module must come from, as the files of a bundle are in. Messages name the
    task as `called`, by default `spec`.

    Only what was written as a task is called: see `GROUP`. Raises TaskError for anything else, for
    a name that does not exist, for an option that the factory does not take,
    for a factory that fails, and for a result that is not a task.
    """
    called = called or spec
    module_name, name = spelling.split(spec, called)
    module = module_of("task", called, module_name, beside, within, TaskError)
    factory = attribute_of(module, name, TaskError)
    if not callable(factory) or not _has_signature(factory):
        raise TaskError(
            f"'{module.__name__}:{name}' is a {type(factory).__name__}, not a factory of tasks",
            "name a function or class that returns a task",
        )
    home = str(getattr(factory, "__module__", ""))
    check_origin("task", called, home, within or beside, TaskError)
    known, open_ended = _parameters(factory)
    given = {k: v for k, v in (defaults or {}).items() if open_ended or k in known} | dict(options)
    _check_options(called, factory, given)
    try:
        task = factory(**given)
    except EdgetrainError:
        raise
    except Exception as error:
        raise TaskError(f"task '{called}' failed: {quoted(error)}") from error
    _check_task(called, task)
    return task  # type: ignore[no-any-return]  # _check_task saw every attribute


def _has_signature(factory: Callable[..., Any]) -> bool:
    """Whether its arguments can be known: those of some functions written in C cannot."""
    try:
        inspect.signature(factory)
    except ValueError:
        return False
    return True


def _check_options(spec: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    known, open_ended = _parameters(factory)
    for option in options:
        if option not in known and not open_ended:
            raise TaskError(
                f"task '{spec}' has no option data.{option}", did_you_mean(option, known)
            )
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise TaskError(f"task '{spec}': {error}", "set it in the job's [data]") from None


def _parameters(factory: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a factory's keyword arguments, and whether it takes any others too."""
    parameters = inspect.signature(factory).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in by_name]
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _check_task(spec: str, task: object) -> None:
    missing = [name for name in MEMBERS_OF_TASK if not hasattr(task, name)]
    missing += [name for name in METHODS_OF_TASK if not callable(getattr(task, name, None))]
    if missing:
        raise TaskError(
            f"'{spec}' made a {type(task).__name__}, which is not a task: it lacks "
            + ", ".join(missing),
            "see edgetrain.tasks.Task",
        )
    better = task.better  # type: ignore[attr-defined]  # seen just above
    if better not in ("higher", "lower"):
        raise TaskError(f"'{spec}' has better = {better!r}", "'higher' or 'lower'")
