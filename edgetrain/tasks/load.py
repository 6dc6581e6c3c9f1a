"""From "module:object" in a job to a task. Imports what the job names, and knows no task itself."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from edgetrain.errors import EdgetrainError, TaskError, did_you_mean
from edgetrain.tasks.protocol import MEMBERS_OF_TASK, METHODS_OF_TASK, Task


def load_task(spec: str, options: Mapping[str, Any], beside: Path | None = None) -> Task:
    """The task that `spec`, "module:object", makes of the job's [data] table.

    The object is a factory: a function or class that takes exactly such keyword arguments. `beside`
    is the job file's folder: modules in it are found too, after installed ones. Raises TaskError
    for a name that does not exist, for an option that the factory does not take, for a factory
    that fails, and for a result that is not a task.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise TaskError(f"task '{spec}' is not module:object", "for example edgetrain.tasks:digits")
    factory = _factory(_module(module_name, beside), name)
    _check_options(spec, factory, options)
    try:
        task = factory(**options)
    except EdgetrainError:
        raise
    except Exception as error:
        raise TaskError(f"task '{spec}' failed: {_in_words(error)}") from error
    _check_task(spec, task)
    return task  # type: ignore[no-any-return]  # _check_task saw every attribute


def _module(name: str, beside: Path | None) -> ModuleType:
    if beside is not None and str(beside.resolve()) not in sys.path:
        sys.path.append(str(beside.resolve()))  # last: it must not shadow what is installed
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            where = f" (nor in {beside})" if beside is not None else ""
            raise TaskError(
                f"no module '{error.name}' for task '{name}:…'{where}",
                "install it, or put the file beside the job",
            ) from None
        raise TaskError(f"module '{name}' cannot be imported: {_in_words(error)}") from error
    except Exception as error:
        raise TaskError(f"module '{name}' cannot be imported: {_in_words(error)}") from error


def _factory(module: ModuleType, name: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if factory is None:
        public = [key for key, value in vars(module).items() if _may_be_meant(module, key, value)]
        raise TaskError(f"module '{module.__name__}' has no '{name}'", did_you_mean(name, public))
    if not callable(factory):
        raise TaskError(
            f"'{module.__name__}:{name}' is a {type(factory).__name__}, not a factory of tasks",
            "name a function or class that returns a task",
        )
    return factory  # type: ignore[no-any-return]  # callable() narrows Any to no more


def _may_be_meant(module: ModuleType, name: str, value: object) -> bool:
    """Functions and classes that the module offers: in its __all__, or without an underscore."""
    offered = getattr(module, "__all__", None)
    public = name in offered if offered is not None else not name.startswith("_")
    return public and callable(value)


def _check_options(spec: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin without one: the call itself will tell
        return
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    known = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
    for option in options:
        if option not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise TaskError(
                f"task '{spec}' has no option data.{option}", did_you_mean(option, known)
            )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise TaskError(f"task '{spec}': {error}", "set it in the job's [data]") from None


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


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
