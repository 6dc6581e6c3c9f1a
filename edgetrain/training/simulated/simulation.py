"""A whole job in virtual time: the hub and the members of `emulated`, without its processes.

What runs on a hub (`serve`) and on a member (`Loop`, `Member`, `Link`) runs here as it is, on an
event loop in place of the operating system (`virtual`), over link models in place of sockets
(`wires`), and at the pace of its device's profile. Gradients are real.

What can go wrong is an intervention: on the hub's machine (`hub`: crash it, fill its disk, let its
clock jump), on a device (`member`: cut its power, kill or pause its process, break its connection,
let its clock jump), on links (`SimulatedNetwork.strike`). The simulation itself lets happen only
what its job says, `faults` and `absences`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgetrain.errors import ConfigError, EdgetrainError, in_words
from edgetrain.exchange.gateway.site import SitePart
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.exchange.messages import Join, unpack
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.job import COLLECTIVES, DIRECT
from edgetrain.jobs.lookup import pace_of, task_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.rules import refuse_fallback, refuse_group
from edgetrain.runs.environment import utc
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import weights
from edgetrain.tasks.draws import generators_kept, model_of
from edgetrain.tasks.personal import save_personal
from edgetrain.training.hub_recorder import HubRecorder
from edgetrain.training.outcome import at_gateways, recorded, write_errors
from edgetrain.training.simulated import local
from edgetrain.training.simulated.hub import (
    ComputedUsage,
    SimulatedHub,
    network_of,
    report_of,
)
from edgetrain.training.simulated.member import SimulatedMember, Surroundings
from edgetrain.training.simulated.peers import SimulatedPeers
from edgetrain.training.simulated.streams import Frames
from edgetrain.training.simulated.virtual import SECOND, Process, World
from edgetrain.training.simulated.wires import HubWire, SimulatedNetwork


class SimulatedGateway:
    """The gateway of site `number` of the job. `process` runs it; it keeps no journal."""

    def __init__(
        self, number: int, found: Resolved, world: World, network: SimulatedNetwork
    ) -> None:
        """It starts with the world."""
        self.wire: HubWire = network.hubs[len(found.hub_links) + number]
        """The wire of the site's members."""
        self._number, self._found, self._world, self._network = number, found, world, network
        self.process: Process = world.start(f"gateway {number}", self._serve)

    def _serve(self) -> None:
        members = len(self._found.sites[self._number].members)
        site = SitePart(f"site {self._number}", self._connect)
        hub = hub_of(self._found, site=members, part=site)
        hub.policy = replace(hub.policy, status_s=0.0)
        # What a site's hub does is in no run folder: the fleet's rounds are in the hub's.
        serve(hub, self.wire, self._world.clock, lambda effect: None)
        if site.link is not None:
            site.link.leave("done")

    def _connect(self) -> WayUp:
        wire = self._network.connect(self.wire.node)
        wire.on_arrival = self.wire.wake
        return WayUp(wire, self._world.clock)


LOOK_S = 1e-4
"""Seconds for each member between two flushes of their logs, at least."""

SWITCH_S = 0.0005
"""How often Python's lock changes hands between the event loop and the workers that compute
gradients. At the usual 5 ms the workers stand still between two short operations."""

COLLECT = 50_000, 50, 1000
"""Python's thresholds for garbage collection while members live. They are hundreds of thousands of
objects that stay; with the usual thresholds searching them took a third of the loop's time."""


COLLECT_GOING = 20_000, 3, 3
"""The same where members come and go: few live at a time, and what others leave is to go."""

COME_AND_GO_FROM = 256
"""Members of a cohort's fleet from which on they are there in their own rounds only. In smaller
fleets each is there from the first to the last second, as in an emulation."""


def may_go(planned: Resolved) -> bool:
    """Whether nothing waits with a member that is in no round but where it is in its data."""
    job = planned.job
    optimizer = {"momentum": 0, "foreach": True} | job.train.optimizer
    is_plain = str(optimizer.get("name", "")).lower() == "sgd" and not optimizer["momentum"]
    return (
        job.cohort is not None
        and not job.cohort.at_hub
        and job.cohort.sampling != "weighted"
        and is_plain
        and planned.codec.lossless
        and not planned.strategy.has_variates
        and not (job.strategy.personal or job.strategy.secure)
        and job.privacy.unit == "none"
        and planned.presence.is_steady
        and not planned.faults
    )


@generators_kept()
def run(
    planned: Resolved,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
    batched: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
    luck: int = 0,
) -> dict[str, Any]:
    """Simulate a planned job in `folder` (made by `runs`); returns its summary, also written.

    Deterministic: the same job gives the same bits and the same virtual times. `batched` members
    step together with torch.func.vmap (None: if they are many), which is faster and rounds
    differently; one by one, the parameters are those of the emulated run. The status is
    "incomplete" if members failed that the hub had not given up. `watch` is called every
    `poll_s` real seconds. Another `luck` draws other losses and jitter on the links, and changes
    nothing else. Raises the error of the hub or, if all members failed, of one; ConfigError.
    """
    refuse_group(planned.job, "a simulation cannot have")
    refuse_fallback(planned.job, "a simulation cannot have")
    if planned.job.fleet.placement:
        from edgetrain.training.pipelined.simulated import simulate_stages

        return simulate_stages(planned, folder, watch, luck)
    goes = planned.job.fleet.members >= COME_AND_GO_FROM and may_go(planned)
    with recorded(planned, folder) as outcome, _python_for_many(goes):
        simulation = Simulation(planned, folder, batched, luck=luck, goes=goes)
        try:
            simulation.run(watch, poll_s, clock)
            outcome.status = simulation.verdict()
            simulation.write_model(folder / weights.FILE)
        finally:
            outcome.network = simulation.report()
            outcome.extra["began"] = simulation.began
            outcome.extra |= simulation.carried_at_sites()
            simulation.close()
    return outcome.summary


class Simulation:
    """One run: the world, the network in it, the hub and the members.

    `hub` and `members` are its machines, and `network` its links: what goes wrong is done to them,
    by whoever drives the simulation, as an action at a virtual time (`at`).
    """

    def __init__(
        self,
        planned: Resolved,
        folder: Path,
        batched: bool | None = None,
        *,
        luck: int = 0,
        goes: bool = False,
    ) -> None:
        """`batched` and `luck` as in `run`. `goes`: members are there in rounds of theirs only."""
        self._planned, self._folder = planned, folder
        self.world = World()
        self.network = network_of(planned, self.world, luck)
        torch.set_num_threads(planned.job.train.threads)
        self.task = task_of(planned.job, planned.beside)
        # Seconds of a step on each kind of device of the fleet; ConfigError where one has no speed
        task = self.task
        model = model_of(task, planned.job.seed)
        step_seconds = {
            device: pace_of(planned.job, device, model, task)
            for device in sorted(set(planned.devices))
        }
        for device, seconds in step_seconds.items():
            if not seconds:
                raise ConfigError(
                    f"device '{device}' has no speed that could be simulated",
                    "name a board (device=raspberry-pi-4b), or say pace_s=0.02",
                )
        self._gradients = local.choose(self.task, planned, batched, goes)
        self._logs: list[MetricsLog] = []
        self._began = 0.0
        self.began: str | None = None
        """When training began, in UTC as this machine has it: not virtual. None: it has not."""
        self._recorder = HubRecorder(
            folder,
            self.world.clock,
            self.network.hub.traffic,
            usage=ComputedUsage(lambda: self.network.hub.busy_s),
            on_start=self.begin,
        )
        self._recorder.reducers = planned.reducers_in_words()
        self.hubs = [self.make_hub(number) for number in range(planned.hubs)]
        """The hubs' machines, the lead's first."""
        self.gateways = [
            SimulatedGateway(number, planned, self.world, self.network)
            for number in range(planned.gateways)
        ]
        is_direct = planned.job.fleet.topology in (DIRECT, *COLLECTIVES)
        around = Surroundings(
            planned,
            self.world,
            self.network,
            self.task,
            self._gradients,
            step_seconds,
            self._open_log,
            self._hubs_of,
            SimulatedPeers(planned, self.world, self.network) if is_direct else None,
            self._is_to_evaluate,
            self._go if goes else None,
        )
        first: Sequence[int] = range(planned.job.fleet.members)
        self._around = around
        if goes and (cohort := planned.job.cohort) is not None:
            first = sorted({0, *cohort.drawn(0)})
            self.hub.fetch, self.hub.min_members = self._fetch, len(first)
        self._first = len(first)
        self.members = [self._member(index) for index in first]
        """Those that are there, or were at the end."""

    def _member(
        self, index: int, hand: Callable[[bytes, Frames], None] | None = None
    ) -> SimulatedMember:
        return SimulatedMember(index, self._around, lambda: self.hub.job_is_over, hand)

    def _fetch(self, numbers: Sequence[int]) -> list[tuple[bytes, Join]]:
        """Let members come that have been away, or never here: what they join with, over which
        connection. Called by the hub, and takes no time: they have had all the time to come."""
        sent: list[tuple[bytes, Frames]] = []
        for number in numbers:
            self.members.append(self._member(number, lambda *each: sent.append(each)))
        self.world.sleep(0.0)
        found = [(name, unpack(frames)) for name, frames in sent]
        return [(name, join) for name, join in found if isinstance(join, Join)]

    def _go(self, member: SimulatedMember, log: MetricsLog) -> None:
        """A member is in no round: it is away until it is fetched."""
        self.members.remove(member)
        self._logs.remove(log)

    def _is_to_evaluate(self, index: int) -> bool:
        """Whether this is the first of the members that are there, as far as the hub knows."""
        away, members = self.hub.given_up, self.members
        there = ((m.training or not m.process.over) and m.name not in away for m in members)
        return index == next((i for i, is_there in enumerate(there) if is_there), 0)

    @property
    def seconds(self) -> float:
        """Virtual seconds of training so far."""
        return self.world.clock() - self._began

    def _hubs_of(self, index: int) -> Sequence[HubWire]:
        gateway = self._planned.gateway_of(index)
        return [hub.wire for hub in self.hubs] if gateway is None else [self.network.hubs[gateway]]

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` so many virtual seconds after training began, once it has."""
        self.world.at(self._time(seconds), action)

    def _time(self, seconds: float) -> int:
        return round((self._began + seconds) * SECOND)

    @property
    def hub(self) -> SimulatedHub:
        return self.hubs[0]

    def make_hub(self, number: int) -> SimulatedHub:
        """A hub's machine: called once for each, while the simulation is made."""
        return SimulatedHub(*self.hub_place(number))

    def hub_place(self, number: int) -> tuple[Resolved, World, SimulatedNetwork, Observer, int]:
        """What a hub's machine is made of. What the lead does is recorded."""
        observe: Observer = (lambda effect: None) if number else self._recorder
        return self._planned, self.world, self.network, observe, number

    def begin(self, began: float) -> None:
        self._began, self.began = began, utc()
        self.network.start_faults()
        for fault in self._planned.faults:
            self.at(fault.at_s, functools.partial(self._strike, str(fault)))
        presence = self._planned.presence
        if not presence.is_steady:
            for index, member in enumerate(self.members):
                self._await_absence(member, presence.of(index))

    def _strike(self, fault: str) -> None:
        """Record a fault, unless every member is through: then it strikes nobody."""
        if not all(member.process.over for member in self.members):
            self._recorder.strike("fault", fault)

    def _await_absence(
        self, member: SimulatedMember, absences: Iterator[tuple[float, float]]
    ) -> None:
        """Cut the device's power for its next absence, and so on while the member has work."""
        times = next(absences, None)
        if times is None:
            return
        goes, comes = map(self._time, times)

        def go() -> None:
            if not member.process.over or member.never_on:
                member.cut_power(comes)
                off_s = (comes - goes) / SECOND
                self._recorder.strike("absence", f"off for {off_s:.4g} s", member.name)
                self.world.at(comes, lambda: self._await_absence(member, absences))

        self.world.at(goes, go)

    def _open_log(self, name: str) -> MetricsLog:
        path = metrics_path(self._folder)
        # Written when the buffer is full, or before a look: see `run`.
        log = MetricsLog(path, name, self.world.clock, self._began, flush_s=float("inf"))
        self._logs.append(log)
        return log

    # -- driving it ---------------------------------------------------------------------------

    def run(
        self,
        watch: Callable[[], None],
        poll_s: float,
        clock: Callable[[], float],
        most_s: float = float("inf"),
    ) -> None:
        """Run until every process is over, nothing can happen any more, or `most_s` virtual seconds
        have passed. `watch` is called every `poll_s` seconds of `clock`."""
        # Flushing the logs of a large fleet takes a while: not more than a hundredth of the time.
        poll_s = max(poll_s, len(self.members) * LOOK_S)
        step, looked = self.world.step, clock()
        turns = 0
        while self.world.now < most_s * SECOND and step():
            turns += 1
            if turns & 63 or clock() - looked < poll_s:
                continue
            for log in self._logs:
                log.flush()
            watch()
            looked = clock()
            everything = [*self._processes(), *self._others()]
            if all(process.over for process in everything) or self._never_starts():
                break
        watch()

    def _never_starts(self) -> bool:
        """Whether members failed before training began that the others wait for, for ever."""
        left = sum(not member.process.error for member in self.members)
        first = min(self._planned.job.first_members, self._first)
        return self.began is None and left < first

    def _others(self) -> list[Process]:
        hubs = [hub.process for hub in self.hubs[1:]]
        return hubs + [gateway.process for gateway in self.gateways]

    def _processes(self) -> list[Process]:
        return [self.hub.process, *(member.process for member in self.members)]

    def verdict(self) -> str:
        """The status of the run, its errors written to the metrics. Raises what it failed with."""
        hub, *members = self._processes()
        errors = [
            (each.name, _first_line(each), each.failed_at / SECOND)
            for each in (hub, *members)
            if each.error
        ]
        write_errors(self._folder, self._began, errors)
        for process in (hub, *self._others()):
            if process.error:
                raise process.error
        failed = [member for member in members if member.error]
        for member in failed:
            # Not what a real member could meet: a mistake in the task, or in edgetrain.
            if member.error and not isinstance(member.error, EdgetrainError):
                raise member.error
        if len(failed) == len(members) or self._never_starts():
            raise EdgetrainError(f"member {failed[0].name}: {_first_line(failed[0])}")
        # A member that the hub gave up, and that finds it gone, waits ten minutes and then fails.
        late = self.hub.given_up if hub.over else set()
        stuck = [member.name for member in members if not member.over and member.name not in late]
        if stuck:
            raise EdgetrainError(
                f"the simulation stands still: {', '.join(stuck[:5])} wait for ever"
            )
        told = [member for member in failed if member.name not in self.hub.given_up]
        return "incomplete" if told else "finished"

    def carried_at_sites(self) -> dict[str, Any]:
        each = [gateway.wire.traffic() for gateway in self.gateways]
        return at_gateways([(one.sent_bytes, one.received_bytes) for one in each])

    def write_model(self, path: Path) -> None:
        """Write the fleet's parameters and the evaluating member's buffers, if it has trained; and
        what is personal, of each member. ConfigError."""
        halves = [each.training.half for each in self.members if each.training]
        if halves:  # one that went off for good, or ended sooner, has what was the base then
            half = max(halves, key=lambda half: half.applied)
            doubled = self._planned.strategy.has_variates
            base = half.base[: half.base.size // 2] if doubled else half.base
            weights.save(self._gradients.model_at(base), path)
        if self._planned.job.strategy.personal and isinstance(self._gradients, local.OneByOne):
            for index, model in self._gradients.models.items():
                save_personal(model, path.parent, f"m{index}")

    def report(self) -> dict[str, Any]:
        return report_of(self.network, self._gradients.reason)

    def close(self) -> None:
        """End what still runs, without telling anyone. Works twice."""
        hub, *members = self._processes()
        for process in (*members, *self._others(), hub):
            process.kill()
        self._recorder.close()
        for log in self._logs:
            log.close()
        self._gradients.close()


@contextlib.contextmanager
def _python_for_many(goes: bool) -> Iterator[None]:
    """Within: Python's settings for a process with worker threads and many objects, which are
    long-lived unless members come and go (`goes`)."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(*(COLLECT_GOING if goes else COLLECT))
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # torch's half a million objects stay anyway, and are not to be searched again
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def _first_line(process: Process) -> str:
    error = process.error
    if error is None or isinstance(error, EdgetrainError):
        return str(error)
    return in_words(error).splitlines()[0]
