"""A device of a simulation: a real member in a process in virtual time.

state     event                                  next state
running   `cut_power(until)`                     off; running at `until`, as a newcomer
running   the job is done, or the member failed  over
off       the time has come                      running, unless the hub's job is over
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edgetrain.errors import Refused
from edgetrain.exchange.member.doubled import Doubled
from edgetrain.exchange.member.driver import Flat, Stepper
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.ranges import RangedExchange
from edgetrain.exchange.member.work import RangedWork, WorkLink
from edgetrain.exchange.seam import Exchange, Request
from edgetrain.exchange.transport import Traffic
from edgetrain.fleet.devices.energy import Energy
from edgetrain.fleet.devices.speed import StepTimes
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.shares import shares_of
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks import Task
from edgetrain.tasks.own_data import evaluation_of
from edgetrain.training.member.drawn import in_cohort
from edgetrain.training.member.loop import Loop, Steps
from edgetrain.training.member.member import Member, release_of
from edgetrain.training.member.pacing import Pace
from edgetrain.training.member.slices import work_at_pace
from edgetrain.training.member.train import Place, request_of
from edgetrain.training.simulated.batched import Rows
from edgetrain.training.simulated.hub import ComputedUsage
from edgetrain.training.simulated.local import OneByOne, noise_of
from edgetrain.training.simulated.peers import SimulatedHost, SimulatedPeers
from edgetrain.training.simulated.streams import Frames
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import HubWire, MemberWire, SimulatedNetwork

RETRY_S = 5.0
"""Virtual seconds that a device waits, if the hub says that its name is still taken."""

LINES = 64
"""Lines of metrics for each step of the fleet, at most: members share theirs out over steps."""


@dataclass
class Parked:
    """What waits for a member that goes whenever it is in no round."""

    pace: Pace
    energy: Energy
    steps: int = 0
    """Steps that it had taken when it came last."""
    busy_s: float = 0.0
    traffic: Traffic = field(default_factory=lambda: Traffic(0, 0, 0, 0.0))
    before: Traffic | None = None
    """Its traffic when it first began."""
    training: Member | None = None
    """The member, as long as it is here."""

    def settle(self, member: Member | None) -> None:
        """It has taken the last step of its time here. Works twice."""
        if member is not None and self.training is member:
            self.steps, self.traffic, self.training = (
                self.steps + member.steps, member.traffic(), None,
            )  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    planned: Resolved
    world: World
    network: SimulatedNetwork
    task: Task
    gradients: OneByOne | Rows
    step_seconds: dict[str, float]
    """Seconds of a step on each kind of device, while it is cool."""
    open_log: Callable[[str], MetricsLog]
    """Called with the name of a member whose training begins."""
    hubs_of: Callable[[int], Sequence[HubWire]]
    """Hubs of a member, the lead first."""
    peers: SimulatedPeers | None = None
    """Listening members; None: they do not reduce."""
    is_to_evaluate: Callable[[int], bool] = lambda index: index == 0
    """Whether the member with this index evaluates, by now. Asked each step."""
    go: Callable[[SimulatedMember, MetricsLog], None] | None = None
    """Called with a member that has gone until it is drawn again; None: all stay to the end."""
    kept: dict[int, Parked] = field(default_factory=dict)
    """State kept of members that went, by index."""

    @functools.cached_property
    def digest(self) -> str:
        return self.planned.job.digest()


class SimulatedMember:
    """The device of member `index`. `process` is the one that runs, or ran last, by `clock`.

    `never_on`: it has not had any power yet.

    `training` is its member, and `wires` its connections, the lead's first, as they are or were
    last (None, and (): it never joined). `was_off`: it has been without power, or its process was
    killed. Times are virtual nanoseconds, as `World.at` has them.
    """

    def __init__(
        self,
        index: int,
        around: Surroundings,
        job_is_over: Callable[[], bool],
        hand: Callable[[bytes, Frames], None] | None = None,
    ) -> None:
        """It starts at once, or is off at first. After `job_is_over` it is not started again.
        `hand`: its connection stood before; see MemberWire."""
        self.clock: Callable[[], float] = around.world.clock
        self.name = f"m{index}"
        self.training: Member | None = None
        self.was_off = self.never_on = around.planned.is_off_at_first(index)
        self._index, self._around = index, around
        self._job_is_over, self._hand = job_is_over, hand
        self.wires: tuple[MemberWire, ...] = ()
        self._host: SimulatedHost | None = None
        self._links: list[Link] = []
        self.process = self._boot()
        if self.never_on:
            self.process.kill()

    def cut_power(self, until: int) -> None:
        """Take its power away until then; nobody is told. Does nothing once the member is over."""
        if not self.process.over or self.never_on:
            for wire in self.wires:
                wire.power_off()
            if self._host is not None:
                self._host.end(power=True)
            self.end_process(until)

    def end_process(self, until: int) -> None:
        """End the process, and start it again then."""
        self.was_off, self.never_on = True, False
        self.process.kill()
        if self._host is not None:
            self._host.end(power=False)
        self._around.world.at(until, self._power_on)

    def _power_on(self) -> None:
        if self.process.over and not self._job_is_over():
            self.process = self._boot()

    def _boot(self) -> Process:
        world = self._around.world
        return world.start(self.name, self._live, world.now)

    # -- what its process runs ----------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._train()
        except Refused as refused:
            if refused.code != "ended":  # people ended the job: that is no failure
                raise

    def _train(self) -> None:
        around, world, index, clock = self._around, self._around.world, self._index, self.clock
        job = around.planned.job
        place = Place(index, around.planned.devices[index], around.planned.beside)
        device = around.planned.device_profiles[place.device]
        kept = around.kept.get(index)
        if kept is not None:
            kept.settle(kept.training)
        flat, optimizer, work = around.gradients.member(index, kept.steps if kept else 0)
        if around.planned.strategy.has_variates:
            flat = Doubled(flat)
        seconds = around.step_seconds[place.device]
        if kept is None:
            pace = Pace(StepTimes(device, seconds, job.seed, index), clock, world.sleep)
            kept = Parked(pace, Energy(device, world.clock, root=None))
        if around.go is not None:
            around.kept[index] = kept
        request = request_of(around.planned, place, around.task, around.digest)
        with self._joined(flat, optimizer, request) as member:
            self.training = kept.training = member
            around.gradients.begin_at(index, member.begins_at)
            began = world.clock()
            busy_s = kept.busy_s
            usage = ComputedUsage(lambda: busy_s + world.clock() - began - member.wait_s)
            with around.open_log(member.name) as log:
                steps = Steps.of(job, index, max(1, job.fleet.members // LINES))
                pace = work_at_pace(member, work, kept.pace, job.train.batch, clock)
                loop = Loop(steps, work, member, log, pace, usage, kept.energy, clock)
                own = shares_of(job, index)
                loop.evaluate_own = evaluation_of(around.task, own.held, own.of)
                begin = functools.partial(around.gradients.begin_at, index)
                loop.cohort = in_cohort(member, around.planned, around.task, index, begin)
                if around.go is not None:
                    if kept.before is None:  # one that was here all along got a base when drawn
                        late = {"received_bytes": 0} if member.begins_at else {}
                        kept.before = replace(loop.before, **late)
                    loop.before = kept.before
                if not around.planned.presence.is_steady:
                    loop.is_to_evaluate = functools.partial(around.is_to_evaluate, index)
                loop.run()
                if loop.is_idle:
                    kept.busy_s = usage.cpu_s
                    log.event("left", "until it is drawn again")
                    member.vanish()
        if loop.is_idle:
            self._go(member, kept, log)

    def _go(self, member: Member, kept: Parked, log: MetricsLog) -> None:
        """It is in no round: nothing of it stays but what is kept."""
        around = self._around
        kept.settle(member)
        for wire in self.wires:
            around.network.retire_connection(wire)
        around.gradients.release(member.flat, self._index)
        assert around.go is not None
        around.go(self, log)
        # They refer to each other: else their vectors would wait for a garbage collection.
        for each in (member.half, *self._links, member):
            vars(each).clear()
        self.training, self.wires = None, ()

    def _joined(self, flat: Flat, optimizer: Stepper, request: Request) -> Member:
        """A member that has joined. If the hub has not noticed yet that the device lost its power,
        its name is taken: try again, as a device's service does."""
        job = self._around.planned.job
        while True:
            self.wires = ()
            for hub in self._around.hubs_of(self._index):
                wire = self._around.network.connect(self._index, hub, at_once=bool(self._hand))
                if self._hand is not None:
                    wire.stand(self._around.kept[self._index].traffic, self._hand)
                self.wires += (wire,)
            try:
                release = release_of(job.privacy, noise_of(job, self._index))
                exchange, request = self._exchange(request)
                return Member.join(
                    exchange, flat, optimizer, request, clock=self.clock, release=release
                )
            except Refused as refused:
                for wire in self.wires:  # as the end of a process does: a hub may have let it in
                    wire.up.cut = wire.down.cut = True
                    self._around.network.remove_connection(wire)
                if refused.code != "name":
                    raise
                self._around.world.sleep(RETRY_S)

    def _exchange(self, request: Request) -> tuple[Exchange, Request]:
        """Over the connections that stand, and what to join with."""
        if self._around.peers is not None:
            found = self._around.peers.exchange(self._index, self.wires[0])
            exchange, address, self._host = found
            return exchange, replace(request, address=address)
        if self._around.planned.strategy.deals:
            works = [WorkLink(wire, self.clock) for wire in self.wires]
            return (RangedWork(works) if len(works) > 1 else works[0]), request
        links = self._links = [Link(wire, self.clock) for wire in self.wires]
        links[0].goes_idle = self._around.go is not None
        return (RangedExchange(links) if len(links) > 1 else links[0]), request
