"""A whole job on one machine: a hub process, member processes, an emulated network between them.

What each process does is in `serve` and `train`; how it is started is in `processes`; the links are
`networks`' business. Here they are put together, watched and taken down again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain import codecs, devices, networks, processes, runs, strategies
from edgetrain.config import Job
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.hub import Closed, Hub, Note, Policy, Terms
from edgetrain.metrics import MetricsLog
from edgetrain.networks import Link
from edgetrain.processes import Child

if TYPE_CHECKING:
    from edgetrain.sockets import Traffic

PRELOAD = ("edgetrain.train", "edgetrain.serve", "edgetrain.hub")


def hub_of(job: Job) -> Hub:
    """The hub of a job; ConfigError for a strategy, codec or value that cannot be."""
    strategy = strategies.find(job.strategy.name)
    every = job.strategy.every or strategy.every
    if strategy.contributes == "gradient" and every != 1:
        raise ConfigError(
            f"strategy.every = {every}: {strategy.name} exchanges gradients at every step",
            "leave it out, or choose local-sgd",
        )
    if job.hub.quorum > job.fleet.members:
        raise ConfigError(
            f"hub.quorum = {job.hub.quorum}: the job has only {job.fleet.members} members"
        )
    delay = None if job.strategy.delay == "auto" else int(job.strategy.delay)
    if not strategy.delays:
        if delay:
            raise ConfigError(
                f"strategy.delay = {delay}: {strategy.name} waits for every reply",
                "leave it out, or choose dga",
            )
        delay = 0
    codec = codecs.parse(job.strategy.codec)
    return Hub(
        Terms(strategy.name, strategy.contributes, strategy.weighted, every, delay, job.digest()),
        Policy(
            job.fleet.members, job.hub.quorum, job.hub.deadline_s, job.hub.gone_s, job.hub.beat_s
        ),
        strategy.merge_rule(),
        codec,
        codecs.parse(job.strategy.reply_codec) if job.strategy.reply_codec else codec,
    )


@dataclass(frozen=True)
class Plan:
    """A job with every name in it looked up: what cannot work fails before anything starts."""

    job: Job
    devices: tuple[str, ...]
    """The device profile of each member."""
    networks: tuple[str, ...]
    """The network profile of each member."""
    name: str
    metric: str
    better: str
    target: float | None
    beside: Path | None
    """The folder of the job file."""


def plan(job: Job, beside: Path | None = None) -> Plan:
    """Look up task, devices, network, strategy, codec and optimizer. Loads torch and the data."""
    from edgetrain import train

    hub_of(job)
    members, job = _members(job)
    task = train.task_of(job, beside)
    train.optimizer_for(task.model(), job.train.optimizer)
    for device in set(members):
        devices.load(device)
    links = _spread(networks.parse_fleet(job.fleet.network), len(members), "network")
    for name in set(links):
        networks.load(name)
    job = replace(job, name=job.name or task.name)
    return Plan(job, members, links, task.name, task.metric, task.better, task.target, beside)


def _members(job: Job) -> tuple[tuple[str, ...], Job]:
    """One device per member; a device list with counts also says how many members there are."""
    named = devices.parse_fleet(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return _spread(named, job.fleet.members, "device"), job


def _spread(names: list[str], members: int, what: str) -> tuple[str, ...]:
    if len(names) == 1:
        return tuple(names) * members
    if len(names) != members:
        raise ConfigError(
            f"fleet.{what} names {len(names)} members, the job has {members}",
            f"give one {what} for all, or as many as there are members",
        )
    return tuple(names)


def run(
    planned: Plan,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
) -> dict[str, Any]:
    """Run a planned job in `folder` (made by `runs`); returns its summary, which is also written.

    `watch` is called every `poll_s` seconds. On KeyboardInterrupt everything is ended, the summary
    of what happened is written, and the interrupt is raised again. Raises the hub's or, if all
    members failed, the first member's error. No process is left behind in any case.
    """
    job = planned.job
    runs.write_job(folder, job.to_dict())
    runs.write_environment(folder)
    status, report = "failed", {}
    try:
        profiles = [networks.load(name) for name in planned.networks]
        with networks.emulate(
            profiles, ("127.0.0.1", 0), backend=job.fleet.backend, seed=job.seed
        ) as emulation:
            try:
                status = _Emulated(planned, folder, emulation, watch, poll_s).run()
            finally:
                report = emulation.report()
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        summary = runs.summarise(folder, _extra(planned, folder, report, status))
        runs.write_summary(folder, summary)
    return summary


def _extra(planned: Plan, folder: Path, report: dict[str, Any], status: str) -> dict[str, Any]:
    strategy = strategies.find(planned.job.strategy.name)
    delay = 0
    for record in runs.read_metrics(folder, "round"):
        delay = record.get("delay", 0)
    sources = {devices.joules_source(device) for device in planned.devices}
    return {
        "name": planned.job.name,
        "task": planned.name,
        "metric": planned.metric,
        "better": planned.better,
        "target": planned.target,
        "every": planned.job.strategy.every or strategy.every,
        "emulation": report,
        "delay": delay,
        "joules_source": sources.pop() if len(sources) == 1 else "mixed",
        "status": status,
    }


class _Emulated:
    """The processes of one run, from their start to their end."""

    def __init__(
        self,
        planned: Plan,
        folder: Path,
        emulation: networks.Emulation,
        watch: Callable[[], None],
        poll_s: float,
    ) -> None:
        self._planned = planned
        self._folder = folder
        self._emulation = emulation
        self._watch = watch
        self._poll_s = poll_s
        self._context = processes.fork_server(PRELOAD)
        self._began: Synchronized[float] = self._context.Value("d", 0.0)

    def run(self) -> str:
        """The status of the run; no process is left, whatever happens."""
        children: list[Child] = []
        try:
            hub = self._start("hub", hub_process, self._emulation.hub_link(), self._began)
            children.append(hub)
            for index, device in enumerate(self._planned.devices):
                place = (index, device, self._planned.beside)
                link = self._emulation.link(index)
                children.append(self._start(f"m{index}", member_process, link, self._began, place))
            members = children[1:]
            self._follow(hub, members)
        finally:
            processes.stop_all(children)
        return self._verdict(hub, members)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> Child:
        return processes.start(
            self._context, name, target, self._planned.job, self._folder, *arguments
        )

    def _follow(self, hub: Child, members: list[Child]) -> None:
        """Until all members ended, or the hub failed and nothing can come of it any more."""
        while any(member.running for member in members):
            self._watch()
            if not hub.running and hub.exit_code != 0:
                return
            next(m for m in members if m.running).process.join(self._poll_s)
        hub.process.join(10.0)
        self._watch()

    def _verdict(self, hub: Child, members: list[Child]) -> str:
        began = self._began.value or time.monotonic()
        path = runs.metrics_path(self._folder)
        with MetricsLog(path, "hub", time.monotonic, began) as log:
            for child in (hub, *members):
                if child.error:
                    log.event("error", child.error.strip().splitlines()[-1], about=child.name)
        if hub.error:
            raise EdgetrainError(f"the hub failed: {hub.error}")
        failed = [member for member in members if member.exit_code != 0]
        if len(failed) == len(members):
            reason = next((m.error for m in failed if m.error), "")
            raise EdgetrainError(f"every member failed; the first said: {reason or 'nothing'}")
        return "finished"


# -- what runs in the processes -------------------------------------------------------------------


def hub_process(job: Job, folder: Path, link: Link, began: Synchronized[float]) -> None:
    """The hub of an emulated job."""
    from edgetrain.serve import serve
    from edgetrain.sockets import HubSocket

    link.enter()
    socket = HubSocket(link.address)
    recorder = HubRecorder(folder, time.monotonic, began, socket.traffic)
    try:
        serve(hub_of(job), socket, time.monotonic, recorder)
    finally:
        recorder.close()
        socket.close()


class HubRecorder:
    """Writes what a hub does into a run folder. `began` is the moment training began, once it
    has."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        began: Synchronized[float],
        traffic: Callable[[], Traffic],
    ) -> None:
        self._traffic = traffic
        self._folder = folder
        self._clock = clock
        self._began = began
        self._meter = runs.Meter()
        self._early: list[Note] = []
        self._log: MetricsLog | None = None

    def __call__(self, effect: Note | Closed) -> None:
        """An observer, for `serve`."""
        if isinstance(effect, Closed):
            self._round(effect)
            return
        if effect.event == "started":
            self._began.value = self._clock()
            self._open()
        if self._log is None:
            self._early.append(effect)
        else:
            about = None if effect.member == "hub" else effect.member
            self._log.event(effect.event, effect.reason, about=about)

    def _open(self) -> None:
        self._log = MetricsLog(
            runs.metrics_path(self._folder), "hub", self._clock, self._began.value
        )
        early, self._early = self._early, []
        for note in early:
            self(note)

    def _round(self, closed: Closed) -> None:
        if self._log is not None:
            traffic = self._traffic()
            self._log.round(
                round=closed.round,
                members=closed.members,
                missing=closed.missing,
                weight=closed.weight,
                close_s=closed.open_s,
                sent_bytes=traffic.sent_bytes,
                received_bytes=traffic.received_bytes,
                cpu_s=self._meter.cpu_s,
                peak_bytes=self._meter.peak_bytes,
                delay=closed.delay,
            )

    def close(self) -> None:
        """Write what is left; works twice."""
        if self._log is None and self._early:
            self._began.value = self._clock()
            self._open()
        if self._log is not None:
            self._log.close()


def member_process(
    job: Job,
    folder: Path,
    link: Link,
    began: Synchronized[float],
    place: tuple[int, str, Path | None],
) -> None:
    """A member of an emulated job."""
    from edgetrain.train import Place, train

    link.enter()

    def open_log(name: str) -> MetricsLog:
        return MetricsLog(runs.metrics_path(folder), name, time.monotonic, began.value)

    train(job, Place(*place), link.address, open_log)
