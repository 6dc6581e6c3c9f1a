"""A whole job in virtual time: the hub and the members of `emulate`, without its processes.

What runs on a hub (`serve`) and on a member (`train.Loop`, `Member`, `Link`) runs here as it is, on
an event loop in place of the operating system (`simulator.virtual`), over link models in place of
sockets (`simulator.wires`), and at the pace of its device's profile. Gradients are real.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edgetrain.errors import ConfigError, EdgetrainError, Refused
from edgetrain.exchange.hub.effects import Closed, Note
from edgetrain.exchange.hub.journal import Disk, Journal
from edgetrain.exchange.hub.records import Record, Round
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.messages import Contribute, unpack
from edgetrain.exchange.seam import Request
from edgetrain.fleet import devices, networks
from edgetrain.fleet.networks import Fault
from edgetrain.jobs.building import hub_of, journal_settings
from edgetrain.jobs.lookup import pace_of, task_of
from edgetrain.jobs.plan import Plan
from edgetrain.runs import folder as runs
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.summary import summarise
from edgetrain.training import train
from edgetrain.training.chaos.laws import Witness
from edgetrain.training.chaos.schedule import Happening
from edgetrain.training.loop import Loop
from edgetrain.training.member import Flat, Member, Stepper, release_of
from edgetrain.training.outcome import summary_of
from edgetrain.training.pacing import Pace
from edgetrain.training.recorder import HubRecorder
from edgetrain.training.simulated import local
from edgetrain.training.simulated.virtual import SECOND, Process, World
from edgetrain.training.simulated.wires import MemberWire, SimulatedNetwork
from edgetrain.vectors.vector import Buffer

RETRY_S = 5.0
"""Pause of a device whose name the hub still has for taken."""

LINES = 64
"""Lines of metrics for each step of the fleet, at most: members share theirs out over steps."""

LOOK_S = 1e-4
"""Between two looks at what members have logged there is so much time for each of them."""

SWITCH_S = 0.0005
"""Python's lock changes hands this often between the event loop and the workers that take
gradients: at the usual 5 ms these stand still between two operations of a moment each."""

COLLECT = 50_000, 50, 1000
"""Python's thresholds for garbage collection while members live: they are hundreds of thousands of
objects that stay, and looking through them again and again took a third of the loop's time."""


def run(
    planned: Plan,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
    batched: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
    luck: int = 0,
) -> dict[str, Any]:
    """Simulate a planned job in `folder` (made by `runs`); returns its summary, also written.

    Deterministic: the same job gives the same bits and the same virtual times. `batched` steps
    members together with torch.func.vmap (None: where there are many), which is faster and rounds
    differently; one by one, the parameters are those of the emulated run. `watch` is called every
    `poll_s` real seconds. Another `luck` draws other losses and jitter on the links, and nothing
    else. Raises what a hub or all members failed with, ConfigError.
    """
    job = planned.job
    runs.write_job(folder, job.to_dict())
    runs.write_environment(folder)
    status, report = "failed", {}
    try:
        with _python_for_many():
            simulation = Simulation(planned, folder, batched, luck=luck)
            try:
                simulation.run(watch, poll_s, clock)
                status = simulation.verdict()
            finally:
                report = simulation.report()
                simulation.close()
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        summary = summarise(folder, summary_of(planned, folder, report, status))
        runs.write_summary(folder, summary)
    return summary


@dataclass(frozen=True)
class _Computed:
    """CPU seconds of a simulated machine: what it computed. Memory is not simulated."""

    seconds: Callable[[], float]

    @property
    def cpu_s(self) -> float:
        return self.seconds()

    @property
    def peak_bytes(self) -> int:
        return 0


class _Clock:
    """The clock of one machine: the world's, and what it has jumped ahead."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ahead = 0.0

    def __call__(self) -> float:
        return self._world.clock() + self.ahead


class _FillingDisk:
    """The disk of the journal, which may be full: then a part of what is written still fits."""

    def __init__(self) -> None:
        self.full_until = 0
        self.full = False

    def writev(self, file: int, buffers: Sequence[Buffer]) -> int:
        """See os.writev."""
        if not self.full:
            return os.writev(file, buffers)
        os.write(file, memoryview(buffers[0])[: memoryview(buffers[0]).nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self, folder: Path) -> int:
        """Bytes, as of `journal.Disk`."""
        return 0 if self.full else 1 << 60


class _Told(Journal):
    """A journal that shows what a hub has written, and may tell of."""

    told: Callable[[Round], None]

    def append(self, record: Record) -> None:
        """See Journal."""
        super().append(record)
        if isinstance(record, Round):
            self.told(record)


class Simulation:
    """One run: the world, the network in it, the hub and the members."""

    def __init__(
        self,
        planned: Plan,
        folder: Path,
        batched: bool | None = None,
        journal: Path | None = None,
        happenings: Sequence[Happening] = (),
        luck: int = 0,
    ) -> None:
        """`journal` is where the hub keeps its own (None: nowhere), `happenings` what goes wrong
        besides the job's own faults; to kill the hub needs a journal. `luck` as in `run`."""
        self._planned, self._folder, self._job = planned, folder, planned.job
        self._journal, self._happenings = journal, happenings
        self._digest = planned.job.digest()
        self.witness = Witness()
        self.trained: dict[int, Member] = {}
        """The members, as they are or were last."""
        self.given_up: set[str] = set()
        """Those that the hub could not reach for too long, and that have not come back."""
        self.cut_off: set[int] = set()
        """Those that have been without power, or killed."""
        self.merged: dict[int, Round] = {}
        """What members were told of each round, with payloads of its own."""
        self._disk = _FillingDisk()
        self._book: Journal | None = None
        self._world = World()
        self._clocks = [_Clock(self._world) for _ in range(planned.job.fleet.members)]
        self._hub_clock = _Clock(self._world)
        profiles = {name: networks.load(name) for name in set(planned.networks)}
        self._devices = {name: devices.load(name) for name in set(planned.devices)}
        self._network = SimulatedNetwork(
            self._world,
            [profiles[name] for name in planned.networks],
            message_s=planned.job.hub.message_s,
            seed=planned.job.seed + luck,
            congestion=planned.congestion,
            sites=planned.sites,
            faults=planned.faults,
        )
        torch.set_num_threads(planned.job.train.threads)
        self.task = task_of(planned.job, planned.beside)
        self._paces = self._step_seconds()
        self._gradients = local.choose(self.task, planned.job, batched)
        self._logs: list[MetricsLog] = []
        self._began = 0.0
        self._started = False
        self._recorder = HubRecorder(
            folder,
            self._world.clock,
            self._network.hub.traffic,
            usage=_Computed(lambda: self._network.hub.busy_s),
            on_start=self._on_start,
        )
        self._wires: dict[int, MemberWire] = {}
        if journal is not None:
            self._network.tap = self._saw
        self._hub = self._world.start("hub", self._serve)
        self._members = [self._boot(index) for index in range(planned.job.fleet.members)]

    def _step_seconds(self) -> dict[str, float]:
        """What a step takes on each kind of device of the fleet."""
        torch.manual_seed(self._job.seed)
        model = self.task.model()
        found = {
            device: pace_of(self._job, device, model, self.task)
            for device in sorted(set(self._planned.devices))
        }
        for device, seconds in found.items():
            if not seconds:
                raise ConfigError(
                    f"device '{device}' has no speed that could be simulated",
                    "name a board (device=raspberry-pi-4b), or say pace_s=0.02",
                )
        return found

    def _on_start(self, began: float) -> None:
        self._began = began
        if not self._started:
            self._started = True
            self._network.start_faults()
            for happening in self._happenings:
                when = round((began + happening.at_s) * SECOND)
                self._world.at(when, lambda h=happening: self._let_happen(h))  # type: ignore[misc]
        if not self._planned.presence.is_steady:
            for index in range(len(self._members)):
                self._await_absence(index, self._planned.presence.of(index))

    def _await_absence(self, index: int, absences: Iterator[tuple[float, float]]) -> None:
        """Let a device go and come back as it is said, as long as its member has work."""
        times = next(absences, None)
        if times is None:
            return
        goes, comes = (round((self._began + seconds) * SECOND) for seconds in times)

        def go() -> None:
            if not self._members[index].over:
                self._cut_power(index, comes)
                self._world.at(comes, lambda: self._await_absence(index, absences))

        self._world.at(goes, go)

    # -- what goes wrong ---------------------------------------------------------------------------

    def _let_happen(self, happening: Happening) -> None:
        """Do what a schedule says, if who it strikes is still there."""
        until = self._world.now + round(happening.for_s * SECOND)
        struck = happening.members
        match happening.kind:
            case "hub":
                self._crash_hub(until)
            case "disk":
                self._fill_disk(until)
            case "link" | "partition":
                self._network.strike(Fault("down", 0.0, happening.for_s, struck))
            case "slow":
                self._network.strike(Fault("rate", 0.0, happening.for_s, struck, 0.05))
            case "clock":
                clock = self._clocks[struck[0]] if struck else self._hub_clock
                clock.ahead += happening.for_s
            case "power" | "kill":
                for index in struck:
                    self._cut_power(index, until, told=happening.kind == "kill")
            case "pause":
                for index in struck:
                    self._members[index].hold(until)
            case "cut" | "corrupt-up" | "corrupt-down":
                for index in struck:
                    self._hurt_connection(index, happening.kind)

    def _hurt_connection(self, index: int, kind: str) -> None:
        if index not in self._wires or self._members[index].over:
            return
        if kind == "cut":
            self._wires[index].cut()
        else:
            self._wires[index].damage(upwards=kind == "corrupt-up")

    def _crash_hub(self, until: int) -> None:
        # A hub that goes on without its journal cannot be killed without a loss: the job said so.
        if self._hub.over or (self._book is not None and self._book.tail is None):
            return
        self._hub.kill()
        self._network.hub.crash()
        self._world.at(until, self._start_hub)

    def _start_hub(self) -> None:
        """Unless it has been started meanwhile: by hand, or as there is room again."""
        if self._hub.over and self._network.hub.down:
            self._network.restart_hub()
            self._hub = self._world.start("hub", self._serve, self._world.now)

    def _fill_disk(self, until: int) -> None:
        disk = self._disk
        disk.full, disk.full_until = True, max(disk.full_until, until)

        def free() -> None:
            disk.full = self._world.now < disk.full_until

        self._world.at(until, free)

    def _cut_power(self, index: int, until: int, *, told: bool = False) -> None:
        """`told`: the machine lives on, and closes the connection of the process that died."""
        if self._members[index].over:
            return
        self.cut_off.add(index)
        if index in self._wires:
            wire = self._wires[index]
            wire.die() if told else wire.power_off()
        self._members[index].kill()
        self._world.at(until, lambda: self._power_on(index))

    def _power_on(self, index: int) -> None:
        job_over = self._hub.over and not self._network.hub.down
        if self._members[index].over and not job_over:
            self._members[index] = self._boot(index)

    def _boot(self, index: int) -> Process:
        return self._world.start(f"m{index}", lambda: self._train(index), self._world.now)

    # -- what runs in virtual time -----------------------------------------------------------------

    def _observe(self, effect: Note | Closed) -> None:
        if isinstance(effect, Note):
            if effect.event == "gone":
                self.given_up.add(effect.member)
            elif effect.event in ("joined", "back"):
                self.given_up.discard(effect.member)
        self._recorder(effect)

    def _serve(self) -> None:
        source = local.noise_of(self._job, "hub")
        hub, clock = hub_of(self._job, source=source), self._hub_clock
        if self._journal is None:
            serve(hub, self._network.hub, clock, self._observe)
            return
        disk = Disk(self._disk.writev, self._disk.free)
        self._book = journal = _Told(self._journal, journal_settings(self._job), disk=disk)
        journal.told = self._was_told
        try:
            if journal.state is not None:
                hub.restore(journal.state, journal.records(), clock())
            serve(hub, self._network.hub, clock, self._observe, journal=journal)
        except EdgetrainError:
            if not self._disk.full:
                raise
            # As a service manager would: started again, once there is room.
            self._network.hub.crash()
            self._world.at(self._disk.full_until + 1, self._start_hub)
        finally:
            journal.close()

    def _was_told(self, record: Round) -> None:
        payloads = tuple(bytes(payload) for payload in record.reply)
        self.merged[record.round] = replace(record, reply=payloads)

    def _saw(self, member: int, frames: Sequence[Buffer]) -> None:
        message = unpack(list(frames))
        if isinstance(message, Contribute):
            self.witness.saw(f"m{member}", message.round, message.part, message.payload)

    def _train(self, index: int) -> None:
        job, world = self._job, self._world
        device = self._planned.devices[index]
        place = train.Place(index, device, self._planned.beside)
        flat, optimizer, work = self._gradients.member(index)
        clock = self._clocks[index]
        pace = Pace(
            devices.StepTimes(self._devices[device], self._paces[device], job.seed, index),
            clock,
            world.sleep,
        )
        energy = devices.Energy(self._devices[device], world.clock, Path("/nonexistent"))
        request = train.request_of(job, place, self.task, self._digest)
        with self._joined(index, flat, optimizer, request) as member:
            self.trained[index] = member
            began = world.clock()
            usage = _Computed(lambda: world.clock() - began - member.wait_s)
            with self._log(member.name) as log:
                Loop(
                    job, index, work, member, log, pace, usage, energy, clock,
                    max(1, job.fleet.members // LINES),
                ).run()  # fmt: skip

    def _joined(self, index: int, flat: Flat, optimizer: Stepper, request: Request) -> Member:
        """A member that has joined. One that the hub still takes for there, after a loss of power
        that nobody noticed, tries again, as a device's service does."""
        while True:
            wire = self._wires[index] = self._network.connect(index)
            try:
                release = release_of(self._job.privacy, local.noise_of(self._job, index))
                return Member(
                    wire, flat, optimizer, request, clock=self._clocks[index], release=release
                )
            except Refused as refused:
                if refused.code != "name":
                    raise
            self._world.sleep(RETRY_S)

    @contextlib.contextmanager
    def _log(self, name: str) -> Iterator[MetricsLog]:
        path = runs.metrics_path(self._folder)
        # Written when the buffer is full, or someone looks: see `run`.
        log = MetricsLog(path, name, self._world.clock, self._began, flush_s=float("inf"))
        self._logs.append(log)
        with log:
            yield log

    # -- driving it --------------------------------------------------------------------------------

    def run(
        self,
        watch: Callable[[], None],
        poll_s: float,
        clock: Callable[[], float],
        most_s: float = float("inf"),
    ) -> None:
        """Until every process is over, nothing can happen any more, or `most_s` virtual seconds
        have passed."""
        # A look at the files of a large fleet takes a while: not more than a hundredth of the time.
        poll_s = max(poll_s, len(self._members) * LOOK_S)
        step, looked = self._world.step, clock()
        turns = 0
        while self._world.now < most_s * SECOND and step():
            turns += 1
            if turns & 63 or clock() - looked < poll_s:
                continue
            for log in self._logs:
                log.flush()
            watch()
            looked = clock()
            if self._hub.over and all(member.over for member in self._members):
                break
        watch()

    def verdict(self) -> str:
        """The status of the run; raises what it failed with."""
        hub, members = self._hub, self._members
        with MetricsLog(
            runs.metrics_path(self._folder), "hub", self._world.clock, self._began
        ) as log:
            for process in (hub, *members):
                if process.error:
                    log.event("error", _said(process), about=process.name)
        if hub.error:
            raise hub.error
        failed = [member for member in members if member.error]
        for (
            member
        ) in failed:  # nothing that a real member could meet: a mistake in the task or here
            if member.error and not isinstance(member.error, EdgetrainError):
                raise member.error
        if len(failed) == len(members):
            raise EdgetrainError(f"member {failed[0].name}: {_said(failed[0])}")
        # Whom the hub gave up, and who finds it gone: a device waits ten minutes, and says so.
        late = self.given_up if hub.over else set()
        stuck = [member.name for member in members if not member.over and member.name not in late]
        if stuck:
            raise EdgetrainError(
                f"the simulation stands still: {', '.join(stuck[:5])} wait for ever"
            )
        return "finished"

    @property
    def seconds(self) -> float:
        """Virtual seconds of training so far."""
        return self._world.clock() - self._began

    def report(self) -> dict[str, Any]:
        """What belongs in the run folder in place of the emulation's report."""
        return {
            "backend": "simulated",
            "reason": self._gradients.reason,
            "congestion": self._network.congestion,
            "late_ms_p99": None,
            "late_limit_ms": None,
            "trusted": None,
            "events": self._world.events,
        }

    def close(self) -> None:
        """End what still runs, without a word to anyone."""
        for process in (*self._members, self._hub):
            process.kill()
        self._recorder.close()
        for log in self._logs:
            log.close()
        self._gradients.close()


@contextlib.contextmanager
def _python_for_many() -> Iterator[None]:
    """Settings of the whole process, for as long as members live."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(*COLLECT)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


def _said(process: Process) -> str:
    error = process.error
    text = str(error) if isinstance(error, EdgetrainError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[-1] if text.strip() else type(error).__name__
