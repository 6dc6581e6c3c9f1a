"""A job on one member: build the task, join, step until done, measure.

The loop is the one a user would write around `edgetrain.join`; what is added is pacing (to pass for
a slower device), evaluation and metrics. It knows nothing of how its process was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.exchange.keys.keyring import Credentials
from edgetrain.exchange.member.checkpoint import Keep
from edgetrain.exchange.member.link import Request
from edgetrain.exchange.zeromq.frames import MemberSocket
from edgetrain.fleet import devices
from edgetrain.jobs.plan import agreement_of
from edgetrain.jobs.privacy import promise as privacy
from edgetrain.jobs.privacy.accounting import settle
from edgetrain.jobs.reading import Job
from edgetrain.runs.environment import Usage
from edgetrain.runs.folder import Meter
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import Task, batches_from, load_task
from edgetrain.tasks.flat import FlatModel
from edgetrain.training.member import Member, bind, keeping_of, release_of
from edgetrain.training.stopping import Stop
from edgetrain.vectors.noise import Source, system

EVALUATIONS = 50
"""Evaluations in a run unless the job says how often."""


@dataclass(frozen=True)
class Place:
    """Which member of the job this is."""

    index: int
    device: str
    beside: Path | None = None
    """The folder of the job file, where a task of the user's own may lie."""
    keys: Path | None = None
    """The folder of this machine's keys, and of what it allows; None: the usual one."""

    @property
    def name(self) -> str:
        """As the hub and the metrics call it."""
        return f"m{self.index}"


def task_of(job: Job, beside: Path | None = None, keys: Path | None = None) -> Task:
    """The job's task, its data read; `beside` is the folder of the job file, searched for modules.

    The job's seed partitions the data unless [data] has its own. Raises TaskError, and ConfigError
    for a bundle that `keys`, the folder of this machine's keys, does not allow.
    """
    return load_task(job.task, job.data, defaults={"seed": job.seed}, beside=beside, keys=keys)


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

    `seconds(step)` is what that takes (0: no pace). What a step took longer than its pace, in the
    optimizer after `hold`, comes off the next one. `overruns` counts the steps that were slower by
    themselves.
    """

    def __init__(
        self,
        seconds: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.overruns = 0
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._step = 0
        self._owed = 0.0
        self._lasts = seconds(0)

    @property
    def is_set(self) -> bool:
        """Whether this device is paced at all."""
        return self._lasts > 0

    @property
    def seconds(self) -> float:
        """What the step under way takes."""
        return self._lasts

    def hold(self, began: float, steps: int = 1) -> None:
        """Sleep until the step (or so many in a row) that began then has lasted long enough."""
        if not self.is_set:
            return
        for _ in range(steps - 1):
            self._step += 1
            self._lasts += self._seconds(self._step)
        spent = self._clock() - began
        if spent > self._lasts:
            self.overruns += 1
        elif (left := self._lasts - self._owed - spent) > 0:
            self._sleep(left)

    def settle(self, computed_s: float) -> None:
        """The step is over, and took so long without waiting and exchanging."""
        if self.is_set:
            self._owed = min(max(self._owed + computed_s - self._lasts, 0.0), self._lasts)
            self._step += 1
            self._lasts = self._seconds(self._step)


def step_times(job: Job, place: Place, seconds: float) -> Callable[[int], float]:
    """What each step takes on a device that needs `seconds` for one while it is cool."""
    if not seconds:
        return lambda step: 0.0
    return devices.StepTimes(devices.load(place.device), seconds, job.seed, place.index)


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


class Local(Protocol):
    """The work of one member between exchanges: its gradients, and how good a model is."""

    takes_many: bool
    """Whether steps that nobody looks between are taken in one go, optimizer and all."""

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """Fill the member's gradient with that of its next batch.

        What is returned gives the batch's loss. The gradient need not be there before it is called
        or pulled; and nobody looks at the parameters before `ahead` more steps have been taken.
        """

    def evaluate(self) -> dict[str, float]:
        """The task's figures for the member's parameters as they are."""


class OneModel:
    """The usual `Local`: a torch model and its batches, one after the other."""

    takes_many = False

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        flat: FlatModel,
        batches: Iterator[tuple[torch.Tensor, ...]],
    ) -> None:
        self._task, self._model, self._flat, self._batches = task, model, flat, batches

    def backward(self, ahead: int = 0) -> Callable[[], float]:
        """See Local."""
        loss = self._task.loss(self._model, next(self._batches))
        self._flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item

    def evaluate(self) -> dict[str, float]:
        """See Local."""
        return self._task.evaluate(self._model)


def train(
    job: Job,
    place: Place,
    hub: str,
    open_log: Callable[[str], MetricsLog],
    clock: Callable[[], float] = time.monotonic,
    credentials: Credentials | None = None,
    checkpoint: Path | None = None,
    source: Source = system,
    stop: Stop | None = None,
) -> None:
    """Train one member of a job to its end. `open_log(name)` is called once training begins.
    Without `credentials` nothing is encrypted. In the folder `checkpoint` the member keeps what it
    needs to go on after it was killed. `source` is what noise is made of, where the job has
    privacy. `stop` ends it between two steps.

    Raises what `join` raises, TaskError and ConfigError, Stopped.
    """
    torch.set_num_threads(job.train.threads)
    task = task_of(job, place.beside, place.keys)
    privacy.check(job)
    job, agreed = settle(job, samples_of(job, task)), job
    privacy.check(job)
    torch.manual_seed(job.seed)
    model = task.model()
    pace = Pace(step_times(job, place, pace_of(job, place.device, model, task)))
    optimizer = optimizer_for(model, job.train.optimizer)
    flat = bind(model, optimizer)
    keeping = None
    if checkpoint is not None:
        privacy.refuse_checkpoint(job.privacy.unit)
        keeping = keeping_of(
            Keep(checkpoint, job.checkpoint.sparing()), place.name, model, optimizer
        )
    energy = devices.Energy(devices.load(place.device), clock)
    socket = MemberSocket(hub, credentials=credentials)
    with Member(
        socket,
        flat,
        optimizer,
        request_of(agreed, place, task),
        outage_s=job.hub.outage_s,
        keeping=keeping,
        release=release_of(job.privacy, source),
        stop=stop,
    ) as member:
        local = work_of(job, task, model, flat, place.index, source, member.steps)
        log = open_log(member.name)
        with log:
            Loop(job, place.index, local, member, log, pace, Meter(), energy, clock).run()


def samples_of(job: Job, task: Task) -> tuple[int, ...]:
    """How many samples each member holds, where the job's privacy depends on it; else ()."""
    if job.privacy.unit != "example":
        return ()
    return tuple(task.samples(index, job.fleet.members) for index in range(job.fleet.members))


def work_of(
    job: Job,
    task: Task,
    model: torch.nn.Module,
    flat: FlatModel,
    index: int,
    source: Source,
    taken: int = 0,
) -> Local:
    """The work of one member on a model of its own, after so many batches that were taken already;
    with the job's privacy, where examples have it.

    ConfigError for a task or a model that cannot be trained so.
    """
    if job.privacy.unit == "example":
        from edgetrain.tasks import private_work as examples

        return examples.work(job, task, model, flat, index, source)
    batches = batches_from(task, index, job.fleet.members, job.train.batch, job.seed, taken)
    return OneModel(task, model, flat, batches)


def rehearse(job: Job, task: Task) -> None:
    """Take one gradient as a private job does: what cannot be fails before anything starts."""
    if job.privacy.unit == "example":
        model = task.model()
        work_of(job, task, model, FlatModel(model), 0, system).backward()


def request_of(job: Job, place: Place, task: Task, digest: str | None = None) -> Request:
    """What a member of this job says of itself; `digest` is the job's, where it is known."""
    samples = task.samples(place.index, job.fleet.members)
    agreed = agreement_of(job)
    return Request("", place.name, float(samples), digest or job.digest(), secure=agreed or False)


class Loop:
    """The steps of one member, and their record. `record_every` steps share a line of metrics."""

    def __init__(
        self,
        job: Job,
        index: int,
        local: Local,
        member: Member,
        log: MetricsLog,
        pace: Pace,
        usage: Usage,
        energy: devices.Energy,
        clock: Callable[[], float],
        record_every: int = 1,
    ) -> None:
        self._local = local
        self._member = member
        self._log = log
        self._pace = pace
        self._usage = usage
        self._energy = energy
        self._clock = clock
        self._steps = job.train.steps
        self._evaluate_every = (
            (job.train.evaluate_every or max(1, self._steps // EVALUATIONS)) if index == 0 else 0
        )
        self._record_every = record_every
        self._unrecorded = 0
        self._seconds = [0.0, 0.0, 0.0]
        self._before = member.traffic()

    def run(self) -> None:
        """All steps, the last replies, and a last evaluation.

        A member that came late takes the steps that are left to the others.
        """
        self._evaluate()
        ended = self._clock()
        half = self._member.half
        many = self._local.takes_many and not self._evaluate_every
        step = min(self._member.begins_at, self._steps)
        while step < self._steps:
            step += 1
            began = self._clock()
            if self._evaluate_every and step > 1 and (step - 1) % self._evaluate_every == 0:
                self._evaluate()  # while a paced device would still be computing
                if not self._pace.is_set:
                    ended += self._clock() - began
            ahead = min(half.quiet_steps(), self._steps - step)
            loss_of = self._local.backward(ahead)
            quiet = ahead if many else 0
            for _ in range(quiet):
                loss_of = self._local.backward()
            self._pace.hold(began, 1 + quiet)
            waited, exchanged = self._member.wait_s, self._member.exchange_s
            self._member.skip(quiet)
            self._member.step()
            step += quiet
            if step == self._steps:
                self._member.drain()
            now = self._clock()
            wait_s = self._member.wait_s - waited
            overhead_s = self._member.exchange_s - exchanged
            compute_s = now - ended - wait_s - overhead_s
            self._pace.settle(compute_s)
            self._unrecorded += 1 + quiet
            self._record(step, loss_of, wait_s, compute_s, overhead_s)
            ended = now
        self._finish()

    def _finish(self) -> None:
        """After the last reply: the model is the fleet's, and is evaluated as such."""
        if self._evaluate_every:
            self._evaluate()
        if self._pace.overruns > self._steps // 100:
            self._log.event(
                "overrun",
                f"{self._pace.overruns} of {self._steps} steps took longer than the "
                f"{self._pace.seconds * 1000:.3g} ms of the emulated device",
            )
        # Equal on all members, and in every run of a job whose result no timing can change.
        base = self._member.half.checksum
        if self._member.steps:
            self._log.event("finished", f"{self._steps} steps, base {base:016x}")
        else:  # it came when others were already waiting for their last replies
            self._log.event("finished", "no steps were left")

    def _record(
        self,
        step: int,
        loss_of: Callable[[], float],
        wait_s: float,
        compute_s: float,
        overhead_s: float,
    ) -> None:
        sums = self._seconds
        sums[0] += wait_s
        sums[1] += compute_s
        sums[2] += overhead_s
        if self._unrecorded < self._record_every and step < self._steps:
            return
        traffic = self._member.traffic()
        self._log.step(
            step=step,
            round=self._member.half.round,
            loss=loss_of(),
            wait_s=sums[0],
            compute_s=sums[1],
            overhead_s=sums[2],
            sent_bytes=traffic.sent_bytes - self._before.sent_bytes,
            received_bytes=traffic.received_bytes - self._before.received_bytes,
            cpu_s=self._usage.cpu_s,
            peak_bytes=self._usage.peak_bytes,
            joules=self._energy.joules(busy_s=sums[1] + sums[2]),
            steps=self._unrecorded,
        )
        self._seconds = [0.0, 0.0, 0.0]
        self._unrecorded = 0

    def _evaluate(self) -> None:
        if not self._evaluate_every:
            return
        began = self._clock()
        with self._member.fleet_model():
            figures = self._local.evaluate()
        self._log.evaluation(
            step=self._member.steps,
            round=self._member.half.round,
            figures=figures,
            eval_s=self._clock() - began,
        )
