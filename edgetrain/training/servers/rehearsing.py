"""One step of a placement without numbers, in one process: can it be built, and does it run?

Torch's own process groups that send nothing stand for the other ranks, and fake tensors for memory,
so that a model of any size is cut, divided, sharded and taken through a step in seconds. The stages
of a pipeline run one after the other. `checking` compares what a step does to numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from edgetrain.errors import EdgetrainError, quoted
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_on_servers
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.meta import quiet, without_numbers
from edgetrain.tasks.profiling import inputs_of, loss_of
from edgetrain.tasks.protocol import Batch, Task
from edgetrain.training.servers.attempt import WAY_OUT
from edgetrain.training.servers.mesh import Ranks
from edgetrain.training.servers.model import Held
from edgetrain.training.servers.parts import Parts, cut
from edgetrain.training.servers.rank import (
    check_training,
    dropping_of,
    example_of,
    optimizer_of,
)
from edgetrain.training.servers.steps import batches_of

LONGEST = 160
"""Letters of an error that are quoted."""


def rehearsal(job: Job, beside: Path | None) -> Callable[[Placement], str]:
    """`problem_of` for the placements of one job; `beside` is the folder of its file."""
    task: list[Task] = []

    def problem(placement: Placement) -> str:
        if not task:
            task.append(task_on_servers(job, beside))
        return problem_of(job, task[0], placement)

    return problem


def problem_of(job: Job, task: Task, placement: Placement) -> str:
    """Why a job cannot be trained on a placement, in one line; "": nothing was found."""
    try:
        with quiet(), torch.random.fork_rng([]):
            _rehearse(job, task, placement)
    except EdgetrainError as error:
        return str(error)
    except Exception as error:  # whatever torch and a model's code raise
        said = quoted(error)[:LONGEST]
        return f"torch cannot build or step it on {placement} ({said}): {WAY_OUT}"
    return ""


def _rehearse(job: Job, task: Task, placement: Placement) -> None:
    check_training(job)
    parts = cut(task, placement, example_of(job, task, placement))
    dropping = dropping_of(job, parts)
    batch = next(batches_of(task, job, placement.data, 0))
    count = job.train.accumulate * placement.microbatches
    micro = tuple(tensor.tensor_split(count)[0] for tensor in batch)
    with _group(placement):
        ranks = Ranks.of(placement, torch.device("cpu"))
        every = _AllStages(**{**vars(ranks), "device": torch.device("meta")})
        held = Held(parts, every, job.servers.precision, "", dropping)
        held.ranks = ranks
        if parts.pipe is not None:
            for stage in every.stages:
                parts.pipe.build_stage(stage, ranks.device, ranks.mesh["pipeline"].get_group())
        with without_numbers() as mode:
            for module in held.modules:
                module.to_empty(device="cpu")
            batch = tuple(mode.from_tensor(each) for each in micro)
            try:
                _step(task, parts, held.modules, batch)
                optimizer_of(job, task, held).step()
            except Exception:
                if _needs_numbers(task, batch):
                    return  # nothing is known: the check before the first step has numbers
                raise


def _needs_numbers(task: Task, batch: Batch) -> bool:
    """Whether tensors without numbers cannot compute the model in one process, either."""
    try:
        task.loss(task.model(), batch).backward()  # type: ignore[no-untyped-call]
    except Exception:
        return True
    return False


@dataclass(frozen=True)
class _AllStages(Ranks):
    """A rank that holds the stages of all."""

    @property
    def stages(self) -> list[int]:
        return list(range(self.placement.all_stages))


@contextlib.contextmanager
def _group(placement: Placement) -> Iterator[None]:
    """A process group of a placement's size that has this process only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=placement.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step(task: Task, parts: Parts, modules: list[nn.Module], micro: Batch) -> None:
    if parts.how == "whole":
        loss = task.loss(modules[0], micro)
    else:
        args, kwargs = inputs_of(task, micro)
        loss = loss_of(task, _through(parts, modules, args, kwargs), micro)
    loss.backward()  # type: ignore[no-untyped-call]


def _through(
    parts: Parts, modules: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if parts.pipe is not None:
        found = parts.pipe(*args, **kwargs)
    else:
        found = args
        for module in modules:
            found = module(*found, **kwargs)
            found, kwargs = found if isinstance(found, tuple) else (found,), {}
    return found[0] if isinstance(found, tuple) and len(found) == 1 else found
