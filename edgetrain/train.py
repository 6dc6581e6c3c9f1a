"""A job on one member: build the task, join, step until done, measure.

The loop is the one a user would write around `edgetrain.join`; what is added is pacing (to pass for
a slower device), evaluation and metrics. It knows nothing of how its process was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgetrain import devices
from edgetrain.config import Job
from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.link import Request
from edgetrain.member import Member
from edgetrain.metrics import MetricsLog
from edgetrain.runs import Meter
from edgetrain.sockets import MemberSocket
from edgetrain.tasks import Task, load_task

EVALUATIONS = 50
"""Evaluations in a run unless the job says how often."""


@dataclass(frozen=True)
class Place:
    """Which member of the job this is."""

    index: int
    device: str
    beside: Path | None = None
    """The folder of the job file, where a task of the user's own may lie."""

    @property
    def name(self) -> str:
        """As the hub and the metrics call it."""
        return f"m{self.index}"


def task_of(job: Job, beside: Path | None = None) -> Task:
    """The job's task, its data read; `beside` is the folder of the job file, searched for modules.

    The job's seed partitions the data unless [data] has its own. Raises TaskError.
    """
    return load_task(job.task, job.data, defaults={"seed": job.seed}, beside=beside)


def optimizer_for(model: torch.nn.Module, table: dict[str, Any]) -> torch.optim.Optimizer:
    """The torch optimizer that a job's `optimizer` table names; ConfigError names what is wrong."""
    settings = dict(table)
    name = settings.pop("name", None)
    known = {
        cls.__name__.lower(): cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    cls = known.get(str(name).lower())
    if cls is None:
        raise ConfigError(f"no optimizer '{name}'", did_you_mean(str(name), known))
    try:
        return cls([p for p in model.parameters() if p.requires_grad], **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer '{name}' with {settings}: {error}") from None


class Pace:
    """Makes a step last as long as it would on the device that is emulated.

    `overruns` counts the steps that were slower than that by themselves.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self.overruns = 0
        self._clock = clock
        self._sleep = sleep

    def hold(self, began: float) -> None:
        """Sleep until the step that began then has lasted long enough."""
        if self.seconds <= 0:
            return
        left = self.seconds - (self._clock() - began)
        if left > 0:
            self._sleep(left)
        else:
            self.overruns += 1


def pace_of(job: Job, device: str, model: torch.nn.Module, task: Task) -> float:
    """Seconds that one step of this job takes on a device; 0 for the machine itself."""
    if job.fleet.pace_s:
        return job.fleet.pace_s
    if device in (devices.HOST, devices.here()):
        return 0.0
    batch = next(task.batches(0, job.fleet.members, job.train.batch, job.seed))
    flops, operators = devices.measure_step(model, batch, task.loss)
    model.zero_grad(set_to_none=True)
    return devices.load(device).step_seconds(flops, operators)


def train(
    job: Job,
    place: Place,
    hub: str,
    open_log: Callable[[str], MetricsLog],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train one member of a job to its end. `open_log(name)` is called once training begins.

    Raises what `join` raises, TaskError and ConfigError.
    """
    torch.set_num_threads(job.train.threads)
    task = task_of(job, place.beside)
    torch.manual_seed(job.seed)
    model = task.model()
    pace = Pace(pace_of(job, place.device, model, task))
    optimizer = optimizer_for(model, job.train.optimizer)
    samples = task.samples(place.index, job.fleet.members)
    batches = task.batches(place.index, job.fleet.members, job.train.batch, job.seed)
    request = Request("", place.name, float(samples), job.digest())
    with Member(MemberSocket(hub), model, optimizer, request) as member:
        log = open_log(member.name)
        loop = _Loop(job, place, task, model, member, log, pace, clock)
        loop.run(batches)
        loop.finish()


class _Loop:
    """The steps of one member, and their record."""

    def __init__(
        self,
        job: Job,
        place: Place,
        task: Task,
        model: torch.nn.Module,
        member: Member,
        log: MetricsLog,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self._task = task
        self._model = model
        self._member = member
        self._log = log
        self._pace = pace
        self._clock = clock
        self._steps = job.train.steps
        self._evaluate_every = (
            (job.train.evaluate_every or max(1, self._steps // EVALUATIONS))
            if place.index == 0
            else 0
        )
        self._meter = Meter()
        self._energy = devices.Energy(devices.load(place.device), clock)
        self._before = member.traffic()
        self._joules: float | None = None

    def run(self, batches: Iterator[tuple[torch.Tensor, ...]]) -> None:
        """All steps. An evaluation happens while a paced device would still be computing."""
        self._evaluate()
        ended = self._clock()
        for step in range(1, self._steps + 1):
            began = self._clock()
            if self._evaluate_every and step > 1 and (step - 1) % self._evaluate_every == 0:
                self._evaluate()
                if not self._pace.seconds:
                    ended += self._clock() - began
            loss = self._task.loss(self._model, next(batches))
            self._member.flat.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._pace.hold(began)
            waited, exchanged = self._member.wait_s, self._member.exchange_s
            self._member.step()
            if step == self._steps:
                self._member.drain()
            now = self._clock()
            wait_s = self._member.wait_s - waited
            overhead_s = self._member.exchange_s - exchanged
            self._record(step, loss.item(), wait_s, now - ended - wait_s - overhead_s, overhead_s)
            ended = now

    def finish(self) -> None:
        """After the last reply: the model is the fleet's, and is evaluated as such."""
        if self._evaluate_every:
            self._evaluate()
        if self._pace.overruns > self._steps // 100:
            self._log.event(
                "overrun",
                f"{self._pace.overruns} of {self._steps} steps took longer than the "
                f"{self._pace.seconds * 1000:.3g} ms of the emulated device",
            )
        self._log.event("finished", f"{self._steps} steps")
        self._log.close()

    def _record(
        self, step: int, loss: float, wait_s: float, compute_s: float, overhead_s: float
    ) -> None:
        traffic = self._member.traffic()
        self._log.step(
            step=step,
            round=self._member.half.round,
            loss=loss,
            wait_s=wait_s,
            compute_s=compute_s,
            overhead_s=overhead_s,
            sent_bytes=traffic.sent_bytes - self._before.sent_bytes,
            received_bytes=traffic.received_bytes - self._before.received_bytes,
            cpu_s=self._meter.cpu_s,
            peak_bytes=self._meter.peak_bytes,
            joules=self._energy.joules(busy_s=compute_s + overhead_s),
        )

    def _evaluate(self) -> None:
        if not self._evaluate_every:
            return
        began = self._clock()
        with self._member.fleet_model():
            figures = self._task.evaluate(self._model)
        self._log.evaluation(
            step=self._member.steps,
            round=self._member.half.round,
            figures=figures,
            eval_s=self._clock() - began,
        )
