"""A member's checkpoint: what of the process it holds, and how another process goes on from it.

The file and its folder are `exchange/member/checkpoint.py`; here is what its values mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.member.checkpoint import MEMBER, Folder, Keep, Keeper, Saved
from edgetrain.exchange.member.driver import Driver, Stepper
from edgetrain.exchange.seam import Entry, Past, Request
from edgetrain.jobs.on_member import refuse_checkpoint
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.member.state import Stateful, TrainingState, pack, unpack
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import checksum

log = logging.getLogger("edgetrain")


class Keeping:
    """One member's checkpoint: when it is written, and what of the process is in it."""

    def __init__(self, keeper: Keeper, state: TrainingState) -> None:
        self.keeper = keeper
        self._state = state
        self.joins_anew = False
        """Whether it goes on as a newcomer, from the hub's base, with what is its own alone: its
        optimizer's state, personal layers, its place in the data. So does a member that has a part
        in some rounds only. What a lossy codec had left out of its contributions is dropped: it may
        be in one that the checkpoint does not know of."""

    # -- going on ------------------------------------------------------------------------------

    def find(self, request: Request) -> Saved | None:
        """The newest checkpoint; None: there is none. ConfigError where it is of another job, model
        or optimizer than this member's."""
        folder, optimizer = self.keeper.folder, self._state.optimizer
        saved = folder.load()
        for note in folder.notes:
            log.warning("%s; the one before it is taken", note)
        if saved is None:
            return None
        models = request.model, layouts.digest(layouts.doubled(request.layout))
        same_model = any(layouts.tensors_agree(model, saved.model) for model in models)
        same_model = same_model and layouts.fixed_agree(request.model, saved.model)
        mine = [
            ("model", request.model, saved.model, same_model),
            ("job", request.job, saved.job, request.job == saved.job),
            ("optimizer", optimizer, saved.optimizer, optimizer == saved.optimizer),
        ]
        for what, here, there, is_same in mine:
            if not is_same:
                raise ConfigError(
                    f"the checkpoint in {folder.path} is of the {what} {there[:12] or 'none'}, "
                    f"this member has {here[:12] or 'none'}",
                    "keep the checkpoints of each job in a folder of their own",
                )
        return saved

    def set_aside(self) -> str:
        """Rename the checkpoints, so that they are not found again; their new names."""
        return ", ".join(path.name for path in self.keeper.folder.set_aside())

    def restore(self, saved: Saved, driver: Driver) -> None:
        """Go on where this member was, with a driver that has joined again and has not begun.

        Where the checkpoint holds the parameters, all replies since are on their way, and the same
        steps are taken again. Otherwise the parameters are the hub's base, and what was not sent of
        this member's own steps is added. Raises ConfigError, BadMessage, Diverged.
        """
        if saved.agreed != agreed_of(driver.entry):
            raise ConfigError(
                f"the checkpoint is of {saved.agreed}, the hub runs {agreed_of(driver.entry)}"
            )
        flat, tree = driver.flat, tree_of(saved, driver.flat.elements)
        driver.steps = saved.steps
        if self.joins_anew:
            driver.begin()
        else:
            _take_its_place(saved, driver, tree)
        statistics = flat.params[flat.trained :].copy()
        self._state.put_back(tree["state"])  # buffers, too, of which the fleet has newer ones
        flat.params[flat.trained :] = statistics
        self.keeper.wait()
        flat.push_params()
        mine = self._state.rounded()
        for name, value in tree.get("rounded", {}).items():
            mine[name].copy_(value)
        log.info("%s resumed after %d steps of its own", driver.entry.name, driver.steps)

    # -- writing -------------------------------------------------------------------------------

    def save(self, driver: Driver, request: Request) -> None:
        self.keeper.save(lambda: self._saved(driver, request))

    def _saved(self, driver: Driver, request: Request) -> Saved:
        """All that only this member knows."""
        half, entry = driver.half, driver.entry
        tree: dict[str, Any] = {
            "state": self._state.collect(), "unsent": driver.exchange.unsent(),
        }  # fmt: skip
        base_checksum = half.checksum
        if not driver.strategy.hub_keeps_base:
            tree |= {"params": driver.flat.params, "rounded": self._state.rounded()}
            base_checksum = checksum(driver.flat.params)
        elif (rest := half.rest()) is not None:
            tree |= {"rest": rest, "local_steps": half.steps_taken}
        if learned := half.learned():
            tree["learned"] = learned
        values, buffers = pack(tree)
        return Saved(
            model=request.model,
            job=request.job,
            name=entry.name,
            session=driver.exchange.session,
            agreed=agreed_of(entry),
            optimizer=self._state.optimizer,
            steps=driver.steps,
            round=half.round,
            applied=half.applied,
            checksum=base_checksum,
            values=values,
            buffers=tuple(buffers),
        )

    def clear(self) -> None:
        """Training is over: delete the checkpoints, so that no process goes on from them."""
        self.keeper.folder.clear()

    def close(self) -> None:
        """Let go of the folder. Works twice."""
        self.keeper.folder.close()


def keeping_of(
    keep: Keep,
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    clock: Callable[[], float] = time.monotonic,
    others: Mapping[str, Stateful] | None = None,
) -> Keeping:
    """The checkpoint of the member `name` in its folder; raises ConfigError, as Folder."""
    state = TrainingState(model, optimizer, others)
    return Keeping(Keeper(Folder(keep.folder, name or MEMBER), keep.sparing, clock), state)


def of_job(
    found: Resolved, folder: Path, name: str, model: torch.nn.Module, optimizer: Stepper
) -> Keeping:
    """As `keeping_of`, of the member `name` of a job. ConfigError where the job allows none."""
    job = found.job
    refuse_checkpoint(job.privacy.unit)
    if job.cohort is not None:
        from edgetrain.jobs.cohorts import refuse_kept_variates  # of a job that has one

        refuse_kept_variates(found)
    assert isinstance(optimizer, torch.optim.Optimizer)
    keeping = keeping_of(Keep(folder, job.checkpoint.sparing()), name, model, optimizer)
    keeping.joins_anew = job.cohort is not None
    return keeping


def _take_its_place(saved: Saved, driver: Driver, tree: Mapping[str, Any]) -> None:
    """Go on in the round that the member was in, with what it had not sent."""
    half = driver.half
    unsent = {name: tensor.numpy() for name, tensor in tree["unsent"].items()}
    half.restore_learned({name: tensor.numpy() for name, tensor in tree["learned"].items()})
    if "params" in tree:
        driver.flat.params[:] = tree["params"].numpy()
        half.start(saved.applied, saved.round)
        driver.exchange.restore_unsent(unsent)
        return
    driver.begin()
    rounds_since, local_steps = driver.entry.resend - saved.round, tree["local_steps"]
    if not rounds_since:  # otherwise it was contributed since, and must not count twice
        driver.exchange.restore_unsent(unsent)
        if "rest" in tree:
            driver.restore_rest(tree["rest"].numpy(), local_steps)
    else:
        driver.steps += rounds_since * half.local_steps - local_steps


def past_of(saved: Saved, elements: int) -> Past:
    """A member's position, for its exchange. Raises BadMessage."""
    has_base = "params" in tree_of(saved, elements)
    return Past(saved.session, saved.name, saved.round, saved.applied, saved.checksum, has_base)


def tree_of(saved: Saved, elements: int) -> dict[str, Any]:
    """The values of a checkpoint of [elements]. BadMessage for impossible ones."""
    tree = unpack(saved.values, saved.buffers)
    if not isinstance(tree, dict):
        raise BadMessage("the checkpoint holds no table")
    vectors = {name: tree[name] for name in ("params", "rest") if name in tree}
    for name, vector in vectors.items():
        if not _is_vector(vector) or vector.numel() != elements:
            raise BadMessage(f"the checkpoint's {name} are not {elements} float32")
    local_steps = tree.setdefault("local_steps", 0)
    if type(local_steps) is not int or not 0 <= local_steps <= saved.steps:
        raise BadMessage(f"the checkpoint's local_steps are no {local_steps!r}")
    unsent = tree.get("unsent")
    if not isinstance(unsent, dict) or not all(map(_is_vector, unsent.values())):
        raise BadMessage("the checkpoint's unsent rest is no table of float32")
    learned = tree.setdefault("learned", {})
    if not isinstance(learned, dict) or not all(
        isinstance(value, torch.Tensor) for value in learned.values()
    ):
        raise BadMessage("what the checkpoint's strategy has learned is no table of tensors")
    return tree


def agreed_of(entry: Entry) -> str:
    """What the hub and a checkpoint must have in common: strategy, every, and codec."""
    return f"{entry.strategy}, every {entry.local_steps}, {entry.codec}"


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32
