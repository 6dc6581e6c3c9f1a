"""A pipeline over members in virtual time: its hub and stages as they are, on simulated links."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.pipeline.relay import Relay
from edgetrain.exchange.pipeline.serve import relay_messages
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
from edgetrain.training.simulated.hub import ComputedUsage
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import SimulatedNetwork

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


class _Simulated:
    """One run: the world, its links, a process for the hub and for each stage."""

    def __init__(self, planned: Resolved, folder: Path, luck: int) -> None:
        job = planned.job
        self._planned, self._folder, self._began = planned, folder, 0.0
        self._began_utc: str | None = None
        self._world = World()
        self._network = SimulatedNetwork(
            self._world, planned.links, message_s=job.hub.message_s, seed=job.seed + luck,
            congestion=planned.congestion, sites=planned.all_sites, faults=planned.faults,
            hubs=planned.all_hub_links,
        )  # fmt: skip
        self._network.nat = planned.nat
        self._recorder = HubRecorder(
            folder, self._world.clock, self._network.hub.traffic,
            usage=ComputedUsage(lambda: self._network.hub.busy_s), on_start=self._begin,
        )  # fmt: skip
        self._processes = [self._world.start("hub", self._serve)] + [
            self._world.start(f"m{index}", functools.partial(self._train, index))
            for index in range(job.fleet.members)
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
            outcome.status = self._verdict()
        finally:
            for process in self._processes:
                process.kill()
            self._recorder.close()
            outcome.network = {
                "backend": "simulated", "reason": "stages, one after the other",
                "congestion": self._network.congestion, "late_ms_p99": None,
                "late_limit_ms": None, "trusted": None, "events": world.events,
            }  # fmt: skip
            outcome.extra["began"] = self._began_utc

    def _is_over(self) -> bool:
        return any(each.error for each in self._processes) or all(
            each.over for each in self._processes
        )

    def _verdict(self) -> str:
        failed: list[Process] = [each for each in self._processes if each.error]
        for each in failed:
            assert each.error is not None
            raise each.error
        if waiting := [each.name for each in self._processes if not each.over]:
            raise EdgetrainError(f"the simulation stands still: {', '.join(waiting)} wait for ever")
        return "finished"
