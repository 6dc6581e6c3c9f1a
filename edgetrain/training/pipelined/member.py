"""A member that is a stage of a pipeline: in a run on one machine, and as `edgetrain member`."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.telemetry import Sums, Telemeter
from edgetrain.exchange.messages import PROTOCOL, Figure, Join, pack
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.serve import StageLink
from edgetrain.exchange.transport import MemberTransport
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.fleet import devices
from edgetrain.fleet.devices.energy import Energy
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.pipeline import StagePlan
from edgetrain.jobs.plan import check
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.environment import Meter, Usage
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks.draws import figures_of
from edgetrain.tasks.protocol import Task
from edgetrain.training.member.ending import keep_model
from edgetrain.training.member.loop import LINE_BYTES
from edgetrain.training.member.readings import readings_of, versions
from edgetrain.training.member.service import Service
from edgetrain.training.member.train import Place, figure_of, heat_cap
from edgetrain.training.pipelined.planning import plan_stages
from edgetrain.training.pipelined.stage import TorchStage, Watcher
from edgetrain.training.stopping import Stop

FAR_S = 3600.0
"""Seconds of a trip over unknown links: as many micro-batches are out as memory holds."""


def join_pipeline(
    found: Resolved,
    place: Place,
    hub: str | Sequence[str],
    open_log: Callable[[str, float], MetricsLog],
    credentials: Sequence[Credentials | None] = (None,),
    stop: Stop | None = None,
    metrics_bytes: int = 0,
    service: Service | None = None,
    patience_s: float = 0.0,
    on_task: Callable[[Task], None] = lambda task: None,
) -> None:
    """Train one stage of a job's pipeline to its end, at the hub with this address, or the first of
    these; as `member.train.train`. A job that is not planned is cut here: every member finds the
    same cuts, and the hub compares them.

    Raises what `StageLink.run` raises, TaskError and ConfigError.
    """
    task = task_of(found.job, place.beside, place.keys)
    on_task(task)
    if found.stages is None:
        found = replace(check(found.job), beside=place.beside)
        stages = plan_stages(found, task, FAR_S)
        if not found.job.fleet.pace_s and place.device in (devices.HOST, devices.here()):
            stages = replace(stages, paces=((0.0, 0.0),) * len(stages.paces))
        found = replace(found, stages=stages)
    with contextlib.closing(MemberSocket(hub, credentials=credentials[0])) as socket:
        train_stage(
            found, place, socket, open_log, task=task, status_s=found.job.hub.status_s, stop=stop,
            service=service, patience_s=patience_s, metrics_bytes=metrics_bytes,
        )  # fmt: skip


def train_stage(
    found: Resolved,
    place: Place,
    transport: MemberTransport,
    open_log: Callable[[str, float], MetricsLog],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    usage: Usage | None = None,
    *,
    task: Task | None = None,
    status_s: float = 0.0,
    stop: Stop | None = None,
    service: Service | None = None,
    patience_s: float = 0.0,
    metrics_bytes: int = 0,
) -> None:
    """Train one stage of a planned pipeline to the end of its job, at the hub behind `transport`,
    which hears every `status_s` seconds (0: never) how that goes."""
    assert found.stages is not None
    job, plan, stop = found.job, found.stages, stop or Stop()
    torch.set_num_threads(job.train.threads)
    task = task or task_of(job, place.beside, place.keys)
    record = _Record(place, task, job.train.steps, open_log, clock, usage or Meter())
    stage = TorchStage(job, task, plan, place.index, record, clock, sleep)
    stage.cap = heat_cap(place.max_celsius, clock)
    count = plan.placement.microbatches
    desk = StageDesk(
        place.index, plan.placement.pipeline, count, job.train.steps, plan.save_every,
        plan.windows[place.index], stage,
    )  # fmt: skip
    elements = max(1, plan.elements)
    join = Join(PROTOCOL, job.digest(), _digest(plan), elements, place.name, float(count), 0)
    link = StageLink(desk, join, transport, clock, job.hub.hub_timeout_s, patience_s, record.check)
    record.stage, record.link, record.transport = stage, link, transport
    record.stop, record.status_s, record.metrics_bytes = stop, status_s, metrics_bytes
    _tell(service or Service({}), stop, link, desk, job.train.steps)
    try:
        link.run()
        record.end()
    finally:
        record.close()


def _tell(service: Service, stop: Stop, link: StageLink, desk: StageDesk, steps: int) -> None:
    """Tell the service manager how it goes, at each sign of life."""

    def describe() -> str:
        if desk.is_waiting:
            return "welcome; waiting for the other stages, or for this one's state"
        return f"training: {desk.step} of {steps} steps"

    def alive() -> None:
        if link.is_in and not service.is_ready:
            service.describe, service.away = describe, lambda: link.silent_s
            service.ready()
        service.alive(desk.step)

    stop.alive = alive


def _digest(plan: StagePlan) -> str:
    """Digest of the stages' agreement besides the job: the cut, and the passed tensors."""
    said = f"{plan.placement} {plan.shapes} {plan.names} {plan.elements}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


class _Record(Watcher):
    """The lines of one stage's metrics, its reports to the hub, and the model of all stages."""

    link: StageLink
    stage: TorchStage
    transport: MemberTransport
    stop: Stop
    status_s: float
    metrics_bytes: int

    def __init__(
        self,
        place: Place,
        task: Task,
        steps: int,
        open_log: Callable[[str, float], MetricsLog],
        clock: Callable[[], float],
        usage: Usage,
    ) -> None:
        self._place, self._task, self._steps, self._open = place, task, steps, open_log
        self._clock, self._usage = clock, usage
        self._log: MetricsLog | None = None
        self._energy = Energy(devices.load(place.device), clock)
        self._ended = self._waited = self._computed = self._evaluated = 0.0
        self._step = self._unlogged = 0

    def begin(self, step: int) -> None:
        if self._log is not None:
            return
        self._log = self._open(self._place.name, self._clock())
        self._began = self._clock() - self._log.elapsed_s
        self._ended, self._waited = self._began, self.link.wait_s
        self._idle_s = self._waited
        self._before = self.transport.traffic()
        self._telemeter = Telemeter(
            self.status_s, self._began, self._clock, self._sums, self.transport.traffic,
            lambda message: self.transport.send(pack(message)),
        )  # fmt: skip
        self._telemeter.versions = versions()
        self._telemeter.read = readings_of(self._place.device, self._energy)

    def _sums(self) -> Sums:
        wait_s, passed_s = self._waited - self._idle_s, self._ended - self._began
        overhead_s = max(0.0, passed_s - wait_s - self._computed - self._evaluated)
        return Sums(self._step, self._step, self._ended, wait_s, overhead_s, self._evaluated)

    def check(self) -> None:
        """Raise Stopped if this process is asked to end; otherwise report, if it is time."""
        self.stop.check()
        if self._log is not None:
            self._telemeter.poll()

    def step(self, step: int, loss: float) -> None:
        log, now, traffic = self._log, self._clock(), self.transport.traffic()
        assert log is not None
        self._step, self._unlogged = step, self._unlogged + 1
        room = (self.metrics_bytes - LINE_BYTES) * step / self._steps
        if self.metrics_bytes and log.written_bytes + LINE_BYTES > room and step < self._steps:
            return
        compute_s = self.stage.computed_s - self._computed
        wait_s = self.link.wait_s - self._waited
        self._computed, self._waited = self.stage.computed_s, self.link.wait_s
        overhead_s = max(0.0, now - self._ended - compute_s - wait_s)
        log.step(
            step=step,
            round=step,
            loss=loss,
            wait_s=max(0.0, min(wait_s, now - self._ended - compute_s)),
            compute_s=compute_s,
            overhead_s=overhead_s,
            sent_bytes=traffic.sent_bytes - self._before.sent_bytes,
            received_bytes=traffic.received_bytes - self._before.received_bytes,
            cpu_s=self._usage.cpu_s,
            peak_bytes=self._usage.peak_bytes,
            joules=self._energy.joules(busy_s=compute_s + overhead_s),
            steps=self._unlogged,
        )
        self._ended, self._unlogged = now, 0
        if step == self._steps:
            self._telemeter.say()

    def evaluate(self, step: int, model: torch.nn.Module) -> Figure:
        """After the last step the model is kept beside the log."""
        assert self._log is not None
        at = self._clock()
        figures = figures_of(self._task, model)
        taken_s = self._clock() - at
        self._evaluated += taken_s
        self._ended += taken_s
        self._log.evaluation(step=step, round=step, figures=figures, eval_s=taken_s)
        if step == self._steps:
            keep_model(model, self._log)
        return figure_of(self._task, figures, step, at - self._began)

    def end(self) -> None:
        assert self._log is not None
        self._log.event("finished", f"{self._steps} steps")

    def close(self) -> None:
        """Close the log, if it was opened."""
        if self._log is not None:
            self._log.close()
