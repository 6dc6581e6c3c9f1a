"""Snapshots of a group that load on any other placement: torch's DCP, by the names of the model.

    RUN/snapshots/step-000120/     a whole one: written as a draft, then renamed
    RUN/snapshots/.step-000120     a draft, of an attempt that ended

Values are named after parameters: "model.NAME", "optimizer.NAME.KEY". A parameter that several
stages hold is written once, and read by all of them.

A snapshot is on the leader's disk. Ranks that do not see it write to their own, and their parts are
brought to the leader's; before one is loaded they are given the whole of it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from edgetrain.errors import ConfigError
from edgetrain.training.servers.disks import Disks
from edgetrain.training.servers.rank import Rank

FOLDER = "snapshots"
_NAME = re.compile(r"step-(\d{6,})\Z")
_KEPT = 2


def latest(folder: Path) -> tuple[int, Path] | None:
    """The newest whole snapshot of a run, and its step; None: there is none."""
    found = [
        (int(match[1]), path)
        for path in (folder / FOLDER).glob("step-*")
        if (match := _NAME.match(path.name)) and (path / ".metadata").exists()
    ]
    return max(found, default=None)


class Snapshots:
    """The snapshots of a run, kept by all of its ranks together."""

    def __init__(self, rank: Rank, folder: Path, every: int) -> None:
        """In the run's `folder`, `every` so many steps; 0: never. All ranks call it."""
        self._rank, self._folder, self._every = rank, folder, every
        self._disks = Disks(folder)

    def keep_if_due(self, step: int) -> None:
        """Write a snapshot after this step, if it is due. All ranks call it.

        ConfigError if the disk refuses it.
        """
        if self._every and step % self._every == 0:
            self.keep(step)

    def keep(self, step: int) -> None:
        """Write a snapshot. All ranks call it."""
        name = f"step-{step:06}"
        draft, path = self._folder / FOLDER / f".{name}", self._folder / FOLDER / name
        try:
            if self._rank.ranks.rank == 0 or not self._disks.sees:
                shutil.rmtree(draft, ignore_errors=True)
                draft.parent.mkdir(exist_ok=True)
            dist.barrier()
            save(_values(self._rank), checkpoint_id=draft)
            self._disks.collect(draft, "__{rank}_*")
        except (OSError, CheckpointException) as error:
            raise ConfigError(
                f"cannot write a snapshot to {path.parent}: {_first_cause(error)}",
                "free some space on that disk",
            ) from None
        if self._rank.ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            draft.rename(path)
            for old in sorted(self._folder.glob(f"{FOLDER}/step-*"))[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()
        if not self._disks.sees:
            shutil.rmtree(draft, ignore_errors=True)

    def load(self, step: int) -> None:
        """Go on from the leader's snapshot of this step, of any placement. All ranks call it.
        ConfigError for a snapshot of another model, or one that is damaged."""
        kept = path = self._folder / FOLDER / f"step-{step:06}"
        if not self._disks.are_one:
            own = self._folder / FOLDER / f".of-the-leader-{self._rank.ranks.rank}"
            self._disks.spread(kept, own)
            path = kept if self._disks.sees else own
        try:
            known = FileSystemReader(path).read_metadata().state_dict_metadata
            values = _values(self._rank, list(known))
            load(values, checkpoint_id=path)
            _mirror(self._rank)
        except (Exception, CheckpointException) as error:
            raise ConfigError(
                f"cannot go on from the snapshot {path}: {_first_cause(error)}",
                "remove it: the one before it is taken",
            ) from None
        finally:
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of DCP: what each rank met
    if failures:
        inner = next(iter(failures.values()))
        return str(inner[0] if isinstance(inner, tuple) else inner).strip().splitlines()[0]
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _values(rank: Rank, keys: list[str] | None = None) -> dict[str, Any]:
    """What this rank has of a snapshot, sharing memory with model and optimizer.

    To write: without copies that an earlier stage writes. To read (`keys` of the snapshot): the
    first copy of each, with the optimizer's values that are there.
    """
    optimizer = rank.steps.optimizer
    found: dict[str, Any] = {}
    for name, (parameter, *_) in _copies(rank, written=keys is None).items():
        found[f"model.{name}"] = parameter.data
        state = optimizer.state[parameter]
        if keys is not None:
            _make_room(parameter, state, [_key(k, name) for k in keys if _key(k, name)])
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found


def _copies(rank: Rank, written: bool = False) -> dict[str, list[nn.Parameter]]:
    """This rank's copies of each parameter: a tied one may be on two of its stages. `written`: only
    those that this rank writes."""
    found: dict[str, list[nn.Parameter]] = {}
    for stage, own in zip(rank.ranks.stages, rank.held.own, strict=True):
        for name, parameter in own.items():
            if not written or rank.held.parts.holders[name][0] == stage:
                found.setdefault(name, []).append(parameter)
    return found


def _mirror(rank: Rank) -> None:
    """Give the other copies of a tied parameter on this rank what the first one was given."""
    optimizer = rank.steps.optimizer
    with torch.no_grad():
        for first, *others in _copies(rank).values():
            for other in others:
                other.copy_(first)
                for key, value in optimizer.state[first].items():
                    copied = value.clone() if isinstance(value, Tensor) else value
                    optimizer.state[other][key] = copied


def _key(key: str, name: str) -> str:
    """The optimizer's key in the name of a value, "" if it is another's."""
    prefix = f"optimizer.{name}."
    rest = key.removeprefix(prefix)
    return rest if key.startswith(prefix) and "." not in rest else ""


def _make_room(parameter: nn.Parameter, state: Any, keys: list[str]) -> None:
    for key in keys:
        if key not in state:
            # torch's optimizers count steps in a float32 scalar; all else is as the parameter.
            counts = key == "step"
            state[key] = (
                torch.zeros((), dtype=torch.float32) if counts else torch.zeros_like(parameter.data)
            )
