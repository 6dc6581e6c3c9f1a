"""A whole job on one machine: a hub process, member processes, an emulated network between them.

`serve` and `train` say what each process does, `processes` how it is started, `fleet.networks` how
links are emulated. Here they are put together, watched and taken down again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError, EdgetrainError, Refused
from edgetrain.fleet import networks
from edgetrain.fleet.devices import SERVERS
from edgetrain.fleet.networks import Attachment
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.rules import refuse_gateways
from edgetrain.runs.environment import utc
from edgetrain.runs.folder import metrics_path
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.training import processes
from edgetrain.training.outcome import at_gateways, recorded, write_errors
from edgetrain.training.processes import Child

PRELOAD = (
    __name__,
    "edgetrain.training.member.train",
    "edgetrain.tasks.weights",
    "edgetrain.exchange.hub.serve",
    "edgetrain.exchange.hub.protocol",
)

AGAIN = 10
"""Times that a group whose leader was killed is started again."""
_HUB_ENDS_S = 10.0
"""Seconds that a hub may take to end after its members."""


def warm_up() -> None:
    """Start the fork server, which imports torch in the background while this process plans."""
    processes.fork_server(PRELOAD)
    forkserver.ensure_running()


def run(
    planned: Resolved,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
) -> dict[str, Any]:
    """Run a planned job in `folder` (made by `runs`); returns its summary, which is also written.

    Its status is "incomplete" if some members failed, and "finished" if they were only killed.
    `watch` is called every `poll_s` seconds. On KeyboardInterrupt all processes are ended, the
    summary of what happened is written, and the interrupt is raised again. Raises the error of the
    hub or, if all members failed, of the first member. No process is left behind in any case.
    """
    job = planned.job
    if job.fleet.placement:
        from edgetrain.training.pipelined.planning import plan_stages

        planned = replace(planned, stages=plan_stages(planned))
    if not planned.presence.is_steady:
        raise ConfigError(
            "absences and online_s: devices that come and go are simulated only",
            "`edgetrain simulate` does it; or leave them out",
        )
    refuse_gateways(job)
    with (
        recorded(planned, folder) as outcome,
        networks.emulate(
            planned.links,
            ("127.0.0.1", 0),
            backend=job.fleet.backend,
            seed=job.seed,
            congestion=planned.congestion,
            sites=planned.all_sites,
            faults=planned.faults,
            hubs=planned.all_hub_links,
            nat=planned.nat,
        ) as emulation,
    ):
        emulated = _Emulated(planned, folder, emulation, watch, poll_s)
        try:
            outcome.status = emulated.run()
        finally:
            outcome.network = emulation.report()
            outcome.extra["began"] = emulated.began
            outcome.extra |= emulated.carried_at_sites()
    return outcome.summary


class _Emulated:
    """The processes of one run, from their start to their end."""

    def __init__(
        self,
        planned: Resolved,
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
        self._carried = [self._context.Array("d", 2) for _ in range(planned.gateways)]
        """Bytes that each gateway has sent and received at its site."""
        self._again = Counter[int]()
        """How often the process of each group was started again."""

    @property
    def began(self) -> str | None:
        began = self._began.value
        return utc(time.monotonic() - began) if began else None

    def carried_at_sites(self) -> dict[str, Any]:
        return at_gateways([each[:] for each in self._carried])

    def run(self) -> str:
        """Run to the end; returns the status. No process is left, whatever happens."""
        children: list[Child] = []
        members: list[Child] = []
        try:
            for number in range(self._planned.hubs):
                where = self._emulation.hub_attachment(number)
                name = f"hub {number}" if number else "hub"
                children.append(self._start(name, hub_process, where, self._began, number))
            above, first = self._emulation.hub_address, len(self._planned.hub_links)
            for site, carried in enumerate(self._carried):
                where = self._emulation.hub_attachment(first + site)
                name = f"gateway {site}"
                children.append(self._start(name, gateway_process, where, above, site, carried))
            hubs = list(children)
            members += [self._start_member(index) for index in range(len(self._planned.devices))]
            self._follow(hubs, members)
        finally:
            processes.stop_all([*children, *members])
        began = self._began.value or time.monotonic()
        errors = [
            (child.name, child.error.strip().splitlines()[0], child.failed_at)
            for child in (*hubs, *members)
            if child.error
        ]
        write_errors(self._folder, began, errors)
        for hub in hubs:
            if hub.error:
                raise EdgetrainError(f"the {hub.name} failed: {hub.error}")
        failed = [member for member in members if member.exit_code != 0]
        is_over = len(failed) == len(members) or (failed and self._planned.stages is not None)
        if is_over or not self._began.value:
            told = [m for m in failed if m.error]
            if not told:
                raise EdgetrainError("no member came to its end, and none reported why")
            raise EdgetrainError(f"member {told[0].name}: {told[0].error}")
        # One that was killed is lost, as by design; one that failed was to train, and did not.
        return "incomplete" if any(member.error for member in failed) else "finished"

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> Child:
        return processes.start(self._context, name, target, self._planned, self._folder, *arguments)

    def _start_member(self, index: int) -> Child:
        place = (index, self._planned.devices[index], self._planned.beside)
        attachment = self._emulation.attachment(index)
        return self._start(f"m{index}", member_process, attachment, self._began, place)

    def _follow(self, hubs: list[Child], members: list[Child]) -> None:
        """Wait until all members have ended, or a hub has failed and they cannot go on."""
        faults_wait, strikes = True, list(self._planned.faults)
        strikes.sort(key=lambda fault: fault.at_s)
        while running := [member for member in members if member.running]:
            # A service manager would start the command of a group again whose leader was killed,
            # and of a stage
            for index, device in enumerate(self._planned.devices):
                is_kept = device == SERVERS or self._planned.stages is not None
                code = members[index].exit_code if is_kept else None
                if code is not None and code < 0 and self._again[index] < AGAIN:
                    self._again[index] += 1
                    members[index].stop()
                    members[index] = self._start_member(index)
            if faults_wait and self._began.value:
                self._emulation.start_faults(self._began.value)
                faults_wait = False
            while self._began.value and strikes and strikes[0].at_s <= self._elapsed_s:
                path, clock = metrics_path(self._folder), time.monotonic
                with MetricsLog(path, "hub", clock, self._began.value) as log:
                    log.event("fault", str(strikes.pop(0)))
            self._watch()
            if any(not hub.running and hub.exit_code != 0 for hub in hubs):
                return
            failed = sum(bool(member.exit_code) for member in members)
            if failed and self._planned.stages is not None:
                return  # the other stages would wait for it for ever
            if not self._began.value and len(members) - failed < self._planned.job.first_members:
                return  # training cannot begin without them: the others would wait for ever
            running[0].process.join(self._poll_s)
        patience = time.monotonic() + _HUB_ENDS_S
        while (running := [hub for hub in hubs if hub.running]) and time.monotonic() < patience:
            running[0].process.join(self._poll_s)
            self._watch()
        self._watch()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began.value


# -- what runs in the processes -------------------------------------------------------------------


def hub_process(
    planned: Resolved,
    folder: Path,
    attachment: Attachment,
    began: Synchronized[float],
    number: int,
) -> None:
    from edgetrain.exchange.hub.serve import serve
    from edgetrain.exchange.zeromq.hub_socket import HubSocket
    from edgetrain.training.fallback import SteppingIn, Told
    from edgetrain.training.hub_recorder import HubRecorder
    from edgetrain.training.orders import taking_orders

    attachment.enter()
    socket = HubSocket(attachment.address)

    def on_start(at: float) -> None:
        began.value = at

    recorder = HubRecorder(folder, time.monotonic, socket.traffic, on_start=on_start)
    recorder.reducers = planned.reducers_in_words()
    observe = (lambda effect: None) if number else recorder
    told = Told(planned.job, socket.address, folder.resolve(), planned.beside, None, False)
    beside = SteppingIn(told, time.monotonic, observe)
    if planned.stages is not None:
        from edgetrain.exchange.pipeline.relay import Relay
        from edgetrain.exchange.pipeline.serve import relay_messages
        from edgetrain.training.pipelined.hub import terms_of

        try:
            relay_messages(Relay(terms_of(planned.job)), socket, time.monotonic, recorder)
        finally:
            recorder.close()
            socket.close()
        return
    hub, where = hub_of(planned, number=number), taking_orders(folder)
    try:
        with contextlib.nullcontext(tuple) if number else where as orders:
            serve(hub, socket, time.monotonic, beside, orders=orders, look=beside.look)
    finally:
        beside.close()
        recorder.close()
        socket.close()


def gateway_process(
    planned: Resolved,
    folder: Path,
    attachment: Attachment,
    above: str,
    number: int,
    carried: SynchronizedArray[float],
) -> None:
    """The gateway of a site of an emulated job. It keeps no journal and no run folder."""
    from edgetrain.exchange.gateway.site import SitePart
    from edgetrain.exchange.hub.effects import Closed, Note, Observed
    from edgetrain.exchange.hub.serve import serve
    from edgetrain.exchange.zeromq.hub_socket import HubSocket
    from edgetrain.training.gateway import Uplink

    attachment.enter()
    members = len(planned.sites[number].members)
    socket = HubSocket(attachment.address)
    uplink = Uplink([above], f"site {number}", members, time.monotonic)
    uplink.wake = socket.wake_for
    site = hub_of(planned, site=members, part=SitePart(uplink.name, uplink.connect))

    def observe(effect: Observed) -> None:
        if isinstance(effect, Closed | Note):  # a connection is counted while it stands
            traffic = socket.traffic()
            carried[:] = [traffic.sent_bytes, traffic.received_bytes]

    try:
        serve(site, socket, time.monotonic, observe)
    finally:
        uplink.close(site.finished, lambda line: None)
        socket.close()


def member_process(
    planned: Resolved,
    folder: Path,
    attachment: Attachment,
    began: Synchronized[float],
    place: tuple[int, str, Path | None],
) -> None:
    from edgetrain.training.member.train import Place, train

    attachment.enter()

    def open_log(name: str, at: float) -> MetricsLog:
        return MetricsLog(metrics_path(folder), name, time.monotonic, began.value)

    train_one: Callable[..., None] = train
    if place[1] == SERVERS:
        from edgetrain.training.servers.leading import train_joined

        train_one = partial(train_joined, folder=folder / f"m{place[0]}")
    if planned.stages is not None:
        from edgetrain.training.pipelined.member import join_pipeline

        join_pipeline(planned, Place(*place), attachment.hubs, open_log)
        return
    listen = f"tcp://{attachment.host}:0" if attachment.host else ""
    gateway = planned.gateway_of(place[0])
    hubs = attachment.hubs if gateway is None else attachment.hubs[gateway:]
    hub = hubs if planned.hubs > 1 else hubs[0]
    try:
        train_one(planned, Place(*place, listen=listen), hub, open_log, keeps_model=True)
    except Refused as refused:
        if refused.code not in ("ended", "removed"):  # what people told the hub is no failure
            raise
