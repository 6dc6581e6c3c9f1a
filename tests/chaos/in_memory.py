"""One chaos schedule over a fleet in memory: a hub, its replica, and members that find either.

The members' halves, links and standby ends are real, and so are hub and replica; time is virtual,
links take a trip, and nothing but the schedule goes wrong. It is for topologies that the simulator
has not. `laws` judges, and besides: no round is closed by both hubs, nothing leaves before it is
copied, and a hub that is killed while nothing else is wrong is replaced within TAKEOVER_BEATS beats
and a trip.

    happening     hub 0 (the hub), hub 1 (its replica)             a member
    hub, disk     the process ends; a new one goes on from disk    -
    kill, power   -                                                its process ends; a new one joins
    pause         the process stands still                         the same
    link          messages are held back; after SILENCE_S the connection breaks, with those held
    partition     the same between all on one side and all others
    cut           connections break, with some of what was under way
    control-pause, control-remove, control-stop   people tell the hub that goes on: `people`
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from fakes.fleet import FakeMember, Wire
from fakes.town import REPLICA, Site, Town, TwoWayMember

from chaos import laws
from chaos.laws import Judged, Merging, Outcome, Witness
from chaos.people import People
from chaos.schedule import ORDERS, Happening, Kind
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.further_messages import Follow
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.member.standby import StandbyEnd
from edgetrain.exchange.messages import PROTOCOL, Contribute, unpack
from edgetrain.exchange.transport import SILENCE_S
from edgetrain.fleet.networks import Profile
from edgetrain.jobs.resolved import Resolved
from edgetrain.vectors import layout as layouts

FAULTS: tuple[Kind, ...] = (
    "hub", "disk", "kill", "power", "blackout", "pause", "link", "partition", "cut",
)  # fmt: skip
KINDS: tuple[Kind, ...] = (*FAULTS, *ORDERS)
ELEMENTS = 300
"""More than a block of the codecs."""
TAKEOVER_BEATS = 3.0
RETRY_S = 5.0
"""Seconds until a member whose name was still taken asks again."""
MOST_TURNS, MOST_S = 60_000, 600.0
"""A fleet that takes longer stands still."""

HUB, SECOND = "hub", "replica"


class DiskFull(Exception):
    """Nothing can be written where a hub or replica runs."""


class Line:
    """What is under way from one machine to another, in order: each message takes half a trip."""

    def __init__(self, town: ChaosTown, source: str, target: str) -> None:
        self._town, self.ends, self._to = town, frozenset((source, target)), target
        self._items: deque[tuple[float, list]] = deque()

    @property
    def due(self) -> float:
        """When the next message arrives."""
        return self._items[0][0] if self._items else float("inf")

    def __bool__(self) -> bool:
        town = self._town
        is_open = not town.apart_now[self.ends] and self._to not in town.paused
        return is_open and self.due <= town.now

    def __len__(self) -> int:
        return len(self._items)

    def append(self, frames: list) -> None:
        self._items.append((self._town.now + self._town.trip_s / 2, frames))

    def popleft(self) -> list:
        return self._items.popleft()[1]

    def pop(self) -> list:
        return self._items.pop()[1]

    def clear(self) -> None:
        self._items.clear()

    def lose_newest(self, rng: random.Random) -> None:
        """Lose any number of messages, the newest."""
        for _ in range(rng.randint(0, len(self))):
            self.pop()


class ChaosWire(Wire):
    """A member's end of its connection to one hub."""

    def __init__(self, member: ChaosMember, where: str, wait: Callable[[], None]) -> None:
        super().__init__(wait)
        town, self._name = member.fleet, member.name
        self._witness = town.witness
        self.to_hub, self.to_member = Line(town, self._name, where), Line(town, where, self._name)

    def send(self, frames) -> None:
        message = unpack(list(frames))
        if isinstance(message, Contribute):
            self._witness.saw(self._name, message.round, message.part, message.payload)
        super().send(frames)

    def deliver_to_member(self) -> None:
        """What is due arrives."""
        while self.to_member:
            self._arrived.append(self.to_member.popleft())

    def cut(self, rng: random.Random) -> None:
        """The connection breaks, and a new one stands."""
        self.lose(rng)
        self.connections += 1


class ChaosMember(TwoWayMember):
    """A member that takes time, on a machine that can fail."""

    def __init__(self, town: ChaosTown, index: int, params, steps: int, weight=1.0) -> None:
        super().__init__(town, index, params, steps, weight)
        self.name = f"m{index}"
        self.address = b"m%d-%d" % (index, next(town.numbers))
        self.wire = ChaosWire(self, HUB, self._stand_still)
        self.other = ChaosWire(self, SECOND, self._stand_still)
        self.way = StandbyEnd(self.wire, lambda address, key: self.other, town.clock)
        self.ready_at = 0.0
        """When it goes on with its next half step."""

    @property
    def wires(self) -> tuple[ChaosWire, ChaosWire]:
        return self.wire, self.other

    @property
    def waits(self) -> bool:
        """Whether it stands still for want of a message."""
        return self._is_waiting

    def choices(self) -> list[Callable[[], None]]:
        town = self.fleet
        found: list[Callable[[], None]] = [
            functools.partial(town.arrive, self, wire, site)
            for wire, site in zip(self.wires, (town.first, town.second), strict=True)
            if wire.to_hub
        ]
        if self.is_over or self.name in town.paused:
            return found
        waits, wire = self._is_waiting, self.wire
        if wire.to_member or (waits and wire.connections != self._seen_connections):
            found.append(self.hear)
        if self.other.to_member:
            found.append(self.hear_other)
        if not waits and self.ready_at <= town.now:
            found.append(self.go)
        return found

    def go(self) -> None:
        self.ready_at = self.fleet.now + self.fleet.pace_s / 2
        super().go()


class ChaosSite(Site):
    """Where a hub runs: its disk may be full."""

    def __init__(self, town: ChaosTown, name: str) -> None:
        super().__init__(town, name)
        self._depth = 0
        self.saved: dict[int, Round] = {}
        """Rounds that snapshots have taken the place of on the disk."""
        self.since: int | None = None
        """Where the first of them began."""

    def carry_out(self, effects) -> None:
        self._depth += 1
        try:
            super().carry_out(self._checked(effects))
        except DiskFull:
            if self._depth > 1:
                raise
            self.town.stop_hub(self)
        finally:
            self._depth -= 1

    def _checked(self, effects):
        for effect in effects:
            self.town.check_disk(self.name, effect)
            if isinstance(effect, Save):
                self.saved |= {record.round: record for record in self.disk.rounds()}
                self.since = self.disk.first if self.since is None else self.since
            yield effect

    def rounds(self) -> dict[int, Round]:
        """All that the hub here has merged or copied, by number."""
        return self.saved | {record.round: record for record in self.disk.rounds()}


class ChaosTown(Town):
    """A town in which what a schedule says goes wrong. Times are virtual seconds."""

    member = ChaosMember
    members: list[ChaosMember]

    def __init__(self, planned: Resolved, seed: int) -> None:
        job, table = planned.job, planned.job.strategy
        self.trip_s = 2 * (_one_way_s(planned.links[0]) + _one_way_s(planned.hub_links[0]))
        self.pace_s = job.fleet.pace_s or 0.0
        self.witness, self.numbers = Witness(), itertools.count()
        self.apart_now: Counter[frozenset[str]] = Counter()
        """Pairs of machines that are kept apart, by how many happenings."""
        self.paused: Counter[str] = Counter()
        self.full: Counter[str] = Counter()
        self.people = People()
        self.killed: set[str] = set()
        """Members whose processes were killed at any time."""
        self.wrong = 0
        """Happenings at the moment."""
        self.prompt: float | None = None
        """When the hub was killed, if nothing else is wrong since."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._tick_at = self._told_at = 0.0
        self._is_over = False
        hub = job.hub
        policy = Policy(
            job.fleet.members, hub.quorum, hub.longest_deadline_s, hub.lost_after_s,
            hub.heartbeat_s, hub.rejoin_s,
        )  # fmt: skip
        self.now = 0.0
        super().__init__(
            table.name, job.fleet.members, planned.local_steps, planned.delay.steps,
            job.train.steps, policy=policy, rng=random.Random(seed), elements=ELEMENTS,
            codec=table.codec, reply_codec=table.reply_codec,
        )  # fmt: skip
        self.steps = job.train.steps

    # -- machines ------------------------------------------------------------------------------

    def new_site(self, name: str) -> Site:
        return ChaosSite(self, name)

    def new_line(self, source: str, target: str) -> Line:
        return Line(self, source, target)

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (seconds, next(self.numbers), action))

    def check_disk(self, where: str, effect) -> None:
        if self.full[where] and isinstance(effect, Write | Save):
            raise DiskFull

    def stop_hub(self, site: Site) -> None:
        """The process of a hub, or of the replica that became one, ends."""
        if site is self.first:
            self.kill_hub()
        else:
            site.hub = None

    def stop(self, where: str) -> None:
        """What runs there is killed, if anything does."""
        site = self.first if where == HUB else self.second
        if site.hub is not None:
            self.stop_hub(site)
        elif where == SECOND and self.replica is not None:
            self.kill_replica()

    def start(self, where: str) -> None:
        """A service manager starts what runs there, from its disk."""
        site = self.first if where == HUB else self.second
        if site.hub is not None or self.full[where] or (where == HUB and self._is_over):
            return
        if where == HUB:
            self.resume_hub()
        elif self.took_over_at is not None:
            site.hub = self.hub = self.fresh_hub()
            site.hub.restore(site.disk.state, site.disk.records(), self.now)
            site.hub.tail = site.disk.first
            for member in self.members:
                member.other.connections += 1
        elif self.replica is None and not self.job_is_over:
            self.start_replica()

    def on_replica(self, effects) -> None:
        try:
            for effect in effects:
                self.check_disk(SECOND, effect)
            super().on_replica(effects)
        except DiskFull:
            self.kill_replica()

    def tell_hub(self) -> None:
        """The replica that took over says so to a hub that came back; that one ends for good."""
        hub = self.first.hub
        apart = self.apart_now[frozenset((HUB, SECOND))] or self.paused[HUB]
        if hub is None or self.second.hub is None or apart:
            return
        told = Follow(PROTOCOL, hub.state().agreed, 0, self.took_over_epoch)
        try:
            self.first.carry_out(hub.handle(REPLICA, told, self.now))
        except EdgetrainError:
            self._is_over = True
            self.first.hub = None

    def kill_member(self, index: int) -> None:
        self.killed.add(f"m{index}")
        self.kill(index)

    def revive(self, index: int) -> None:
        """A new process of a member's joins, unless the job is over."""
        member = self.members[index]
        if self.job_is_over or not (member.is_over and member.state != "done"):
            return
        self.dead.discard(index)
        for site, wire in zip((self.first, self.second), member.wires, strict=True):
            if site.hub is not None and not self.apart_now[wire.to_hub.ends]:
                site.carry_out(site.hub.unreachable(member.address, self.now))
        self.members[index] = self.member(self, index, self.initial, self.steps)
        self.at(self.now + RETRY_S, functools.partial(self._retry, self.members[index]))

    def _retry(self, member: ChaosMember) -> None:
        if self.members[member.index] is member and member.state == "refused":
            self.revive(member.index)
        elif member.state in ("joining", "refused") and not self.job_is_over:
            self.at(self.now + RETRY_S, functools.partial(self._retry, member))

    @property
    def job_is_over(self) -> bool:
        hub = self.second.hub if self.took_over_at is not None else self.first.hub
        return hub is not None and hub.finished

    # -- time ----------------------------------------------------------------------------------

    def step_between(self) -> None:
        if self.replica is None:  # nobody is there to read it
            self.to_replica.clear()
        super().step_between()

    def let_time_pass(self) -> None:
        soon = [self._tick_at, *[at for at, _, _ in self._later[:1]]]
        lines = [self.to_replica, self.from_replica]
        for member in self.members:
            lines += [line for wire in member.wires for line in (wire.to_hub, wire.to_member)]
            soon += [] if member.is_over or member.waits else [member.ready_at]
        soon += [line.due for line in lines]
        self.now = min(at for at in soon if at > self.now)
        while self._later and self._later[0][0] <= self.now:
            heapq.heappop(self._later)[2]()
        if self.now >= self._tick_at:
            self._tick_at = self.now + self.hub.policy.heartbeat_s / 4
            self._tick()

    def _tick(self) -> None:
        for site in (self.first, self.second):
            if site.hub is not None and not self.paused[site.name]:
                site.carry_out(site.hub.tick(self.now))
        site = self.first if self.took_over_at is None else self.second
        if site.hub is not None and not self.paused[site.name]:
            for order in self.people.orders():
                site.carry_out(site.hub.obey(order, self.now))
        if self.replica is not None and not self.paused[SECOND]:
            self.on_replica(self.replica.tick(self.now))
        if self.took_over_at is not None and self.now >= self._told_at:
            self._told_at = self.now + 2.0
            self.tell_hub()
        for member in self.members:
            if member.waits_in_vain and not self.paused[member.name]:
                member.go()

    def take_over(self) -> None:
        super().take_over()
        if self.prompt is not None:
            took_s = self.now - self.prompt
            if took_s > TAKEOVER_BEATS * self.hub.policy.heartbeat_s + self.trip_s:
                self.broken.append(f"a takeover took {took_s:.2f} s")

    # -- what goes wrong -----------------------------------------------------------------------

    def begin(self, happening: Happening) -> None:
        """It happens now; it heals `for_s` later."""
        self.wrong += 1
        self.prompt = None
        where = [HUB, SECOND]
        hubs = [where[number] for number in happening.hubs]
        members = [f"m{index}" for index in happening.members]
        heal: list[Callable[[], None]] = []
        match happening.kind:
            case "hub" | "blackout":
                if happening.kind == "blackout":
                    hubs = where
                hubs = hubs or [HUB]
                may_take_over = self.first.hub is not None and self.replica is not None
                if self.wrong == 1 and hubs == [HUB] and may_take_over and self.all_know:
                    self.prompt = self.now
                for each in hubs:
                    self.stop(each)
                    heal.append(functools.partial(self.start, each))
            case "disk":
                for each in hubs or [HUB]:
                    self.full[each] += 1
                    heal.append(functools.partial(self._make_room, each))
            case "pause":
                for each in members + hubs:
                    self.paused[each] += 1
                    heal.append(functools.partial(self._go_on, each))
            case "link" | "partition":
                there = {HUB, SECOND, *(member.name for member in self.members)}
                for one, other in itertools.product(side := {*members, *hubs}, there - side):
                    self.apart_now[frozenset((one, other))] += 1
                    rejoin = functools.partial(self._rejoin, frozenset((one, other)), self.now)
                    heal.append(rejoin)
            case "cut":
                for one in members + hubs:
                    for other in (HUB, SECOND, *(member.name for member in self.members)):
                        self._cut(frozenset((one, other)))
        self.people.begin(happening)
        heal.append(functools.partial(self.people.heal, happening))
        if happening.kind == "control-remove":
            heal += [functools.partial(self.revive, index) for index in happening.members]
        if happening.kind in ("kill", "power", "blackout"):
            for index in happening.members:
                if not self.members[index].is_over:
                    self.kill_member(index)
                    heal.append(functools.partial(self.revive, index))
        self.at(self.now + happening.for_s, functools.partial(self._heal, heal))

    @property
    def all_know(self) -> bool:
        """Whether the replica is in, and all that train have heard so."""
        hub = self.first.hub
        others = [member for member in self.members if not member.is_over]
        return hub.part.replica == "in" and all(
            member.state == "training" and member.way.ballot.link and not member.way.ballot.is_out
            for member in others
        )

    def _heal(self, actions: Sequence[Callable[[], None]]) -> None:
        self.wrong -= 1
        for action in actions:
            action()

    def _make_room(self, where: str) -> None:
        self.full[where] -= 1
        self.full += Counter()
        self.start(where)

    def _go_on(self, who: str) -> None:
        self.paused[who] -= 1
        self.paused += Counter()

    def _rejoin(self, ends: frozenset[str], since: float) -> None:
        self.apart_now[ends] -= 1
        if not self.apart_now[ends] and self.now - since >= SILENCE_S:
            self._cut(ends)

    def _cut(self, ends: frozenset[str]) -> None:
        """The connection between two machines breaks, if there is one."""
        if ends == {HUB, SECOND}:
            self.to_replica.lose_newest(self.rng)
            self.reconnect_replica()
        for member in self.members:
            for wire in member.wires:
                if wire.to_hub.ends == ends and not member.is_over and member.state == "training":
                    wire.cut(self.rng)

    # -- the run -------------------------------------------------------------------------------

    def live(self, happenings: Sequence[Happening]) -> float:
        """Run it to its end; the virtual seconds since training began."""
        began = None
        for _ in range(MOST_TURNS):
            if began is None and self.hub.started:
                began = self.now
                for each in happenings:
                    self.at(self.now + each.at_s, functools.partial(self.begin, each))
            if all(member.is_over for member in self.members) and not self.dead:
                break
            if self.now > MOST_S or (self.job_is_over and not self._left):
                break
            self.turn()
        for member in self.members:
            member.end()
        return self.now - (began or 0.0)

    def turn(self) -> None:
        """Let one thing happen, or time pass."""
        if not self.advance():
            self.let_time_pass()

    @property
    def _left(self) -> list[FakeMember]:
        """Members that are still in the job."""
        return [m for m in self.members if not m.is_over and m.state == "training"]


def run(planned: Resolved, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a job through one schedule, and judge it: see `chaos.simulated`."""
    town, broken = ChaosTown(planned, seed), list[str]()
    try:
        town.live(happenings)
    except EdgetrainError as error:
        broken.append(f"the run failed: {error}")
    broken += judged(planned, town)
    return Outcome(seed, tuple(happenings), len(_rounds(town)), town.now, tuple(broken))


def calm_seconds(planned: Resolved) -> float:
    """Virtual seconds that the job takes if nothing goes wrong."""
    return ChaosTown(planned, 0).live(())


def _one_way_s(profile: Profile) -> float:
    return profile.up.delay_ms / 1000


def _rounds(town: ChaosTown) -> list:
    """The rounds of the hub that went on: what a replica did not copy counts no more."""
    found = town.first.rounds()
    if town.took_over_at is not None:
        second = town.second
        first = second.disk.first if second.since is None else second.since
        found = {number: record for number, record in found.items() if number < first}
        found |= second.rounds()
    return [found[number] for number in sorted(found)]


def broken_books(town: ChaosTown) -> list[str]:
    """The laws of hub and replica that broke: both closed a round, or what left is in no book."""
    broken, town.broken = town.broken, []
    try:
        town.judge()
    except AssertionError:
        broken.append("a reply left that is not in the books of the hub that went on")
    return broken


def judged(planned: Resolved, town: ChaosTown) -> list[str]:
    """The laws that a run to the end broke."""
    broken = broken_books(town)
    given_up = set[str]()
    for note in town.notes:
        if note.event == "gone":
            given_up.add(note.member)
        elif note.event in ("joined", "back"):
            given_up.discard(note.member)
    merging = Merging.of(planned).bound(layouts.read(town.description, ELEMENTS))
    judged = Judged(tuple(_rounds(town)), town.witness, merging, town.initial)
    over = ("done", "refused") if town.people.stopped_at is not None else ("done",)
    done = [m for m in town.members if m.state in over and m.driver is not None]
    ended = {
        member.name: laws.Ended(member.half.applied, f"{member.half.checksum:016x}")
        for member in done
    }
    steady = {member.name for member in town.members} - town.killed - given_up - town.people.removed
    broken += laws.judge_hubs([judged], ended, steady, stopped_at=town.people.stopped_at)
    late = sorted(steady - ended.keys())
    return broken + ([f"{', '.join(late)} never came to the end"] if late else [])
