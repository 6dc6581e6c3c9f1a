"""Personal layers: tensors of a model that each member trains and keeps, and that are never sent.

A model carries their names with it, so that whatever makes a flat vector of it, or a copy, leaves
the same ones out.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from edgetrain.errors import ConfigError
from edgetrain.tasks import weights
from edgetrain.tasks.fixed import PERSONAL, personal_of, plain
from edgetrain.tasks.flat import trained_of
from edgetrain.tasks.protocol import Task

FOLDER = "personal"
"""Beside a run's metrics: a file for each member, named after it."""


def make_personal(model: torch.nn.Module, patterns: str | Sequence[str]) -> None:
    """Let the parameters and buffers whose names match be personal, and no others; a tied one by
    any of its names. `patterns` are shell's ("head.*"), in a text with commas between them.
    ConfigError for one that matches nothing, and for all that is trained."""
    listed = patterns.split(",") if isinstance(patterns, str) else patterns
    wanted = [each.strip() for each in listed if each.strip()]
    named = [
        (plain(name), tensor)
        for found in (model.named_parameters, model.named_buffers)
        for name, tensor in found(remove_duplicate=False)
    ]
    chosen = set()
    for pattern in wanted:
        found = {id(tensor) for name, tensor in named if fnmatchcase(name, pattern)}
        if not found:
            near = get_close_matches(pattern, [name for name, _ in named], n=3, cutoff=0)
            raise ConfigError(
                f"personal = '{pattern}': no parameter or buffer of the model has such a name",
                f"the nearest are {', '.join(near)}",
            )
        chosen |= found
    own = [*model.named_parameters(), *model.named_buffers()]
    setattr(model, PERSONAL, frozenset(name for name, tensor in own if id(tensor) in chosen))
    if wanted and not trained_of(model):
        names = [name for name, _ in named][:3]
        raise ConfigError(
            f"personal = '{', '.join(wanted)}' takes all that is trained: members would exchange "
            "nothing",
            f"leave some out; the model has {', '.join(names)}, …",
        )


def save_personal(model: torch.nn.Module, folder: Path, member: str) -> None:
    """Write a member's personal tensors into the run's folder, if it has any: as
    `personal/MEMBER.safetensors`. ConfigError if the disk refuses."""
    if names := personal_of(model):
        weights.save(model, folder / FOLDER / f"{member}.safetensors", names)


class Prepared:
    """A task whose models begin from a file (`start`), or have personal layers. All else is the
    task's own."""

    def __init__(self, task: Task, start: Path | None, personal: str) -> None:
        self._task, self._start, self._personal = task, start, personal

    def model(self) -> torch.nn.Module:
        """See Task. ConfigError as `weights.load` and `make_personal`."""
        model = self._task.model()
        if self._start is not None and next(model.parameters()).device.type != "meta":
            weights.load(model, self._start)
        if self._personal:
            make_personal(model, self._personal)
        return model

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._task, name)
