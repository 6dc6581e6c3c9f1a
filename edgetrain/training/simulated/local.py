"""The local work of simulated members: one by one as on a device, or many at once (`batched`).

One by one the arithmetic is that of a real member, bit for bit. Nothing here knows time or
messages.
"""

from __future__ import annotations

import torch

from edgetrain.errors import ConfigError
from edgetrain.exchange.member.driver import Flat, Stepper
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import buffers_of, tuning_of, work_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.tasks import Task
from edgetrain.tasks.draws import model_of, seeded
from edgetrain.tasks.flat import FlatModel, with_parameters
from edgetrain.tasks.work import Local, OwnDraws, begin_at, optimizer_for, tune
from edgetrain.training.simulated.batched import Rows, convolves, why_not_batched
from edgetrain.vectors.noise import Source
from edgetrain.vectors.vector import Vector

BATCHED_FROM = 32
"""Batch from this many members on, unless the user says otherwise. Fleets smaller than this gain
little, and are compared with emulated runs, bit for bit."""


def choose(
    task: Task, found: Resolved, batched: bool | None, goes: bool = False
) -> OneByOne | Rows:
    """Members one by one or batched, as asked; None: batched if they are many and it is possible.
    `goes`: whether they come and go.

    ConfigError if batching was asked for and the model or its optimizer cannot be batched.
    """
    if found.strategy.deals and not batched:
        return OneByOne(task, found, "members one by one: each computes slices when it is asked")
    if batched is False or (batched is None and found.job.fleet.members < BATCHED_FROM):
        return OneByOne(task, found, "members one by one, as on a device")
    problem = why_not_batched(task, found.job)
    if problem is None:
        single = batched is None and convolves(task, found.job)
        return Rows(task, found, goes, single)
    if batched:
        raise ConfigError(f"members cannot be batched: {problem}", "simulate them one by one")
    return OneByOne(task, found, f"members one by one: {problem}")


class OneByOne:
    """Members with a torch model of their own each. `reason`: how members are
    stepped, and why, for the run folder."""

    def __init__(self, task: Task, found: Resolved, reason: str) -> None:
        self._task, self._found, self.reason = task, found, reason
        self.models: dict[int, torch.nn.Module] = {}
        """Each member's newest."""
        self._made: dict[int, tuple[torch.optim.Optimizer, Local]] = {}

    def member(self, index: int, taken: int = 0) -> tuple[Flat, Stepper, Local]:
        """A fresh member, or one that has `taken` steps: its model as two flat vectors, its
        optimizer, its work."""
        job = self._found.job
        model = model_of(self._task, job.seed)
        has_mean = buffers_of(self._found) == "mean"
        flat = FlatModel(model, frozen=job.train.frozen, statistics=has_mean)
        optimizer = optimizer_for(model, job.train.optimizer, self._task)
        tune(optimizer, tuning_of(job))
        work = work_of(job, self._task, model, flat, index, noise_of(job, index), taken)
        self._made[index] = optimizer, work
        self.models[index] = model
        return flat, optimizer, work

    def release(self, flat: Flat, index: int) -> None:
        """The member with this index goes until it is made anew. One model is kept, for
        `model_at`."""
        if len(self.models) > 1:
            self.models.pop(index, None)
        self._made.pop(index, None)

    def begin_at(self, index: int, step: int) -> None:
        """The next step of the member made last with this index is the job's step `step`."""
        optimizer, work = self._made[index]
        begin_at(optimizer, step)
        if isinstance(work, OwnDraws):
            work.step = step

    def model_at(self, base: Vector) -> torch.nn.Module:
        """A model of its own with these parameters, and the buffers of member 0, which evaluates,
        or of the first that was made if that one never was; one has been."""
        first = self.models.get(0) or next(iter(self.models.values()))
        return with_parameters(first, base)

    def close(self) -> None:
        """End worker threads, of which there are none. No member may be used any more."""


def noise_of(job: Job, who: int | str) -> Source:
    """The random bytes of one simulated member (its index) or of the "hub", from the job's seed.

    Simulations are reproducible, so their noise protects nobody.
    """
    return seeded("noise", job.seed, who)
