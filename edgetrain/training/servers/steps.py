"""The steps of a group: the batches of a rank, its schedule, its part of the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.utils._pytree import tree_map

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.placement.words import SCHEDULES
from edgetrain.tasks.experts import set_share
from edgetrain.tasks.losses import length_of, no_loss, part_of, scalar_of
from edgetrain.tasks.profiling import inputs_of, loss_of
from edgetrain.tasks.protocol import Batch, Task, batches_from, counts_of, is_counted
from edgetrain.training.servers.model import Held, local_gradient
from edgetrain.training.servers.streams import Streams


def batches_of(task: Task, job: Job, data: int, rank: int, start: int = 0) -> Iterator[Batch]:
    """What one of `data` ranks has in each step: the batches of its share of the job's members, one
    after the other that a step adds up, joined.

    So a step of all ranks sees what a step of all members would.
    """
    share, each_step, members = job.fleet.members // data, job.train.accumulate, job.fleet.members
    own, first = (members, job.train.batch, job.seed), start * each_step
    found = [
        batches_from(task, member, *own, first, job.train.steps, each_step)
        for member in range(rank * share, (rank + 1) * share)
    ]
    while True:
        parts = [next(each) for _ in range(each_step) for each in found]
        yield tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


class Passes:
    """Forward and backward passes of one rank, micro-batch by micro-batch."""

    def __init__(self, task: Task, held: Held, streams: Streams, accumulate: int = 1) -> None:
        """What is computed draws from `streams`. A step adds up `accumulate` batches, each in the
        placement's micro-batches."""
        self.task, self._held, self._ranks = task, held, held.ranks
        self._streams = streams
        self._of_step = accumulate * held.ranks.placement.microbatches
        self._micro: list[Batch] = []
        self._divisors: list[float] = []
        """Divisor of each micro-batch's loss; infinite: nothing of it counts."""
        self._run = self._all_stages
        if held.ranks.placement.all_stages == 1:
            self._run = self._one_stage
            streams.apply_to_model(held.modules[0])
        self.divide()

    def divide(self, parts: int = 0) -> None:
        """Compute batches in this many micro-batches from now on, which may have another size than
        those before; 0: as a step's."""
        self._parts = parts or self._of_step
        for module in self._held.modules:
            set_share(module, 1 / self._parts)
        if self._held.ranks.placement.all_stages > 1:
            self._schedule = self._pipelined()

    def backward(self, batch: Batch) -> Tensor:
        """Fill the gradients with those of a batch [samples, …]; this rank's part of the mean loss,
        times the ranks that share the step's samples and positions: 0 where the last stage is
        elsewhere."""
        device = self._ranks.device
        batch = self._sliced(batch)
        split = [tensor.to(device).tensor_split(self._parts) for tensor in batch]
        self._micro = [tuple(part[i] for part in split) for i in range(self._parts)]
        self._divisors = self._counted()
        return self._run()

    def _counted(self) -> list[float]:
        """By what is counted over all micro-batches of all ranks; their number, if nothing is."""
        if not is_counted(self.task):
            return [float(self._parts)] * self._parts
        own = counts_of(self.task, self._micro)
        total = torch.tensor([own.sum()])
        dist.all_reduce(total)
        # Ranks of a pipeline, and those of a layer, count the same; torch's sharding takes the
        # mean over all others.
        mean = float(total) / self._ranks.placement.ranks
        return [mean / count if count else math.inf for count in own]

    def _sliced(self, batch: Batch) -> Batch:
        """This rank's positions, of every tensor [samples, positions, …] of a batch."""
        count = self._ranks.placement.sequence
        if count == 1:
            return batch
        length = length_of(batch)
        if length % count:
            raise ConfigError(f"placement: sequence={count} of {length} positions")
        self._held.tell_place(length // count)
        return part_of(batch, count, self._ranks.slice)

    def _one_stage(self) -> Tensor:
        (module,) = self._held.modules
        device = self._ranks.device
        total = torch.zeros((), device=device)
        outputs: list[Any] = []
        watch = module.register_forward_hook(lambda module, given, output: outputs.append(output))
        for place, (micro, divisor) in enumerate(zip(self._micro, self._divisors, strict=True)):
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(place == self._parts - 1)
            with self._streams.drawing_loss(place):
                loss = scalar_of(self.task, self.task.loss(module, micro), device) / divisor
            if math.isinf(divisor):
                loss = no_loss(outputs)
            outputs.clear()
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        watch.remove()
        return total

    def _pipelined(self) -> PipelineScheduleSingle | PipelineScheduleMulti:
        ranks, held = self._ranks, self._held
        group = ranks.mesh["pipeline"].get_group()
        count = ranks.placement.all_stages
        stages: list[Any] = []
        for stage, module in zip(ranks.stages, held.modules, strict=True):
            if held.parts.pipe is not None:
                built = held.parts.pipe.build_stage(stage, ranks.device, group)
                stages.append(_without_own(built))
            else:
                stages.append(_Stage(module, stage, count, ranks.device, group=group))
        for stage in stages:
            self._streams.apply_to_stage(stage)
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
            stages[0] if single else stages, self._parts, loss_fn=self._loss, scale_grads=False
        )
        return schedule

    def _loss(self, output: Any, place: Tensor) -> Tensor:
        micro = int(place)
        if math.isinf(self._divisors[micro]):
            return no_loss(output)
        with self._streams.drawing_loss(micro):
            loss = loss_of(self.task, output, self._micro[micro])
            return scalar_of(self.task, loss) / self._divisors[micro]

    def _inputs(self) -> Any:
        """What the model is called with for all micro-batches, each with the numbers that its loss
        draws on the last stage."""
        found: list[Any] = []
        for place, micro in enumerate(self._micro):
            with self._streams.drawing_loss(place):
                found.append(inputs_of(self.task, micro))

        def joined(first: Any, *others: Any) -> Any:
            return torch.cat([first, *others]) if isinstance(first, Tensor) else first

        return tree_map(joined, found[0], *found[1:])

    def _all_stages(self) -> Tensor:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if self._has_first:
            args, kwargs = self._inputs()
        losses: list[Tensor] = []
        target = torch.arange(self._parts) if self._has_last else None
        self._schedule.step(
            *args, target=target, losses=losses if self._has_last else None, **kwargs
        )
        if not losses:
            return torch.zeros((), device=self._ranks.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class _Stage(PipelineStage):
    """torch's first step runs each stage once on memory without values, to learn its shapes: that
    leaves buffers as they were."""

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        devices = [self.device] if self.device.type == "cuda" else []
        with own_buffers(module), torch.random.fork_rng(devices):
            return super()._compute_outputs(*args, module=module, **kwargs)


@contextmanager
def own_buffers(module: nn.Module) -> Iterator[None]:
    """Within it a module's buffers are copies: it has them back afterwards as they were."""
    tables = [each._buffers for each in module.modules()]
    kept = [dict(table) for table in tables]
    memo: dict[int, Any] = {}
    try:
        for table in tables:
            table.update(copy.deepcopy(dict(table), memo))
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.update(before)


def _without_own(stage: Any) -> Any:
    """A stage that torch's tracer made. Before its first step it greets its neighbours, and, in
    V-shaped schedules, its own rank, to which gloo has no connection."""
    greetings = stage._get_init_p2p_neighbors_ops

    def others() -> list[dist.P2POp]:
        return [each for each in greetings() if each.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = others
    return stage


def _of_compiler(error: BaseException | None) -> str:
    """Why torch could not compile, in its words; "": this error is of something else."""
    from torch._dynamo.exc import TorchDynamoException

    while error is not None:
        if isinstance(error, TorchDynamoException):
            return str(error).strip().splitlines()[0]
        error = error.__cause__ or error.__context__
    return ""


class GroupSteps:
    def __init__(
        self,
        schedule: Passes,
        held: Held,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Batch],
        streams: Streams,
        clip: float = 0.0,
        start: int = 0,
    ) -> None:
        """`clip` is the length that the gradient is cut to; 0: it is not. `start` steps are
        over."""
        self._next = start
        self.held, self.optimizer, self._clip = held, optimizer, clip
        self.schedule, self._batches, self._streams = schedule, batches, streams

    def go_to(self, step: int, batches: Iterator[Batch]) -> None:
        """Go on with these batches, after `step` steps of the job."""
        self._next, self._batches = step, batches

    def backward(self) -> Callable[[], float]:
        """Fill the gradients with those of the next batch. The loss is that of all ranks: they call
        what is returned together."""
        self.optimizer.zero_grad()
        self._streams.begin(self._next)
        if self.held.dropping is not None:
            self.held.dropping.begin(self._next)
        self._next += 1
        try:
            loss = self.schedule.backward(next(self._batches))
        except Exception as error:
            if self.held.compiler and (reason := _of_compiler(error)):
                raise ConfigError(
                    f"servers.compile = '{self.held.compiler}': {reason}",
                    "leave servers.compile out",
                ) from None
            raise
        self.held.add_tied_gradients()
        return partial(self._mean, loss)

    def try_batch(self, batch: Batch, parts: int) -> float:
        """Fill the gradients with those of a batch that is no step's, in this many micro-batches;
        the loss of all ranks."""
        self.schedule.divide(parts)
        try:
            loss = self.schedule.backward(batch)
        finally:
            self.schedule.divide()
        self.held.add_tied_gradients()
        return self._mean(loss)

    def _mean(self, loss: Tensor) -> float:
        total = loss.double().cpu().reshape(1)
        dist.all_reduce(total)
        return float(total) / self.held.ranks.placement.width

    def step(self) -> None:
        """Cut the gradient, if that is asked for, and step the optimizer. All ranks call it."""
        if self._clip:
            clip_gradients(self.held, self._clip)
        self.optimizer.step()


def clip_gradients(held: Held, most: float) -> float:
    """Cut the gradient of the whole model to the length `most`; the length that it had.

    As `torch.nn.utils.clip_grad_norm_` in one process, in one sum over all ranks: every part counts
    once, however many ranks have a copy of it. All ranks call it.
    """
    total = torch.zeros((), dtype=torch.float64)
    for stage, own in zip(held.ranks.stages, held.own, strict=True):
        for name, parameter in own.items():
            if parameter.grad is not None and held.parts.holders[name][0] == stage:
                part = local_gradient(parameter)
                length = torch.linalg.vector_norm(part, dtype=torch.promote_types(
                    part.dtype, torch.float32
                ))  # fmt: skip
                total += length.double().cpu().square() / held.copies(parameter)
    dist.all_reduce(total)
    length = float(total.sqrt())
    if length + 1e-6 > most:
        for own in held.own:
            for parameter in own.values():
                if parameter.grad is not None:
                    local_gradient(parameter).mul_(most / (length + 1e-6))
    return length
