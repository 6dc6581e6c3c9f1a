"""One rank of a group, from its placement to a loop of steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import tuning_of
from edgetrain.jobs.optimizers import ELEMENTWISE
from edgetrain.jobs.placement.bars import bars_of, refuse
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.profiling import inputs_of
from edgetrain.tasks.protocol import Task
from edgetrain.tasks.work import begin_at, optimizer_for, tune
from edgetrain.training.servers.dropping import Dropping
from edgetrain.training.servers.mesh import Ranks
from edgetrain.training.servers.model import Held
from edgetrain.training.servers.owned import OwnedOptimizer
from edgetrain.training.servers.parts import Example, Parts, cut
from edgetrain.training.servers.steps import GroupSteps, Passes, batches_of
from edgetrain.training.servers.streams import Streams


@dataclass(frozen=True)
class Rank:
    """A rank that is ready for its first step."""

    ranks: Ranks
    held: Held
    steps: GroupSteps


def check_training(job: Job) -> None:
    """ConfigError for what a member does between exchanges, and a group of ranks cannot; and for a
    torch whose sharding leaves no parameter out (2.6)."""
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ConfigError(
            f"torch {torch.__version__} does not do for a group of ranks",
            "torch 2.11 or newer, with which groups were tried; or train without a group",
        )
    train = job.train
    if train.lr_reference_batch:
        raise ConfigError(
            f"train.lr_reference_batch = {train.lr_reference_batch} in a group of ranks: it counts "
            "the samples of members, which a group does not have",
            "leave it out, and write the learning rate for all data ranks' samples",
        )


def prepare_rank(
    job: Job,
    task: Task,
    placement: Placement,
    device: torch.device,
    start: int = 0,
    statistics: bool = False,
    member: int = 0,
) -> Rank:
    """Cut the model, build this rank's part, fill it from the leader, make its optimizer. All ranks
    call it. The data begins after `start` steps. With `statistics` running ones are in the leader's
    flat vector. A group that is a `member` draws other numbers than other members. ConfigError,
    TaskError."""
    check_training(job)
    if dist.get_rank() == 0:
        # The planner has looked, unless torchrun starts the ranks. One of them is enough.
        refuse(placement, bars_of(job, task))
    ranks = Ranks.of(placement, device)
    parts = cut(task, placement, example_of(job, task, placement))
    dropping = dropping_of(job, parts)
    held = Held(parts, ranks, job.servers.precision, job.servers.compile, dropping)
    held.hand_out(task, job.seed, job.train.frozen, statistics)
    optimizer = optimizer_of(job, task, held)
    tuning = tuning_of(job)
    tune(optimizer, replace(tuning, clip=0.0))
    begin_at(optimizer, start)
    batches = batches_of(task, job, placement.data, ranks.data_rank, start)
    streams = Streams(job.seed, ranks, member)
    schedule = Passes(task, held, streams, job.train.accumulate)
    steps = GroupSteps(schedule, held, optimizer, batches, streams, tuning.clip, start)
    return Rank(ranks, held, steps)


def dropping_of(job: Job, parts: Parts) -> Dropping | None:
    """Blocks left out of steps; None: the job keeps all."""
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
    """Arguments of the model's call for one micro-batch; None: no tracer needs them."""
    if placement.all_stages == 1:
        return None
    batch = next(batches_of(task, job, placement.data, 0))
    parts = job.train.accumulate * placement.microbatches
    micro = tuple(tensor.tensor_split(parts)[0] for tensor in batch)
    return inputs_of(task, micro)


def optimizer_of(job: Job, task: Task, held: Held) -> torch.optim.Optimizer:
    named: list[tuple[str, Tensor]] = [
        (name, p) for own in held.own for name, p in own.items() if p.requires_grad
    ]
    if not named:
        # A stage of activations, or of frozen layers; its optimizer has nothing to do.
        named.append(("", torch.nn.Parameter(torch.zeros(1))))
    table = dict(job.train.optimizer)
    has_scalars = any(not p.dim() for _, p in named)
    if held.ranks.placement.tensor > 1 or held.ranks.placement.experts > 1 or has_scalars:
        table.setdefault("foreach", False)  # divided and whole tensors do not go in one call
    try:
        found = optimizer_for(named, table, task)
    except ConfigError:
        found = optimizer_for(named, job.train.optimizer, task)
    owners = held.ranks.owners
    if owners is None and str(table["name"]).lower() not in ELEMENTWISE:
        # Whole tensors, and not torch's divided ones: this rank owns all that it has.
        owners = held.ranks.mesh["shard"].get_group()
    return found if owners is None else OwnedOptimizer(found, owners)
