"""The hubs of a simulation, `serve` as a process in virtual time, and the links to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.hub.effects import Note, Observed
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.exchange.messages import Join
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.local import noise_of
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import SimulatedNetwork


@dataclass(frozen=True)
class ComputedUsage:
    """CPU seconds of a simulated machine: the virtual ones it computed. Memory is not simulated."""

    seconds: Callable[[], float]

    @property
    def cpu_s(self) -> float:
        return self.seconds()

    @property
    def peak_bytes(self) -> int:
        return 0


def network_of(planned: Resolved, world: World, luck: int = 0) -> SimulatedNetwork:
    """The links of a planned job, with the losses and jitter that `luck` draws."""
    network = SimulatedNetwork(
        world, planned.links, message_s=planned.job.hub.message_s, seed=planned.job.seed + luck,
        congestion=planned.congestion, sites=planned.all_sites, faults=planned.faults,
        hubs=planned.all_hub_links,
    )  # fmt: skip
    network.nat = planned.nat
    return network


def report_of(network: SimulatedNetwork, reason: str) -> dict[str, Any]:
    """The summary's report of a simulation, in place of an emulation's."""
    return {
        "backend": "simulated", "reason": reason, "congestion": network.congestion,
        "late_ms_p99": None, "late_limit_ms": None, "timing_ok": None,
        "events": network.world.events,
    }  # fmt: skip


class SimulatedHub:
    """A hub's machine. `process` runs the hub, by `clock`, at `wire`; it keeps no journal.

    `given_up` are names of members that it could not reach for too long, or that people removed,
    and that have not come back. `observe` gets what the hub does.
    """

    def __init__(
        self,
        found: Resolved,
        world: World,
        network: SimulatedNetwork,
        observe: Observer,
        number: int = 0,
    ) -> None:
        """It starts with the world. `number`: which of the job's hubs it is; 0 leads."""
        self.clock: Callable[[], float] = world.clock
        self.given_up: set[str] = set()
        self.fetch: Callable[[Sequence[int]], Sequence[tuple[bytes, Join]]] | None = None
        """See CohortPart."""
        self.min_members = 0
        """See Policy."""
        self.number, self.wire = number, network.hubs[number]
        self._found, self._world, self._network = found, world, network
        self._observer = observe
        self._name = f"hub {number}" if number else "hub"
        self.process: Process = world.start(self._name, self._serve)

    @property
    def job_is_over(self) -> bool:
        """Whether it has ended, and will not be started again."""
        return self.process.over

    def _observe(self, effect: Observed) -> None:
        if isinstance(effect, Note):
            if effect.event in ("gone", "removed"):
                self.given_up.add(effect.member)
            elif effect.event in ("joined", "back"):
                self.given_up.discard(effect.member)
        self._observer(effect)

    def _fresh(self) -> Hub:
        source = noise_of(self._found.job, self._name)
        hub = hub_of(self._found, source=source, number=self.number)
        # The members' own lines are in the same folder, in the same virtual time.
        hub.policy = replace(hub.policy, status_s=0.0)
        if self.fetch is not None and isinstance(hub.part, CohortPart):
            hub.policy = replace(hub.policy, min_members=self.min_members, start_after_s=0.0)
            hub.part.fetch = self.fetch
        return hub

    def _serve(self) -> None:
        serve(self._fresh(), self.wire, self.clock, self._observe)
