"""A group of ranks that is one member of a fleet.

The leader, rank 0, runs what every member runs (`training/member/train.py`) over a `Flat` whose
pulls and pushes, an optimizer whose steps, and local work whose gradients are done by all ranks
together: the leader broadcasts which (an `Op`), and does its part; the others wait for the next
one. Between two ops a rank other than the leader does nothing, so the leader alone knows the hub.

    the leader                        the others
    lead(op): broadcast op, value     follow(): receive op, value
    its part                          their part
    lead(END)                         end

How the leader starts the others, and what happens when a rank dies, is in `leading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from edgetrain.exchange.seam import FixedTensors
from edgetrain.fleet.devices import SERVERS
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import buffers_of, task_on_servers
from edgetrain.jobs.placement.beside import group_job, parts_of, standing_in
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.resolved import Resolved, look_up
from edgetrain.jobs.shares import DataShares, shares_of
from edgetrain.tasks.draws import figures_of
from edgetrain.tasks.flat import FlatModel, statistics_of
from edgetrain.tasks.protocol import Batch, Task, batches_from
from edgetrain.tasks.work import Evaluation, Local, begin_at
from edgetrain.training.member.pacing import Pace
from edgetrain.training.member.train import Made, Place
from edgetrain.training.servers.attempt import Attempt
from edgetrain.training.servers.checking import check_group
from edgetrain.training.servers.mesh import open_group, store_at
from edgetrain.training.servers.rank import Rank, prepare_rank
from edgetrain.training.servers.snapshots import Snapshots, leaders_step
from edgetrain.training.servers.steps import batches_of
from edgetrain.vectors.allocator import map_large
from edgetrain.vectors.noise import Source
from edgetrain.vectors.vector import Vector

_QUIET = timedelta(days=365)
"""Ranks wait this long for the next op: the leader may be waiting for its hub."""
HERE = "ranks that are here"
"""How many of the other ranks have begun, in an attempt's store."""


class Op(IntEnum):
    """An operation of all ranks together."""

    END = 0
    BEGIN = 1
    """Go on after `value` steps of the job."""
    BACKWARD = 2
    STEP = 3
    PULL = 4
    """Parameters and buffers, to the leader."""
    PUSH = 5
    """The same, to all."""
    PULL_GRADIENT = 6
    PUSH_GRADIENT = 7
    PULL_BUFFERS = 8


class Part:
    """A task as the group's job sees it, whose members are the group's shares of the data, or equal
    parts of their batches. All else is the task's own."""

    def __init__(self, task: Task, shares: DataShares, parts: int) -> None:
        self._task, self._shares, self._parts = task, shares, parts

    def batches_from(
        self, member: int, members: int, batch: int, seed: int, start: int
    ) -> Iterator[Batch]:
        share, part = divmod(member, self._parts)
        here = slice(part * batch, (part + 1) * batch)
        own, size = self._shares, batch * self._parts
        whole = batches_from(self._task, own.held[share], own.of, size, seed, start)
        for each in whole:
            yield tuple(tensor[here] for tensor in each)

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Batch]:
        return self.batches_from(member, members, batch, seed, 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._task, name)


class JoinedRanks:
    """The common operations of a group's ranks, one after the other."""

    def __init__(
        self,
        job: Job,
        task: Task,
        rank: Rank,
        snapshots: Snapshots | None = None,
        statistics: bool = False,
    ) -> None:
        """`job` and `task` are the group's; `statistics`: running ones are exchanged. All ranks
        call it."""
        self.task, self.rank, self._job, self._snapshots = task, rank, job, snapshots
        self._line = dist.new_group(backend="gloo", timeout=_QUIET)
        named = statistics_of(rank.held.parts.whole) if statistics else []
        self._exchanged = [name for name, _ in named]
        self.steps = self.taken = 0
        """Steps of the job that are over, and those that this group took."""
        self.is_over = False

    def lead(self, op: Op, value: int = 0) -> float:
        """Have all ranks do this, and do it. The leader calls it."""
        self.is_over = op is Op.END
        dist.broadcast(torch.tensor([op, value]), 0, group=self._line)
        return self._act(op, value)

    def follow(self) -> None:
        """Do what the leader says, to the end. The others call it."""
        told = torch.zeros(2, dtype=torch.int64)
        while True:
            dist.broadcast(told, 0, group=self._line)
            op = Op(int(told[0]))
            self._act(op, int(told[1]))
            if op is Op.END:
                return

    def _act(self, op: Op, value: int) -> float:
        held, steps = self.rank.held, self.rank.steps
        if op is Op.BEGIN:
            begin_at(steps.optimizer, value)
            ranks, self.steps = self.rank.ranks, value
            data = ranks.placement.data
            steps.go_to(value, batches_of(self.task, self._job, data, ranks.data_rank, value))
        elif op is Op.BACKWARD:
            return steps.backward()()
        elif op is Op.STEP:
            steps.step()
            self.steps += 1
            self.taken += 1
            if self._snapshots is not None:
                self._snapshots.keep_if_due(self.steps)
        elif op is Op.PULL:
            held.gather()
        elif op is Op.PUSH:
            held.scatter()
        elif op is Op.PULL_GRADIENT:
            held.gather_gradients()
        elif op is Op.PUSH_GRADIENT:
            held.scatter_gradients()
        elif op is Op.PULL_BUFFERS:
            held.gather_buffers(self._exchanged)
        elif self._snapshots is not None:
            self._snapshots.wait()
        return 0.0


class JoinedFlat:
    """See Flat: the leader's whole model in main memory, kept by all ranks together."""

    is_storage = False

    def __init__(self, together: JoinedRanks, whole: FlatModel) -> None:
        self._together, self._whole = together, whole
        self.params, self.gradient = whole.params, whole.gradient
        self.elements, self.trained = whole.elements, whole.trained
        self.description, self.fixed = whole.description, whole.fixed

    @property
    def fixed_tensors(self) -> FixedTensors | None:
        return self._whole.fixed_tensors

    def pull_params(self) -> None:
        self._together.lead(Op.PULL)

    def push_params(self) -> None:
        """See Flat. Buffers go with them, and tensors that are not trained."""
        self._whole.push_params()
        self._together.lead(Op.PUSH)

    def holding(self, vector: Vector) -> AbstractContextManager[None]:
        """See Flat: of the leader's model; the ranks' parts stay as they are."""
        return self._whole.holding(vector)

    def pull_gradient(self) -> None:
        self._together.lead(Op.PULL_GRADIENT)

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        self._whole.push_gradient(zeros_are_none)
        self._together.lead(Op.PUSH_GRADIENT)


class JoinedOptimizer:
    """See Stepper: the ranks' optimizers, which step together."""

    def __init__(self, together: JoinedRanks) -> None:
        self._together = together

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The leader's: rates and momentum are those of all ranks."""
        groups: list[dict[str, Any]] = self._together.rank.steps.optimizer.param_groups
        return groups

    def step(self) -> None:
        self._together.lead(Op.STEP)


class JoinedWork:
    takes_many = False

    def __init__(self, together: JoinedRanks) -> None:
        self._together = together

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local. The loss is that of all ranks."""
        loss = self._together.lead(Op.BACKWARD)
        return lambda: loss

    def evaluate(self, by: Evaluation = figures_of) -> dict[str, Any]:
        """See Local: of the leader's model, in main memory."""
        self._together.lead(Op.PULL_BUFFERS)
        model = self._together.rank.held.model
        assert model is not None
        return by(self._together.task, model)


def prepare_together(
    found: Resolved, place: Place, task: Task, words: str, device: torch.device, folder: Path | None
) -> JoinedRanks:
    """A rank of the group that is the member `place` of a job, in a process group that is there,
    with the optimizer of the newest snapshot in `folder`. All ranks call it. ConfigError,
    EdgetrainError for a group that computes something else than one process."""
    map_large()
    torch.set_num_threads(found.job.train.threads)
    whole, statistics = standing_in(found.job, place.missing, words), buffers_of(found) == "mean"
    job, shares = group_job(whole), shares_of(found.job, place.index, place.missing)
    part: Any = Part(task, shares, parts_of(whole))
    step = 0 if folder is None else leaders_step(folder)
    rank = prepare_rank(job, part, parse(words), device, step, statistics, shares.held[0])
    if job.servers.check != "off":
        check_group(job, part, rank)
    snapshots = None
    if folder is not None:
        snapshots = Snapshots.of(job, rank, folder)
        if step:
            snapshots.load(step)
    return JoinedRanks(job, part, rank, snapshots, statistics)


def made_by(together: JoinedRanks, found: Resolved, task: Task) -> Made:
    held = together.rank.held
    assert held.whole is not None
    assert held.model is not None

    def work(source: Source, begins_at: int, taken: int) -> Local:
        together.lead(Op.BEGIN, begins_at)
        return JoinedWork(together)

    flat, optimizer = JoinedFlat(together, held.whole), JoinedOptimizer(together)
    return Made(found, task, held.model, optimizer, flat, Pace(lambda step: 0.0), work)


def follow(attempt: Attempt, number: int, local: int) -> None:
    """A rank other than the leader: it does what the leader says."""
    job = attempt.job
    store = store_at(attempt.host, attempt.port, is_master=False)
    store.add(HERE, 1)
    device = open_group(
        number, attempt.count, attempt.port, attempt.host, job.train.accelerator, local,
        job.servers.hang_s,
    )  # fmt: skip
    place = Place(attempt.member, SERVERS, attempt.beside, missing=attempt.missing)
    folder = attempt.folder if attempt.keeps else None
    found, task = look_up(job), task_on_servers(job, place.beside)
    prepare_together(found, place, task, attempt.words, device, folder).follow()
    dist.destroy_process_group()
