"""One rank of a group, from its placement to a loop of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import tuning_of
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.layerwise import LAYER_WISE
from edgetrain.tasks.profiling import inputs_of
from edgetrain.tasks.protocol import Task
from edgetrain.tasks.work import begin_at, optimizer_for, tune
from edgetrain.training.servers.dropping import Dropping
from edgetrain.training.servers.mesh import Ranks
from edgetrain.training.servers.model import Held
from edgetrain.training.servers.owned import OwnedOptimizer
from edgetrain.training.servers.parts import Example, Parts, cut
from edgetrain.training.servers.steps import GroupSteps, Schedule, batches_of


@dataclass(frozen=True)
class Rank:
    """A rank that is ready for its first step."""

    ranks: Ranks
    held: Held
    steps: GroupSteps


def check_training(job: Job) -> None:
    """ConfigError for what a member does between exchanges, and a group of ranks cannot."""
    train = job.train
    if train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate = {train.accumulate} in a group of ranks",
            "raise train.batch: a group of ranks takes it in micro-batches already",
        )
    if train.rate_for:
        raise ConfigError(
            f"train.rate_for = {train.rate_for} in a group of ranks: it counts the samples of "
            "members, which a group does not have",
            "leave it out, and write the learning rate for all data ranks' samples",
        )
    if str(train.optimizer.get("name", "")).lower() in LAYER_WISE:
        raise ConfigError(
            f"optimizer '{train.optimizer['name']}' in a group of ranks: each has a part of a "
            "tensor, not its length",
            "take adamw or sgd, or train as a fleet",
        )


def prepare_rank(
    job: Job, task: Task, placement: Placement, device: torch.device, start: int = 0
) -> Rank:
    """Cut the model, build this rank's part, fill it from the leader, make its optimizer. All ranks
    call it. The data begins after `start` steps. ConfigError, TaskError."""
    check_training(job)
    ranks = Ranks.of(placement, device)
    parts = cut(task, placement, example_of(job, task, placement))
    dropping = dropping_of(job, parts)
    held = Held(parts, ranks, job.servers.precision, job.servers.compile, dropping)
    held.hand_out(task, job.seed)
    optimizer = _optimizer(job, held)
    tuning = tuning_of(job)
    tune(optimizer, replace(tuning, clip=0.0))
    begin_at(optimizer, start)
    batches = batches_of(task, job, placement.data, ranks.data_rank, start)
    schedule = Schedule(task, held)
    return Rank(ranks, held, GroupSteps(schedule, held, optimizer, batches, tuning.clip, start))


def dropping_of(job: Job, parts: Parts) -> Dropping | None:
    """Which blocks are left out of steps; None: the job keeps all."""
    keep = job.servers.layer_keep
    if keep == 1.0:
        return None
    for what, has in (
        ("a model whose blocks are not modules", not parts.units),
        ("a pipeline that torch's tracer cuts", parts.how == "tracer"),
        ("servers.compile, which would compile every choice of blocks", bool(job.servers.compile)),
    ):
        if has:
            raise ConfigError(f"servers.layer_keep = {keep:g} with {what}", "leave one of both out")
    return Dropping(keep, job.train.steps, job.seed, list(parts.units))


def example_of(job: Job, task: Task, placement: Placement) -> Example | None:
    """What the model is called with for one micro-batch; None: no tracer needs it."""
    if placement.all_stages == 1:
        return None
    batch = next(batches_of(task, job, placement.data, 0))
    micro = tuple(tensor.tensor_split(placement.microbatches)[0] for tensor in batch)
    return inputs_of(task, micro)


def _optimizer(job: Job, held: Held) -> torch.optim.Optimizer:
    parameters = held.parameters()
    if not any(True for _ in parameters.parameters()):
        # A stage of activations and shapes only; its optimizer has nothing to do.
        parameters.append(torch.nn.Linear(1, 1))
    table = dict(job.train.optimizer)
    if held.ranks.placement.tensor > 1 or held.ranks.placement.experts > 1:
        table.setdefault("foreach", False)  # divided and whole tensors do not go in one call
    try:
        found = optimizer_for(parameters, table)
    except ConfigError:
        found = optimizer_for(parameters, job.train.optimizer)
    if held.ranks.owners is None:
        return found
    return OwnedOptimizer(found.param_groups[0]["params"], found, held.ranks.owners)
