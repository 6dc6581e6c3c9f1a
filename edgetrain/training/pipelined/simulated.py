"""A pipeline over members in virtual time: its hub and stages as they are, on simulated links."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.messages import PROTOCOL, Join
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.relay import Relay
from edgetrain.exchange.pipeline.serve import StageLink, relay_messages
from edgetrain.jobs.pipeline import StagePlan
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.environment import utc
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.training.hub_recorder import HubRecorder
from edgetrain.training.member.train import Place
from edgetrain.training.outcome import RunOutcome, recorded
from edgetrain.training.pipelined.hub import terms_of
from edgetrain.training.pipelined.member import train_stage
from edgetrain.training.pipelined.planning import plan_stages
from edgetrain.training.simulated.hub import ComputedUsage, network_of, report_of
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.vectors.vector import Buffer

LOOK = 4096
"""Events between two looks at the run."""


def simulate_stages(
    planned: Resolved, folder: Path, watch: Callable[[], None], luck: int = 0
) -> dict[str, Any]:
    """Simulate a planned job whose members are stages; as `simulation.run`."""
    planned = replace(planned, stages=plan_stages(planned))
    assert planned.stages is not None
    for name, pace in zip(planned.devices, planned.stages.paces, strict=True):
        if not sum(pace):
            raise ConfigError(
                f"device '{name}' has no speed that could be simulated",
                "name a board (device=raspberry-pi-4b), or say pace_s=0.02",
            )
    with recorded(planned, folder) as outcome:
        _Simulated(planned, folder, luck).run(watch, outcome)
    return outcome.summary


STEPS = 8
"""Steps that `step_seconds` looks at; slow start is over in the second half of them."""


def step_seconds(found: Resolved) -> float:
    """Seconds of a step of a pipeline that `plan_stages` has planned: its hub and its stages on
    simulated links, with TCP's windows, and nothing computed. Where a device has no speed, as
    planned."""
    plan, job, world = found.stages, found.job, World()
    assert plan is not None
    if not all(map(sum, plan.paces)):
        return plan.seconds
    terms = replace(terms_of(job), steps=STEPS, save_every=STEPS, evaluate_every=0)
    network, ends = network_of(found, world), list[float]()

    def train(index: int) -> None:
        count = plan.placement.microbatches
        stage = _Idle(plan, index, world, ends)
        desk = StageDesk(
            index, terms.stages, count, STEPS, STEPS, plan.windows[index], stage
        )  # fmt: skip
        join = Join(PROTOCOL, terms.job, "", 1, f"m{index}", float(count), 0)
        StageLink(desk, join, network.connect(index), world.clock, job.hub.hub_timeout_s).run()

    def relay() -> None:
        relay_messages(Relay(terms), network.hub, world.clock, lambda effect: None)

    world.start("hub", relay)
    for index in range(terms.stages):
        world.start(f"m{index}", functools.partial(train, index))
    while len(ends) < STEPS and world.step():
        pass
    half = ends[STEPS // 2 - 1 :]
    return (half[-1] - half[0]) / (len(half) - 1)


class _Idle:
    """Takes as long as a stage, and passes on as many bytes (exchange.pipeline.desk.Computes)."""

    def __init__(self, plan: StagePlan, stage: int, world: World, ends: list[float]) -> None:
        self.clips = False
        self._paces, self._world, self._ends = plan.paces[stage], world, ends
        self._after = None if stage == len(plan.shapes) else bytes(plan.cut_bytes[stage])
        self._before = bytes(plan.cut_bytes[stage - 1]) if stage else None

    def forward(self, step: int, micro: int, given: Buffer | None) -> Buffer | None:
        self._world.sleep(self._paces[0])
        return self._after

    def backward(self, micro: int, given: Buffer | None) -> tuple[Buffer | None, float]:
        self._world.sleep(self._paces[1])
        return self._before, 0.0

    def squares(self) -> float:
        return 0.0

    def finish(self, step: int, loss: float, squares: float) -> None:
        if self._before is None:
            self._ends.append(self._world.clock())

    def state(self) -> bytes:
        return b""

    def begin(self, step: int, state: bytes) -> None:
        pass

    def evaluate(self, step: int, stage: int, state: bytes) -> None:
        pass


class _Simulated:
    """One run: the world, its links, a process for the hub and for each stage."""

    def __init__(self, planned: Resolved, folder: Path, luck: int) -> None:
        self._planned, self._folder, self._began = planned, folder, 0.0
        self._began_utc: str | None = None
        self._world = World()
        self._network = network_of(planned, self._world, luck)
        self._recorder = HubRecorder(
            folder, self._world.clock, self._network.hub.traffic,
            usage=ComputedUsage(lambda: self._network.hub.busy_s), on_start=self._begin,
        )  # fmt: skip
        self._processes = [self._world.start("hub", self._serve)] + [
            self._world.start(f"m{index}", functools.partial(self._train, index))
            for index in range(planned.job.fleet.members)
        ]

    def _begin(self, began: float) -> None:
        self._began, self._began_utc = began, utc()
        self._network.start_faults()

    def _serve(self) -> None:
        wire, clock = self._network.hub, self._world.clock
        relay_messages(Relay(terms_of(self._planned.job)), wire, clock, self._recorder)

    def _train(self, index: int) -> None:
        world, device = self._world, self._planned.devices[index]
        place = Place(index, device, self._planned.beside)
        usage = ComputedUsage(world.clock)

        def open_log(name: str, at: float) -> MetricsLog:
            return MetricsLog(metrics_path(self._folder), name, world.clock, self._began)

        wire = self._network.connect(index)
        train_stage(
            self._planned, place, wire, open_log, world.clock, world.sleep, usage, status_s=0.0
        )

    def run(self, watch: Callable[[], None], outcome: RunOutcome) -> None:
        """To the end. Raises the error of the hub, or of the first stage that failed."""
        world = self._world
        try:
            while world.step() and not self._is_over():
                if world.events % LOOK == 0:
                    watch()
            failed: list[Process] = [each for each in self._processes if each.error]
            for each in failed:
                assert each.error is not None
                raise each.error
            if waiting := [each.name for each in self._processes if not each.over]:
                raise EdgetrainError(
                    f"the simulation stands still: {', '.join(waiting)} wait for ever"
                )
            outcome.status = "finished"
        finally:
            for process in self._processes:
                process.kill()
            self._recorder.close()
            outcome.network = report_of(self._network, "stages, one after the other")
            outcome.extra["began"] = self._began_utc

    def _is_over(self) -> bool:
        return any(each.error for each in self._processes) or all(
            each.over for each in self._processes
        )
