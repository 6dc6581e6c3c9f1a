"""The steps of a group: the batches of a rank, its schedule, its part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.placement.words import SCHEDULES
from edgetrain.tasks.experts import set_share
from edgetrain.tasks.profiling import inputs_of, loss_of
from edgetrain.tasks.protocol import Batch, Task, batches_from
from edgetrain.training.servers.clipping import clip_gradients
from edgetrain.training.servers.model import Held


def batches_of(task: Task, job: Job, data: int, rank: int, start: int = 0) -> Iterator[Batch]:
    """The batches of one of `data` ranks: those of its share of the job's members, joined in order.

    So a step of all ranks sees what a step of all members would.
    """
    share = job.fleet.members // data
    members = [
        batches_from(task, member, job.fleet.members, job.train.batch, job.seed, start)
        for member in range(rank * share, (rank + 1) * share)
    ]
    while True:
        parts = [next(each) for each in members]
        yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


class Schedule:
    """Forward and backward passes of one rank, micro-batch by micro-batch."""

    def __init__(self, task: Task, held: Held) -> None:
        self._task, self._held, self._ranks = task, held, held.ranks
        self._parts = held.ranks.placement.microbatches
        self._micro: list[Batch] = []
        self._run = self._one_stage
        if held.ranks.placement.all_stages > 1:
            self._schedule = self._pipelined()
            self._run = self._all_stages

    def backward(self, batch: Batch) -> Tensor:
        """Fill the gradients with those of a batch [samples, …]; the sum of the losses of this
        rank's micro-batches, divided by their number: 0 where the last stage is elsewhere."""
        device = self._ranks.device
        batch = self._sliced(batch)
        split = [tensor.to(device).tensor_split(self._parts) for tensor in batch]
        self._micro = [tuple(part[i] for part in split) for i in range(self._parts)]
        return self._run(tuple(tensor.to(device) for tensor in batch))

    def _sliced(self, batch: Batch) -> Batch:
        """This rank's positions, of every tensor [samples, positions, …] of a batch."""
        count = self._ranks.placement.sequence
        if count == 1:
            return batch
        length = next(tensor.shape[1] for tensor in batch if tensor.dim() > 1)
        if length % count:
            raise ConfigError(f"placement: sequence={count} of {length} positions")
        size = length // count
        self._held.tell_place(size)
        first = self._ranks.slice * size
        return tuple(
            tensor.narrow(1, first, size) if tensor.dim() > 1 and tensor.shape[1] == length
            else tensor for tensor in batch
        )  # fmt: skip

    def _one_stage(self, batch: Batch) -> Tensor:
        (module,) = self._held.modules
        assert isinstance(module, FSDPModule)
        total = torch.zeros((), device=self._ranks.device)
        set_share(module, 1 / self._parts)
        for place, micro in enumerate(self._micro):
            module.set_requires_gradient_sync(place == self._parts - 1)
            loss = self._task.loss(module, micro) / self._parts
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def _pipelined(self) -> PipelineScheduleSingle | PipelineScheduleMulti:
        ranks, held = self._ranks, self._held
        group = ranks.mesh["pipeline"].get_group()
        count = ranks.placement.all_stages
        stages: list[Any] = []
        for stage, module in zip(ranks.stages, held.modules, strict=True):
            if held.parts.pipe is not None:
                stages.append(held.parts.pipe.build_stage(stage, ranks.device, group))
            else:
                stages.append(PipelineStage(module, stage, count, ranks.device, group=group))
        self._has_first = 0 in ranks.stages
        self._has_last = count - 1 in ranks.stages
        name = ranks.placement.schedule
        if name == "1f1b" and self._parts < count:
            name = (
                "gpipe"  # torch's 1F1B wants a micro-batch for each stage; with fewer it is GPipe
            )
        kind: Any = get_schedule_class(SCHEDULES[name])
        single = issubclass(kind, PipelineScheduleSingle)
        schedule: PipelineScheduleSingle | PipelineScheduleMulti = kind(
            stages[0] if single else stages, self._parts, loss_fn=self._loss
        )
        return schedule

    def _loss(self, output: Any, place: Tensor) -> Tensor:
        return loss_of(self._task, output, self._micro[int(place)])

    def _all_stages(self, batch: Batch) -> Tensor:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if self._has_first:
            args, kwargs = inputs_of(self._task, batch)
        losses: list[Tensor] = []
        target = torch.arange(self._parts) if self._has_last else None
        self._schedule.step(
            *args, target=target, losses=losses if self._has_last else None, **kwargs
        )
        if not losses:
            return torch.zeros((), device=self._ranks.device)
        return torch.stack([loss.detach() for loss in losses]).mean()


def _of_compiler(error: BaseException | None) -> str:
    """Why torch could not compile, in its words; "": this error is of something else."""
    from torch._dynamo.exc import TorchDynamoException

    while error is not None:
        if isinstance(error, TorchDynamoException):
            return str(error).strip().splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


class GroupSteps:
    """What a rank does in a step: gradients, tied sums, the optimizer."""

    def __init__(
        self,
        schedule: Schedule,
        held: Held,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Batch],
        clip: float = 0.0,
        start: int = 0,
    ) -> None:
        """`clip` is the length that the gradient is cut to; 0: it is not. `start` steps are
        over."""
        self._next = start
        self.held, self.optimizer, self._clip = held, optimizer, clip
        self._schedule, self._batches = schedule, batches

    def backward(self) -> Callable[[], float]:
        """Fill the gradients with those of the next batch. The loss is that of all ranks: they call
        what is returned together."""
        self.optimizer.zero_grad()
        if self.held.dropping is not None:
            self.held.dropping.begin(self._next)
        self._next += 1
        try:
            loss = self._schedule.backward(next(self._batches))
        except Exception as error:
            if self.held.compiler and (reason := _of_compiler(error)):
                raise ConfigError(
                    f"servers.compile = '{self.held.compiler}': {reason}",
                    "leave servers.compile out",
                ) from None
            raise
        self.held.add_tied_gradients()

        def mean() -> float:
            total = loss.double().cpu().reshape(1)
            dist.all_reduce(total)
            placement = self.held.ranks.placement
            return float(total) / placement.width

        return mean

    def step(self) -> None:
        """Cut the gradient, if that is asked for, and step the optimizer. All ranks call it."""
        if self._clip:
            clip_gradients(self.held, self._clip)
        self.optimizer.step()
