"""One schedule over a fleet of real processes: start it, do what the schedule says, judge the end.

There is a hub process (encrypted, its journal on the disk) and a process for each member, which
connects through a forwarder of its own. The schedule is in seconds of this machine. `laws` judges.
Linux only: it needs signals, limits and death signals of processes.

A happening begins, and heals `for_s` later; who notices that a process is down starts it again:

    state of the hub's process   event                                        next state
    runs                         hub, blackout: SIGKILL                       down until it heals
    runs                         disk: its files may not grow, and it ends    down until it heals
    down                         nothing keeps it down, RESTART_S have passed runs, resumed
    runs                         the job is over (exit status 0)              ended

    state of a member's process  event                                        next state
    runs                         kill, power, blackout: SIGKILL               down until it heals
    runs                         pause: SIGSTOP; SIGCONT as it heals          runs
    runs                         it could not join (START_AGAIN)              started at once
    down                         it heals, and the hub has work               runs, a life later
    runs                         it came to its end, and left an `End`        ended

The rest is done to a forwarder (link, partition, slow, cut, corrupt) or a clock, and heals there,
or to the hub from outside (strangers, frames: see `strangers.Strangers`), or said to it over the
socket in its run folder (control-pause, control-remove, control-stop: see `people.People`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chaos import hub, ledger, member
from chaos.clock import Clock
from chaos.forwarder import Forwarder
from chaos.hub import HubProcess, free_port
from chaos.laws import Ended, Judged, Merging, Outcome, Witness, judge_hubs
from chaos.ledger import End, Given
from chaos.member import START_AGAIN, Post
from chaos.people import People
from chaos.schedule import Happening
from chaos.strangers import Strangers
from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.steering import STOPPED
from edgetrain.exchange.keys.keyring import Keyring
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.messages import CODES
from edgetrain.exchange.zeromq.curve import new_pair
from edgetrain.fleet import devices, networks
from edgetrain.jobs.job import Job
from edgetrain.jobs.resolved import look_up
from edgetrain.runs.folder import write_job
from edgetrain.training import processes
from edgetrain.training.hub import HubRequest
from edgetrain.training.orders import give_order
from edgetrain.training.processes import Child
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.vector import Vector

PATIENT_S = 20.0
"""The hub.lost_after_s for which simulated schedules are used unchanged: see `share_of`."""

POLL_S = 0.01
RESTART_S = 0.3
"""Seconds between two starts of the hub, at least."""
LAST_S = 10.0
"""Seconds that the hub may go on after the last member, and members after the hub."""
SLOW_VECTOR_S = 0.5
"""Seconds that a vector of the model takes on a slow link."""


_ENDS_MEMBERS = ("kill", "power", "blackout", "control-remove")
_KEEP_DOWN = ("hub", "disk", "blackout")
"""Kinds that keep the hub down until they heal."""


def share_of(job: Job) -> float:
    """The factor from a simulated schedule's times to those of real processes: it shrinks with the
    patience of the job's hub. With hub.lost_after_s = 2 a link is down for 2 s instead of 20.

    >>> from edgetrain.jobs.reading import load
    >>> share_of(load(None, ["lost_after_s=2"]))
    0.1
    """
    return min(1.0, job.hub.lost_after_s / PATIENT_S)


@dataclass(frozen=True)
class Setting:
    """The fleet that every schedule is run with. ConfigError for a job that cannot be judged."""

    job: Job
    task: bool = False
    """Whether members train the job's task; otherwise they are stand-ins."""
    beside: Path | None = None
    """The folder of the job file."""
    devices: tuple[str, ...] = ()
    """A profile for each member; (): this machine."""
    networks: tuple[str, ...] = ()
    """A profile for each member's link; (): no emulated links."""
    program: tuple[str, ...] = hub.OURS
    """The command that runs as the hub, see `HubProcess`."""

    def __post_init__(self) -> None:
        if Merging.of(look_up(self.job)).search is not None:
            raise ConfigError(
                f"chaos with real processes and {self.job.strategy.name}: a stand-in answers no "
                "work, and the verdict reads what members contribute",
                "leave out --processes",
            )
        if self.job.hub.on_disk_full != "stop":
            raise ConfigError(
                "chaos with real processes and hub.on_disk_full = 'go on': the verdict is over the "
                "journal, which then has gaps",
                "leave it at 'stop'",
            )

    @property
    def is_linked(self) -> bool:
        """Whether members' links are emulated ones."""
        return any(name != "none" for name in self.networks)


def fit(job: Job) -> Job:
    """The job as it is run here: the hub takes no snapshots, so its journal has every round."""
    return replace(job, hub=replace(job.hub, snapshot_every=10**9))


def run(
    setting: Setting,
    folder: Path,
    seed: int,
    happenings: Sequence[Happening],
    patience_s: float,
    watch: Callable[[Happening], None] = lambda happening: None,
) -> Outcome:
    """Run one schedule in `folder`, which exists and is empty; its files stay.

    `watch` is called with each happening as it begins. The outcome has only those that began before
    the job's end. After `patience_s` seconds, processes that still run are ended. No process and no
    thread is left, whatever happens. Raises EdgetrainError if the fleet did not start.
    """
    with ExitStack() as stack:
        fleet = _Fleet(setting, folder, stack)
        began = time.monotonic()
        begun = fleet.live(happenings, patience_s, watch)
        seconds = time.monotonic() - began
    rounds, broken = fleet.judged()
    return Outcome(seed, tuple(happenings[:begun]), rounds, seconds, tuple(broken))


@dataclass
class _Member:
    """One member: its process, which may be started several times (lives), and what is around."""

    post: Post
    """What its latest life was started with."""
    way: Forwarder
    clock: Clock
    child: Child | None = None
    killed: bool = False

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.running

    @property
    def waits_to_join(self) -> bool:
        """Whether its process ended because it could not join yet."""
        child = self.child
        return child is not None and not child.running and child.exit_code == START_AGAIN

    @property
    def end(self) -> End | None:
        """How it ended; None: it has not, or it was killed."""
        return End.read(self.post.path("end"))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.child is not None and self.child.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.process.pid or 0, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self.child is not None and self.child.running:
            self.killed = True
            self.child.process.kill()
            self.child.process.join()

    def forgive(self) -> None:
        """If it ended because people removed it, it may be started again."""
        if self.end is not None and CODES["removed"] in self.end.error:
            self.post.path("end").unlink()

    def given(self) -> Iterator[Given]:
        """The entries of its ledgers, life after life."""
        for life in range(1, self.post.life + 1):
            yield from ledger.read(self.post.ledger(life))


class _Fleet:
    """The processes of one schedule; `stack` ends them."""

    def __init__(self, setting: Setting, folder: Path, stack: ExitStack) -> None:
        self._setting, self._folder, self._job = setting, folder, setting.job
        self._context = processes.fork_server(_preload(setting))
        ring = Keyring(folder / "keys")
        hub_key = ring.init(new_pair).public
        self._clock = stack.enter_context(closing(Clock(folder / "hub.clock")))
        to, bind = self._network(stack)
        self._hub_request = HubRequest(
            self._job, bind, keys=ring.path, any_job=not setting.task, runs=folder / "runs"
        )
        self._members = [
            self._member(index, to[index], ring, hub_key, stack) for index in range(len(to))
        ]
        outsider = new_pair()
        ring.allow(outsider.public, "outsider")
        self._strangers = stack.enter_context(
            closing(Strangers(split_address(bind), Credentials(outsider, hub_key)))
        )
        self._people = People()
        self._healing: list[tuple[float, Happening]] = []
        """Happenings that have begun, and the time.monotonic() at which each heals."""
        write_job(folder, self._job.to_dict())
        self._hub = self._start_hub()
        stack.callback(lambda: self._hub.kill())
        stack.callback(self._end_members)
        self._hub.when("members join")
        for each in self._members:
            self._start(each)
        self._hub.when("hub started")
        (self._run_folder,) = (folder / "runs").iterdir()
        self._hub_request = replace(self._hub_request, resume=self._run_folder)
        self._initial = self._first_base()

    # -- starting and ending ------------------------------------------------------------------

    def _network(self, stack: ExitStack) -> tuple[list[tuple[str, int]], str]:
        """Host and port that each forwarder connects to, through an emulated link if the job has
        any; and the address that the hub listens at."""
        members = self._job.fleet.members
        if not self._setting.is_linked:
            here = ("127.0.0.1", free_port())
            return [here] * members, f"tcp://127.0.0.1:{here[1]}"
        links = stack.enter_context(
            networks.emulate(
                [networks.load(name) for name in self._setting.networks],
                backend="stream",
                seed=self._job.seed,
                congestion=self._job.fleet.congestion,
            )
        )
        to = [split_address(links.attachment(index).address) for index in range(members)]
        return to, links.hub_address

    def _member(
        self, index: int, to: tuple[str, int], ring: Keyring, hub_key: bytes, stack: ExitStack
    ) -> _Member:
        pair = new_pair()
        ring.allow(pair.public, f"device-{index}")
        way = stack.enter_context(closing(Forwarder(to)))
        post = Post(
            job=self._job,
            task=self._setting.task,
            beside=self._setting.beside,
            device=self._setting.devices[index] if self._setting.devices else devices.HOST,
            index=index,
            life=0,
            hub=f"tcp://127.0.0.1:{way.port}",
            credentials=Credentials(pair, hub_key),
            folder=self._folder,
        )
        return _Member(post, way, stack.enter_context(closing(Clock(post.path("clock")))))

    def _start_hub(self) -> HubProcess:
        return HubProcess(self._folder, self._hub_request, self._setting.program)

    def _start(self, each: _Member) -> None:
        if each.child is not None:
            each.child.stop(0.0)
        each.post = replace(each.post, life=each.post.life + 1)
        each.child = processes.start(self._context, each.post.name, member.run, each.post)

    def _end_members(self) -> None:
        for each in self._members:
            if each.child is not None:
                each.child.process.kill()
                each.child.stop(0.0)

    def _first_base(self) -> Vector:
        """The base that the first member sent, float32 [elements]."""
        parts = {g.part: g.payload for m in self._members for g in m.given() if g.round is None}
        return np.frombuffer(b"".join(parts[part] or b"" for part in sorted(parts)), np.float32)

    # -- living -------------------------------------------------------------------------------

    def live(
        self,
        happenings: Sequence[Happening],
        patience_s: float,
        watch: Callable[[Happening], None],
    ) -> int:
        """Let happenings begin and heal until every process has ended; how many have begun."""
        began = over = time.monotonic()
        waiting = list(happenings)
        while self._healing or self._busy():
            now = time.monotonic()
            if now - began > patience_s or now - over > LAST_S:
                break
            while waiting and began + waiting[0].at_s <= now:
                happening = waiting.pop(0)
                watch(happening)
                self._begin(happening)
                self._healing.append((now + happening.for_s, happening))
            for item in [item for item in self._healing if item[0] <= now]:
                self._healing.remove(item)
                self._heal(item[1])
            if self._healing or self._hub_has_work():
                over = now
            self._restart_hub()
            self._restart_members()
            self._tell_hub()
            time.sleep(POLL_S)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._hub.process.wait(LAST_S)
        return len(happenings) - len(waiting)

    def _busy(self) -> bool:
        return any(m.running or (m.waits_to_join and self._hub_has_work()) for m in self._members)

    def _hub_has_work(self) -> bool:
        """Whether the hub runs, or will be started again."""
        return self._hub.process.poll() != 0

    def _restart_hub(self) -> None:
        """Start the hub again if it is down and nothing keeps it down, as a service manager does.
        After a full disk it may end some time after the disk has room again."""
        kept_down = any(happening.kind in _KEEP_DOWN for _, happening in self._healing)
        just_now = time.monotonic() - self._hub.began < RESTART_S
        if self._hub.process.poll() and not kept_down and not just_now:
            self._hub = self._start_hub()

    def _restart_members(self) -> None:
        for each in self._members:
            if each.waits_to_join and self._hub_has_work():
                self._start(each)

    def _tell_hub(self) -> None:
        """One order, if people have one and the hub is there to hear it."""
        for order in self._people.orders():
            try:
                order.answer(give_order(self._run_folder, list(order.words)))
            except ConfigError as error:
                if "no hub runs" not in error.message:
                    order.refuse(error.message)
            except EdgetrainError:  # it ended before it had answered: tell it again
                pass

    def _begin(self, happening: Happening) -> None:
        self._people.begin(happening)
        match happening.kind:
            case "hub" | "blackout":
                self._hub.kill()
            case "strangers":
                self._strangers.crowd(self._hub.process.pid)
            case "frames":
                self._strangers.send_endless()
            case "disk":
                self._limit_files(self._journal_bytes() + 2 * self._initial.size + 1000)
            case "clock" if not happening.members:
                self._clock.jump(happening.for_s)
        for each in (self._members[index] for index in happening.members):
            match happening.kind:
                case "kill" | "power" | "blackout":
                    each.kill()
                case "pause":
                    each.signal(signal.SIGSTOP)
                case "clock":
                    each.clock.jump(happening.for_s)
                case "link" | "partition":
                    each.way.hold(happening.for_s)
                case "slow":
                    each.way.slow(happening.for_s, 4 * self._initial.size / SLOW_VECTOR_S)
                case "cut":
                    each.way.cut()
                case "corrupt-up" | "corrupt-down":
                    each.way.damage(upwards=happening.kind == "corrupt-up")

    def _heal(self, happening: Happening) -> None:
        """Undo what does not end by itself; forwarders and clocks do."""
        self._people.heal(happening)
        if happening.kind == "disk":
            self._limit_files(resource.RLIM_INFINITY)
        if happening.kind == "strangers":
            self._strangers.go()
        for each in (self._members[index] for index in happening.members):
            if happening.kind == "pause":
                each.signal(signal.SIGCONT)
            if happening.kind == "control-remove":
                each.forgive()
            dead = happening.kind in _ENDS_MEMBERS and not each.running
            if dead and each.end is None and self._hub_has_work():
                self._start(each)

    def _journal_bytes(self) -> int:
        logs = (self._run_folder / "journal").glob("*.log")
        return max(log.stat().st_size for log in logs)

    def _limit_files(self, most_bytes: int) -> None:
        """Limit the size of the hub's files: a record is cut in the middle, as by a full disk."""
        if self._hub.process.poll() is None:
            limits = (most_bytes, resource.RLIM_INFINITY)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._hub.process.pid, resource.RLIMIT_FSIZE, limits)

    # -- judging ------------------------------------------------------------------------------

    def judged(self) -> tuple[int, list[str]]:
        """The number of rounds, and the broken laws. Call it when every process has ended."""
        witness, broken, ended = Witness(), [], {}
        for each in self._members:
            name, end = each.post.name, each.end
            self._testify(each, witness)
            if end is not None and end.base:
                ended[name] = Ended(end.applied, end.base)
            elif end is not None and self._were_told(name, end.error):
                pass
            elif not each.killed or (end is not None and "is over" not in end.error):
                said = "it never ended" if end is None else end.error
                hub_said = " / ".join(line for _, line in self._hub.said[-3:])
                broken.append(f"{name} did not come to its end: {said[:300]}; the hub: {hub_said}")
        with closing(Journal(self._run_folder / "journal")) as journal:
            rounds = list(journal.replies(0))
            layout = journal.state.layout if journal.state else b""
        merging = Merging.of(look_up(self._job)).bound(
            layouts.read(layout, self._initial.size) if layout else ()
        )
        people = self._people
        steady = {m.post.name for m in self._members if not m.killed} - people.removed
        judged = [Judged(tuple(rounds), witness, merging, self._initial)]
        return len(rounds), broken + judge_hubs(judged, ended, steady, stopped_at=people.stopped_at)

    def _were_told(self, name: str, error: str) -> bool:
        """Whether this error is what people told the hub to say to this member."""
        removed = name in self._people.removed and CODES["removed"] in error
        return removed or (self._people.stopped_at is not None and STOPPED in error)

    def _testify(self, each: _Member, witness: Witness) -> None:
        for given in each.given():
            if given.round is not None and given.payload is None:
                witness.promised(each.post.name, given.round)
            elif given.round is not None and given.payload is not None:
                witness.saw(each.post.name, given.round, given.part, given.payload)


def _preload(setting: Setting) -> tuple[str, ...]:
    """Modules that the fork server imports, so that members' processes start quickly."""
    trained = (
        ("edgetrain.training.member.train", "edgetrain.training.member.member")
        if setting.task
        else ()
    )
    return ("chaos.member", "numpy.random", *trained)
