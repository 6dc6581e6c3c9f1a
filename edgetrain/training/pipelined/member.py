"""What runs on the machines of a pipeline over members: a stage, and the hub between all; and what
becomes of their states in the end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from edgetrain.exchange.messages import PROTOCOL, Join
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.relay import Relay, RelayTerms
from edgetrain.exchange.pipeline.serve import StageLink, relay_messages
from edgetrain.exchange.transport import HubTransport, MemberTransport
from edgetrain.fleet import devices
from edgetrain.jobs.lookup import built, task_of
from edgetrain.jobs.pipeline import StagePlan
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.environment import Meter, Usage
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import weights
from edgetrain.tasks.protocol import Task
from edgetrain.training.hub_recorder import HubRecorder
from edgetrain.training.member.train import Place
from edgetrain.training.pipelined.stage import TorchStage, tree_of

_STATES = "stages"
"""The folder in a run's of what stages sent the hub at the end, until the model is put together."""


def terms_of(found: Resolved) -> RelayTerms:
    plan, job = _plan(found), found.job
    placement = plan.placement
    return RelayTerms(
        job.digest(), placement.pipeline, placement.microbatches, job.train.steps,
        plan.save_every, plan.most_bytes, plan.most_state_bytes, job.hub.beat_s,
    )  # fmt: skip


def _plan(found: Resolved) -> StagePlan:
    assert found.stages is not None
    return found.stages


def serve_stages(
    found: Resolved,
    transport: HubTransport,
    recorder: HubRecorder,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Pass on between the stages of a job to its end, and leave their last states in `folder`."""
    relay = Relay(terms_of(found))
    relay_messages(relay, transport, clock, recorder)
    for stage, state in enumerate(relay.states):
        path = folder / _STATES / str(stage)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(state)


def train_stage(
    found: Resolved,
    place: Place,
    transport: MemberTransport,
    open_log: Callable[[str, float], MetricsLog],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    usage: Usage | None = None,
) -> None:
    """Train one stage of a planned pipeline to the end of its job, at the hub behind `transport`.
    Raises what `StageLink.run` raises, TaskError and ConfigError."""
    job, plan = found.job, _plan(found)
    torch.set_num_threads(job.train.threads)
    task = task_of(job, place.beside, place.keys)
    record = _Record(place, open_log, clock, usage or Meter())
    stage = TorchStage(job, task, plan, place.index, record.step, clock, sleep)
    desk = StageDesk(
        place.index, plan.placement.pipeline, plan.placement.microbatches, job.train.steps,
        plan.save_every, plan.windows[place.index], stage,
    )  # fmt: skip
    join = Join(PROTOCOL, job.digest(), _digest(plan), max(1, plan.elements), place.name, 1.0, 0)
    record.link = StageLink(desk, join, transport, clock, job.hub.outage_s)
    record.stage, record.transport = stage, transport
    try:
        record.link.run()
        record.end(job.train.steps)
    finally:
        record.close()


def _digest(plan: StagePlan) -> str:
    """Of what stages must agree on besides the job: how it is cut, and what is passed on."""
    said = f"{plan.placement} {plan.shapes} {plan.names} {plan.elements}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


class _Record:
    """The lines of one stage's metrics: a line a step, with the loss of all stages."""

    link: StageLink
    stage: TorchStage
    transport: MemberTransport

    def __init__(
        self,
        place: Place,
        open_log: Callable[[str, float], MetricsLog],
        clock: Callable[[], float],
        usage: Usage,
    ) -> None:
        self._place, self._open, self._clock, self._usage = place, open_log, clock, usage
        self._log: MetricsLog | None = None
        self._energy = devices.Energy(devices.load(place.device), clock)
        self._ended = self._waited = self._computed = 0.0

    def _begin(self) -> MetricsLog:
        if self._log is None:
            self._log = self._open(self._place.name, self._clock())
            self._ended = self._clock() - self._log.elapsed_s
            self._before = self.transport.traffic()
        return self._log

    def step(self, step: int, loss: float) -> None:
        log, now, traffic = self._begin(), self._clock(), self.transport.traffic()
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
        )
        self._ended = now

    def end(self, steps: int) -> None:
        self._begin().event("finished", f"{steps} steps")

    def close(self) -> None:
        """Close the log, if it was opened."""
        if self._log is not None:
            self._log.close()


def put_together(
    found: Resolved, folder: Path, began: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Write the trained model of a run whose stages have ended, and evaluate it; `began`: when
    training did, by `clock`. Nothing, if they did not come to their end."""
    states = sorted((folder / _STATES).glob("*"), key=lambda path: int(path.name))
    if len(states) != _plan(found).placement.pipeline:
        return
    task: Task = task_of(found.job, found.beside)
    torch.manual_seed(found.job.seed)
    model = built(task)
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path in states:
        tensors = tree_of(path.read_bytes())["tensors"]
        with torch.no_grad():
            for name in tensors.keys() & mine.keys():
                mine[name].copy_(tensors[name])
        path.unlink()
    (folder / _STATES).rmdir()
    weights.save(model, folder / weights.FILE)
    steps = found.job.train.steps
    with MetricsLog(metrics_path(folder), "m0", clock, began) as log:
        at = clock()
        figures = task.evaluate(model)
        log.evaluation(step=steps, round=steps, figures=figures, eval_s=clock() - at)
