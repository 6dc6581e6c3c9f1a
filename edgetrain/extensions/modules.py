"""Modules of a user's own: where they may come from, imported once a job names one."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError, did_you_mean, quoted

GROUPS = {
    "task": "edgetrain.tasks",
    "strategy": "edgetrain.strategies",
    "merge rule": "edgetrain.merge_rules",
    "outer rule": "edgetrain.outer_rules",
    "codec": "edgetrain.codecs",
    "partition": "edgetrain.partitions",
    "sampling": "edgetrain.samplings",
    "schedule": "edgetrain.schedules",
    "network profile": "edgetrain.networks",
    "device profile": "edgetrain.devices",
    "tracker": "edgetrain.trackers",
}
"""Kinds, and the group of entry points by which an installed package says that it has some."""


def module_of(
    kind: str,
    spec: str,
    name: str,
    beside: Path | None,
    within: Path | None = None,
    error: type[EdgetrainError] = ConfigError,
) -> ModuleType:
    """The module `name` of what a job spells as `spec`: from the folder `within`, if there is one;
    or else from a module in `beside`, or a package whose entry points say that it has such things.
    `error` for anything else."""
    if within is None:
        check_origin(kind, spec, name, beside, error)
    module = _import(kind, name, within or beside, error)
    if within is not None:
        origin = Path(module.__file__ or "/").resolve()
        if within.resolve() not in origin.parents:
            raise error(
                f"module '{module.__name__}' of {kind} '{spec}' is hidden by {origin}",
                "give it a name that nothing else here has",
            )
    check_origin(kind, spec, name, within or beside, error)
    return module


def attribute_of(module: ModuleType, name: str, error: type[EdgetrainError] = ConfigError) -> Any:
    """The object of this name; `error` with the near miss."""
    found = getattr(module, name, None)
    if found is None:
        there = sorted({*vars(module), *getattr(module, "__all__", ())})
        public = [key for key in there if _may_be_meant(module, key, getattr(module, key, None))]
        raise error(f"module '{module.__name__}' has no '{name}'", did_you_mean(name, public))
    return found


def _may_be_meant(module: ModuleType, name: str, value: object) -> bool:
    """Functions and classes that the module offers: in its __all__, or without an underscore."""
    offered = getattr(module, "__all__", None)
    public = name in offered if offered is not None else not name.startswith("_")
    return public and callable(value)


def _import(kind: str, name: str, beside: Path | None, error: type[EdgetrainError]) -> ModuleType:
    own_module = name.startswith("edgetrain.")
    if beside is not None and not own_module and str(beside.resolve()) not in sys.path:
        sys.path.append(str(beside.resolve()))  # last: it must not shadow what is installed
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{name}.".startswith(f"{missing.name}."):
            where = f" (nor in {beside})" if beside is not None else ""
            raise error(
                f"no module '{missing.name}' for {kind} '{name}:…'{where}",
                "install it, or put the file beside the job",
            ) from None
        raise error(f"module '{name}' cannot be imported: {quoted(missing)}") from missing
    except Exception as fault:
        raise error(f"module '{name}' cannot be imported: {quoted(fault)}") from fault


@functools.cache
def _installed(path: tuple[str, ...]) -> frozenset[str]:
    """The names of modules of packages installed on `path`; half a second where there are many."""
    return frozenset({"edgetrain", *packages_distributions()})


def check_origin(
    kind: str, spec: str, name: str, beside: Path | None, error: type[EdgetrainError] = ConfigError
) -> None:
    """`error` for a module of Python itself, or of a package that does not say it has such."""
    top = name.partition(".")[0]
    if kind == "task" and f"{name}.".startswith("edgetrain.tasks."):
        return
    why = f"'{name}' is a module of Python" if top in sys.stdlib_module_names else ""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin and not why:
        path, folder = Path(origin).resolve(), (beside or Path("/")).resolve() / top
        if folder not in (*path.parents, path.with_suffix("")):
            groups = [GROUPS["task"]] if kind == "task" else [*GROUPS.values()]
            says = {e.module.partition(".")[0] for g in groups for e in entry_points(group=g)}
            if top not in says and top in _installed(tuple(sys.path)):
                why = f"the package '{top}' does not say that it has {kind}s"
    if why:
        group = GROUPS.get(kind, "edgetrain.strategies")
        raise error(
            f"{kind} '{spec}' is not called: {why}",
            "name a class or function of a module beside the job file, or of an installed package "
            f"with an entry point in the group '{group}'",
        )
