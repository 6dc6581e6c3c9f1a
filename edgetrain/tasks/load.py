"""From "module:object" in a job to a task. Imports what the job names, and knows no task itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from edgetrain.errors import EdgetrainError, TaskError, did_you_mean
from edgetrain.tasks import spelling
from edgetrain.tasks.protocol import MEMBERS_OF_TASK, METHODS_OF_TASK, Task

GROUP = "edgetrain.tasks"
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
    if within is None:
        _check_own(module_name, beside, called)
    module = _module(module_name, within or beside)
    if within is not None:
        _check_origin(module, within, called)
    factory = _factory(module, name)
    for each in (module_name, str(getattr(factory, "__module__", ""))):
        _check_own(each, within or beside, called)
    known, open_ended = _parameters(factory)
    given = {k: v for k, v in (defaults or {}).items() if open_ended or k in known} | dict(options)
    _check_options(called, factory, given)
    try:
        task = factory(**given)
    except EdgetrainError:
        raise
    except Exception as error:
        raise TaskError(f"task '{called}' failed: {_in_words(error)}") from error
    _check_task(called, task)
    return task  # type: ignore[no-any-return]  # _check_task saw every attribute


def _module(name: str, beside: Path | None) -> ModuleType:
    own = name.startswith("edgetrain.")
    if beside is not None and not own and str(beside.resolve()) not in sys.path:
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


@functools.cache
def _installed(path: tuple[str, ...]) -> frozenset[str]:
    """The names of modules of packages installed on `path`; half a second where there are many."""
    return frozenset({"edgetrain", *packages_distributions()})


def _check_own(name: str, beside: Path | None, called: str) -> None:
    """TaskError for a module of Python itself, or of a package that has no tasks."""
    top = name.partition(".")[0]
    if f"{name}.".startswith("edgetrain.tasks."):
        return
    why = f"'{name}' is a module of Python" if top in sys.stdlib_module_names else ""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin and not why:
        path, own = Path(origin).resolve(), (beside or Path("/")).resolve() / top
        if own not in (*path.parents, path.with_suffix("")):
            says = {entry.module.partition(".")[0] for entry in entry_points(group=GROUP)}
            if top not in says and top in _installed(tuple(sys.path)):
                why = f"the package '{top}' does not say that it has tasks"
    if why:
        raise TaskError(
            f"task '{called}' is not called: {why}",
            "name a class or function of a module beside the job file, or of an installed package "
            f"with an entry point in the group '{GROUP}'",
        )


def _check_origin(module: ModuleType, within: Path, called: str) -> None:
    """TaskError for a module from elsewhere, which another one of its name hides."""
    origin = Path(module.__file__ or "/").resolve()
    if within.resolve() not in origin.parents:
        raise TaskError(
            f"module '{module.__name__}' of task '{called}' is hidden by {origin}",
            "give it a name that nothing else here has",
        )


def _factory(module: ModuleType, name: str) -> Callable[..., Any]:
    factory = getattr(module, name, None)
    if factory is None:
        names = sorted({*vars(module), *getattr(module, "__all__", ())})
        public = [key for key in names if _may_be_meant(module, key, getattr(module, key, None))]
        raise TaskError(f"module '{module.__name__}' has no '{name}'", did_you_mean(name, public))
    if not callable(factory) or not _has_signature(factory):
        raise TaskError(
            f"'{module.__name__}:{name}' is a {type(factory).__name__}, not a factory of tasks",
            "name a function or class that returns a task",
        )
    return factory  # type: ignore[no-any-return]  # callable() narrows Any to no more


def _has_signature(factory: Callable[..., Any]) -> bool:
    """Whether its arguments can be known: those of some functions written in C cannot."""
    try:
        inspect.signature(factory)
    except ValueError:
        return False
    return True


def _may_be_meant(module: ModuleType, name: str, value: object) -> bool:
    """Functions and classes that the module offers: in its __all__, or without an underscore."""
    offered = getattr(module, "__all__", None)
    public = name in offered if offered is not None else not name.startswith("_")
    return public and callable(value)


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


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
