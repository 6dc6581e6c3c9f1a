"""A job on one member: build the task, join, step until done, measure.

The loop is the one a user would write around `edgetrain.join`; what is added is pacing (to pass for
a slower device), evaluation and metrics. It knows nothing of how its process was started.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgetrain.errors import ConfigError, Refused
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.driver import Flat, Stepper
from edgetrain.exchange.member.link import PATIENCE_S, Link
from edgetrain.exchange.messages import MOST_FIGURE, Figure
from edgetrain.exchange.seam import Request
from edgetrain.exchange.zeromq.standby_socket import member_end
from edgetrain.fleet import devices
from edgetrain.fleet.devices.energy import Energy
from edgetrain.fleet.devices.health import Health
from edgetrain.jobs.job import COLLECTIVES, DIRECT, Job
from edgetrain.jobs.lookup import (
    buffers_of,
    check_loss,
    pace_of,
    rehearse_private,
    samples_of,
    task_of,
    tuning_of,
    work_of,
)
from edgetrain.jobs.on_member import settle
from edgetrain.jobs.resolved import SHORTEST, Resolved
from edgetrain.jobs.shares import shares_of, weight_of
from edgetrain.runs.environment import Meter
from edgetrain.tasks import Task
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.protocol import HoldsOut
from edgetrain.tasks.work import Local, begin_at, optimizer_for, tune
from edgetrain.training.member.loop import Loop, Steps
from edgetrain.training.member.member import Member, bind, driver_of, release_of
from edgetrain.training.member.pacing import HeatCap, Pace
from edgetrain.training.member.readings import readings_of
from edgetrain.training.member.service import Service
from edgetrain.training.stopping import Stop

if TYPE_CHECKING:
    from edgetrain.exchange.member.ranges import RangedExchange
    from edgetrain.runs.metrics.log import MetricsLog
    from edgetrain.tasks.own_data import FigureSums
    from edgetrain.training.member.keeping import Keeping
    from edgetrain.vectors.noise import Source


@dataclass(frozen=True)
class Place:
    index: int
    device: str
    beside: Path | None = None
    """The folder of the job file, where a task of the user's own may lie."""
    keys: Path | None = None
    """The folder of this machine's keys, and of what it allows; None: the usual one."""
    listen: str = ""
    """tcp://HOST:PORT, where other members connect, if they do in this job; "": they cannot."""
    max_celsius: float = 0.0
    """Temperature that it keeps below, by lengthening its steps; 0: none."""
    missing: tuple[int, ...] = ()
    """The members that it stands in for, as a group; (): for none, it is one itself."""

    @property
    def name(self) -> str:
        if not self.missing:
            return f"m{self.index}"
        from edgetrain.jobs.fallback import NAME

        return NAME


@dataclass(frozen=True)
class Made:
    """The parts of a member's training."""

    found: Resolved
    """The job with the noise that its privacy asks for."""
    task: Task
    model: torch.nn.Module
    """The evaluated and saved model."""
    optimizer: Stepper
    flat: Flat
    pace: Pace
    work: Callable[[Source, int, int], Local]
    """The local work, begun: by a source of noise, the steps of the job that are over, and those
    that this member took."""


def make_alone(found: Resolved, place: Place, on_task: Callable[[Task], None]) -> Made:
    task = task_of(found.job, place.beside, place.keys)
    on_task(task)
    check_loss(found.job, task)
    found = settle(found, samples_of(found.job, task))
    rehearse_private(found, task, place.index)
    model, optimizer, flat, pace = prepare(found, place, task)

    def work(source: Source, begins_at: int, taken: int) -> Local:
        begin_at(optimizer, begins_at)
        return work_of(found.job, task, model, flat, place.index, source, taken, begins_at)

    return Made(found, task, model, optimizer, flat, pace, work)


def train(
    found: Resolved,
    place: Place,
    hub: str | Sequence[str],
    open_log: Callable[[str, float], MetricsLog],
    clock: Callable[[], float] = time.monotonic,
    credentials: Credentials | Sequence[Credentials | None] | None = None,
    checkpoint: Path | None = None,
    source: Source = os.urandom,
    stop: Stop | None = None,
    keeps_model: bool = False,
    metrics_bytes: int = 0,
    service: Service | None = None,
    patience_s: float = PATIENCE_S,
    on_task: Callable[[Task], None] = lambda task: None,
    make: Callable[[Resolved, Place, Callable[[Task], None]], Made] = make_alone,
) -> None:
    """Train one member of a job to its end, at the hub with this address, or these; of several hubs
    `hub` has an address each, the lead's first. `on_task` is called with its task, once that is
    loaded; `open_log` once training begins, with the member's name and when, by `time.monotonic`.
    Without `credentials` nothing is encrypted; of several hubs they may be each one's. In the
    folder `checkpoint` the member keeps what it needs to go on after it was killed. `source` is
    what noise is made of, where the job has privacy. `stop` ends it between two steps. With
    `keeps_model` the member that evaluates writes the trained model beside its log, which says if a
    disk refuses. `metrics_bytes`: at most; 0: any. `service` is told that it is in, and alive. A
    silent hub is tried for `patience_s`. `make` makes what is trained.

    Raises what `join` raises, TaskError and ConfigError, Stopped.
    """
    torch.set_num_threads(found.job.train.threads)
    made = make(found, place, on_task)
    made.pace.cap = cap = heat_cap(place.max_celsius, clock)
    task, job = made.task, made.found.job
    keeping = None if checkpoint is None else _keeping(made, checkpoint, place.name)
    energy = Energy(devices.load(place.device), clock)
    link, request = _exchange(found, place, task, hub, credentials, patience_s)
    service, stop = service or Service({}), stop or Stop()
    link.on_welcome = functools.partial(_tell_welcome, service, link)
    stop.alive = service.alive
    release = release_of(job.privacy, source)
    flat = _doubled(made.flat) if found.strategy.has_variates else made.flat
    with Member.join(
        link, flat, made.optimizer, request, keeping=keeping, release=release, stop=stop
    ) as member:
        check = _unnoised_check(made)
        _tell_training(service, stop, member, job.train.steps, cap)
        member.telemeter.read = readings_of(place.device, energy)
        local = made.work(source, member.begins_at, member.steps)
        with open_log(member.name, member.began) as log:
            steps = replace(Steps.of(job, place.index), most_bytes=metrics_bytes)
            pace = _pace_of(made, member, local, clock)
            loop = Loop(steps, local, member, log, pace, Meter(), energy, clock)
            _connect_loop(loop, link, member, made, (place.index, local))
            try:
                loop.run()
            except Refused as refused:
                if refused.code == "ended":
                    _keep(member, made, log, check, keeps_model and loop.evaluates)
                raise
            _keep(member, made, log, check, keeps_model and loop.evaluates)


def _doubled(flat: Flat) -> Flat:
    from edgetrain.exchange.member.doubled import Doubled  # which few strategies use

    return Doubled(flat)


def _pace_of(made: Made, member: Member, local: Local, clock: Callable[[], float]) -> Pace:
    """The pace of this member's steps; of one that is dealt slices, of these."""
    if not made.found.strategy.deals:
        return made.pace
    from edgetrain.training.member.slices import work_at_pace

    return work_at_pace(member, local, made.pace, made.found.job.train.batch, clock)


def _exchange(
    found: Resolved,
    place: Place,
    task: Task,
    hub: str | Sequence[str],
    credentials: Credentials | Sequence[Credentials | None] | None,
    patience_s: float,
) -> tuple[Link | RangedExchange, Request]:
    """What this member exchanges through, and joins with. Several hubs have an address each."""
    request = request_of(found, place, task)
    hubs = [hub] if found.hubs == 1 or isinstance(hub, str) else hub
    if len(hubs) != found.hubs:
        raise ConfigError(
            f"an address for {len(hubs)} of the job's {found.hubs} hubs", "give each of hub.hubs"
        )
    shown = list(credentials) if isinstance(credentials, Sequence) else [credentials] * len(hubs)
    sockets = [member_end(at, own) for at, own in zip(hubs, shown, strict=True)]
    job, is_plain = found.job, found.job.fleet.topology not in (DIRECT, *COLLECTIVES)
    if is_plain and not found.strategy.deals and job.strategy.ranges == 1:
        return Link(sockets[0], time.monotonic, patience_s, job.hub.hub_timeout_s), request
    from edgetrain.training.member.exchanges import exchange_of

    way, address = exchange_of(found, sockets, shown[0], place.keys, place.listen, patience_s)
    return way, replace(request, address=address)


def _tell_welcome(service: Service, link: Link | RangedExchange, members: int) -> None:
    """Tell the service manager that the hub has let this member in; training may begin later."""

    def waiting() -> str:
        missing = members - link.members_here
        few = f"{missing} of " if link.members_here else ""
        return f"welcome; waiting for {few}{members} members"

    service.describe, service.away = waiting, lambda: link.away_s
    service.ready()


def heat_cap(celsius: float, clock: Callable[[], float]) -> HeatCap | None:
    """What keeps this machine below a temperature; None for 0. Raises ConfigError if the machine
    does not say how hot it is."""
    if not celsius:
        return None
    health = Health()
    if health.celsius is None:
        raise ConfigError(
            f"--max-celsius {celsius:g}: this machine does not report its temperature",
            "leave it out",
        )
    return HeatCap(celsius, lambda: health.celsius, clock)


def _tell_training(
    service: Service, stop: Stop, member: Member, steps: int, cap: HeatCap | None
) -> None:
    """Tell the service manager how many of the job's steps are over, by the count that the hub is
    told: this member may have come late, or come back. And how much longer they last for heat."""
    telemeter = member.telemeter

    def status() -> str:
        said = f"training: {telemeter.sums().step} of {steps} steps"
        if cap is not None and cap.factor > 1:
            said += f", each {cap.factor:.1f} times as long to stay below {cap.celsius:g} C"
        if cap is not None and cap.is_blind:
            said += f"; how hot it is is unknown: --max-celsius {cap.celsius:g} has no effect"
        return said

    service.status(status)
    stop.alive = lambda: service.alive(member.steps)


def _connect_loop(
    loop: Loop, link: Link | RangedExchange, member: Member, made: Made, work: tuple[int, Local]
) -> None:
    """Let the hub know what the loop's evaluations find, unless privacy or masks hide that, and
    have the loop evaluate if the hub asks for it; and go by the draws, where the job has some."""
    if made.found.job.cohort is not None:
        from edgetrain.training.member.drawn import follow_draws

        loop.cohort = follow_draws(member, made.found, made.task, work, made.optimizer)
    if isinstance(made.task, HoldsOut):
        from edgetrain.tasks.own_data import evaluation_of

        own = shares_of(made.found.job, work[0])
        loop.evaluate_own = evaluation_of(made.task, own.held, own.of)
    is_hidden = made.found.job.privacy.unit != "none"
    is_hidden |= isinstance(link, Link) and link.outbox.is_masked
    loop.is_to_evaluate = lambda: link.is_to_evaluate
    loop.observe_figures = functools.partial(_tell_figure, member, made.task, is_hidden)
    if not is_hidden:
        loop.observe_own = functools.partial(_tell_own, member)


def _tell_figure(
    member: Member, task: Task, is_hidden: bool, figures: Mapping[str, float], at: float
) -> None:
    """Let the hub know with the next status that this member evaluates and, unless that is hidden,
    how good the model is. NaN and infinity are not said."""
    passed_s, step = at - member.began, driver_of(member).progress
    found = Figure() if is_hidden else figure_of(task, figures, step, passed_s)
    member.telemeter.figure = found


def _tell_own(member: Member, sums: FigureSums, step: int) -> None:
    """Let the hub know with the next status what the evaluation on data of its own found."""
    told = tuple((name, *pair) for name, pair in sums.items() if abs(pair[0]) <= MOST_FIGURE)
    if told:  # an empty figure would say that this member evaluates for the fleet
        before = member.telemeter.figure or Figure()
        member.telemeter.figure = replace(before, own=told, own_step=step)


def figure_of(task: Task, figures: Mapping[str, float], step: int, passed_s: float) -> Figure:
    """How good the model was after `step` steps, `passed_s` seconds after training began."""
    value = figures.get(task.metric)
    if not isinstance(value, int | float) or not abs(value) <= MOST_FIGURE:
        return Figure()
    metric = "".join(filter(str.isprintable, task.metric))[:40]
    t_ms = max(0, round(1000 * passed_s))
    return Figure(metric, float(value), task.better == "lower", step, t_ms)


def _keeping(made: Made, folder: Path, name: str) -> Keeping:
    from edgetrain.training.member.keeping import of_job  # of a member with a checkpoint

    return of_job(made.found, folder, name, made.model, made.optimizer)


def _unnoised_check(made: Made) -> Callable[[], None]:
    """See `weights.unnoised_check`."""
    if (unit := made.found.job.privacy.unit) == "none":
        return lambda: None
    from edgetrain.tasks.weights import unnoised_check

    return unnoised_check(made.model, buffers_of(made.found) == "mean", unit)


def _keep(
    member: Member, made: Made, log: MetricsLog, check: Callable[[], None], whole: bool
) -> None:
    """Keep this member's personal layers and, if it is to, the `whole` model of the fleet."""
    if whole or made.found.job.strategy.personal:
        from edgetrain.training.member.ending import keep_model, keep_personal

        keep_personal(made.model, log, member.name)
        if whole:
            with member.fleet_model():
                keep_model(made.model, log, check)


def device_for(accelerator: str, unit: str = "none") -> torch.device:
    """Where a job's `train.accelerator` wants the model, under privacy of `unit`. ConfigError."""
    there = torch.cuda.is_available()
    if accelerator == "cuda" and not there:
        raise ConfigError(
            f"train.accelerator = 'cuda': torch {torch.__version__} finds no GPU here",
            "say 'auto' or 'cpu', or install a driver and a torch built for CUDA",
        )
    if accelerator == "cpu" or not there or unit == "example":
        return torch.device("cpu")
    return torch.device("cuda")


def prepare(
    found: Resolved, place: Place, task: Task
) -> tuple[torch.nn.Module, torch.optim.Optimizer, FlatModel, Pace]:
    """A member's model as every member of the job begins with it, its optimizer, the model as flat
    vectors, and the pace of its device. ConfigError for an optimizer that cannot be."""
    job = found.job
    model = model_of(task, job.seed)
    pace = Pace(step_times(job, place, pace_of(job, place.device, model, task)))
    # Before the optimizer and the flat vectors, which hold on to the parameters.
    model.to(device_for(job.train.accelerator, job.privacy.unit))
    optimizer = optimizer_for(model, job.train.optimizer, task)
    tune(optimizer, tuning_of(job))
    flat = bind(model, optimizer, job.train.frozen, buffers_of(found))
    return model, optimizer, flat, pace


def request_of(found: Resolved, place: Place, task: Task, digest: str = "") -> Request:
    """What a member of this job says of itself; `digest` is the job's, where it is known."""
    own = shares_of(found.job, place.index, place.missing)
    weight = weight_of(found.job, task, own)
    terms, train = found.mask_terms or False, found.job.train
    # Steps that all have the same samples, and few of them: replies foretold from the first rounds
    # lead astray (docs/decisions/027).
    few = own.samples(task) <= train.batch * train.accumulate
    predicts = not (few and 0 < train.steps < SHORTEST * found.strategy.local_steps)
    request = Request("", place.name, weight, digest or found.job.digest(), secure=terms)
    if found.strategy.deals:
        from edgetrain.tasks.slices import digest_of

        batch = found.strategy.argument("batch")
        request = replace(request, data=digest_of(task, (own.held[0], own.of), batch))
    return replace(request, predicts=predicts)


def step_times(job: Job, place: Place, seconds: float) -> Callable[[int], float]:
    """What each step takes on a device that needs `seconds` for one while it is cool."""
    if not seconds:
        return lambda step: 0.0
    from edgetrain.fleet.devices.speed import StepTimes  # of an emulated device

    return StepTimes(devices.load(place.device), seconds, job.seed, place.index)
