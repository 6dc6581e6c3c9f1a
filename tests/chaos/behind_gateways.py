"""One chaos schedule over a fleet in memory whose members are behind gateways.

Members' halves, links, the gateways' hubs and the hub above are real; messages arrive in an order
that is drawn. When and for how long things happen goes by the number of things that have happened,
scaled so that a run without faults takes its CALM_S. `laws` judges the rounds of the hub above,
whose contributions are the sites'; and at each site every contribution counts once.

    happening     hub 0 (the hub above), hub k (the gateway of site k)      a member
    hub           killed, and started again from its journal                -
    disk          it ends as it writes, and is started again                -
    kill, power   -                                                         it is gone for good
    pause, link   nothing reaches it or leaves it for a while               the same
    partition     the same, all at once                                     the same
    cut           connections break, with some of what was under way        the same
    control-pause, control-stop   people tell the hub above, see `people`         -
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fakes.fleet import Disk, Fleet, HubDied
from fakes.sites import FakeSite, SitedFleet

from chaos import laws
from chaos.laws import Ended, Merging, Outcome, Witness
from chaos.people import People
from chaos.schedule import Happening, Kind
from edgetrain import codecs
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.gateway.way_up import WayUp
from edgetrain.exchange.hub.effects import Save, Write
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Round
from edgetrain.exchange.messages import Contribute, unpack
from edgetrain.jobs.resolved import Resolved
from edgetrain.vectors import layout as layouts

KINDS: tuple[Kind, ...] = (
    "hub", "disk", "kill", "power", "pause", "link", "partition", "cut", "control-pause",
    "control-stop",
)  # fmt: skip
CALM_S = 25.0
ELEMENTS = 300
MOST_TURNS = 40_000


class ChaosSite(FakeSite):
    """A site whose contributions are noted."""

    def connect(self) -> WayUp:
        """Its way up, over a wire that notes."""
        send, name = self.wire.send, f"s{self.index}"

        def noted(frames) -> None:
            message = unpack(list(frames))
            if isinstance(message, Contribute):
                self.above.witness.saw(name, message.round, message.part, message.payload)
            send(frames)

        self.wire.send = noted
        return super().connect()

    def choices(self) -> list[Callable[[], None]]:
        """See FakeSite; of what nothing holds back."""
        held, everyone = self.above.held, self.members
        if held[f"s{self.index}"]:
            return []
        self.members = [member for member in everyone if not held[f"m{member.index}"]]
        try:
            found = super().choices()
        finally:
            self.members = everyone
        own = sum(len(member.choices()) for member in everyone if not held[f"m{member.index}"])
        return found[:own] if held["hub"] else found

    def carry_each(self, effects) -> None:
        super().carry_each(self.above.checked(self, effects))


class ChaosSites(SitedFleet):
    """A fleet behind gateways in which what a schedule says goes wrong. `planned.sites` are its
    sites."""

    site = ChaosSite

    def __init__(self, planned: Resolved, seed: int) -> None:
        job, table = planned.job, planned.job.strategy
        self.witness, self.people = Witness(), People()
        self.saved: dict[int, Round] = {}
        """Rounds that a snapshot has taken the place of on the disk."""
        self.filling: Counter[int] = Counter()
        """Hubs that end at their next write."""
        self.held: Counter[str] = Counter()
        self.turns, self.rate = 0, 1.0
        self.happenings: Sequence[Happening] = ()
        """What is still to be scheduled: training has not begun."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        sizes = [len(site.members) for site in planned.sites]
        super().__init__(
            table.name, sizes, planned.local_steps, planned.delay.steps, job.train.steps,
            rng=random.Random(seed), elements=ELEMENTS, codec=table.codec,
            reply_codec=table.reply_codec, disk=Disk(), site_disks=[Disk() for _ in sizes],
        )  # fmt: skip

    def carry_each(self, effects) -> None:
        super().carry_each(self.checked(self, effects))

    def checked(self, hub: Fleet, effects):
        """The same effects; a hub whose disk is full ends at the first that writes."""
        number = 0 if hub is self else hub.index + 1
        for effect in effects:
            if isinstance(effect, Write) and self.filling[number]:
                self.filling[number] = 0
                raise HubDied
            if isinstance(effect, Save) and hub is self:
                self.saved |= self.merged()
            yield effect

    def merged(self) -> dict[int, Round]:
        """All rounds of the hub above, by number."""
        return self.saved | {record.round: record for record in self.disk.rounds()}

    def advance(self) -> bool:
        if self.happenings and self.hub.started:
            for each in self.happenings:
                began_s = self.turns * self.rate
                self.at(began_s + each.at_s, functools.partial(self.begin, each))
            self.happenings = ()
        while self._later and self._later[0][0] <= self.turns * self.rate:
            heapq.heappop(self._later)[2]()
        self.turns += 1
        self.let_refused_leave()
        for order in () if self.held["hub"] else self.people.orders():
            self.survive(functools.partial(self._tell, order))
        if super().advance():
            return True
        if not self._later or self.hub.finished:
            return False
        self.turns = max(self.turns, int(self._later[0][0] / self.rate) + 1)
        return True

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (seconds, next(self._numbers), action))

    def begin(self, happening: Happening) -> None:
        """It happens now, and heals `for_s` later."""
        hubs: list[Fleet] = [self, *self.members]
        struck = [hubs[number] for number in happening.hubs]
        names = [f"m{index}" for index in happening.members]
        names += ["hub" if number == 0 else f"s{number - 1}" for number in happening.hubs]
        match happening.kind:
            case "hub":
                for hub in struck or [self]:
                    hub.survive(self._die)
            case "disk":
                for number in happening.hubs or (0,):
                    self.filling[number] += 1
            case "kill" | "power":
                for index in happening.members:
                    self._kill(index)
            case "cut":
                self._cut(names)
            case "control-pause" | "control-stop":
                self.people.begin(happening)
                self.at(
                    self.turns * self.rate + happening.for_s,
                    functools.partial(self.people.heal, happening),
                )
            case _:
                self.held.update(names)
                self.at(
                    self.turns * self.rate + happening.for_s, functools.partial(self._free, names)
                )

    def let_refused_leave(self) -> None:
        """As a `Member` does; works twice."""
        for member in self.everyone:
            if member.state == "refused" and member.driver is not None:
                member.driver.leave("refused")

    def _tell(self, order: Order) -> None:
        self.carry_out(self.hub.obey(order, self.now))

    @staticmethod
    def _die() -> None:
        raise HubDied

    def _free(self, names: Sequence[str]) -> None:
        self.held.subtract(names)

    def _kill(self, index: int) -> None:
        for site in self.members:
            for number, member in enumerate(site.members):
                if member.index == index and not member.is_over and len(self.alive) > 1:
                    site.dead.add(index)
                    site.members[number].end()

    @property
    def alive(self) -> list:
        """Members that were not killed."""
        dead = {index for site in self.members for index in site.dead}
        return [member for member in self.everyone if member.index not in dead]

    def _cut(self, names: Sequence[str]) -> None:
        for site in self.members:
            if f"s{site.index}" in names or "hub" in names:
                self.cut(site.index)
            for number, member in enumerate(site.members):
                if f"m{member.index}" in names and member.index not in site.dead:
                    site.cut(number)


def run(planned: Resolved, seed: int, happenings: Sequence[Happening], calm_s: float) -> Outcome:
    """Run a job through one schedule, and judge it: see `chaos.simulated`."""
    fleet, broken = ChaosSites(planned, seed), list[str]()
    calm = ChaosSites(planned, seed)
    calm.run()
    fleet.rate = calm_s / calm.turns
    fleet.happenings = happenings
    try:
        fleet.run()
    except (EdgetrainError, AssertionError) as error:
        broken.append(f"the run failed: {error}")
    broken += judged(planned, fleet)
    seconds = fleet.turns * fleet.rate
    return Outcome(seed, tuple(happenings), len(fleet.merged()), seconds, tuple(broken))


def calm_seconds(planned: Resolved) -> float:
    """How long a run without faults is said to take."""
    return CALM_S


def judged(planned: Resolved, fleet: ChaosSites) -> list[str]:
    """The laws that a run to the end broke."""
    merging = Merging.of(planned).bound(layouts.read(fleet.description, ELEMENTS))
    merging = replace(merging, codec=codecs.verbatim(merging.codec))
    alive = fleet.alive
    stopped = fleet.people.stopped_at is not None
    over = ("done", "refused") if stopped else ("done",)
    late = [f"m{member.index}" for member in alive if member.state not in over]
    broken = [f"{', '.join(late)} never came to the end"] if late else []
    ended = {
        f"m{member.index}": Ended(member.half.applied, f"{member.half.checksum:016x}")
        for member in alive
        if member.state in over and member.driver is not None
    }
    gone = {note.member for note in fleet.notes if note.event == "gone"}
    sites = {f"s{site.index}" for site in fleet.members} - gone
    judge = laws.Judged(tuple(fleet.merged().values()), fleet.witness, merging, fleet.initial)
    found = laws.judge_hubs([judge], ended, sites, stopped_at=fleet.people.stopped_at)
    if len(alive) < len(fleet.everyone):  # what the dead gave may count when all others are done
        found = [each for each in found if not each.endswith("nobody ended with all of them")]
    broken += found
    for site in fleet.members:
        counted = Counter(site.disk.counted)
        broken += [f"{key} counts {n} times" for key, n in counted.items() if n > 1]
        given_up = {note.member for note in site.notes if note.event == "gone"}
        for member in site.members:
            name = f"m{member.index}"
            if member in alive and name not in given_up:
                given = {(name, r) for r in member.submitted if not stopped or r < site.hub.round}
                lost = sorted(given - counted.keys())
                broken += [f"contributions {lost[:3]} are lost"] if lost else []
    return broken
