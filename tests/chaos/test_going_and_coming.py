"""Drawn schedules over a fleet in memory whose hub has a group step in: who goes and comes, and
when the hub, a device or the group is killed."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.fleet import Disk, FakeMember, Fleet, Recorded

from edgetrain.errors import HubUnreachable, Refused
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.member.driver import Driver
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs.fallback import NAME
from edgetrain.jobs.job import Fleet as FleetTable
from edgetrain.jobs.job import Job, ServersTable
from edgetrain.training.fallback import SteppingIn, Told
from edgetrain.vectors import layout as layouts

MEMBERS, STEPS, QUORUM = 6, 400, 3
AFTER_S, BACK_S = 3.0, 6.0
POLICY = Policy(MEMBERS, QUORUM, 5.0, 1.0, 0.25, 4.0, 40.0, stand_in=NAME)
MOST_EVENTS = 200_000


class Process(FakeMember):
    """A process of a device, or the leader of a group, which may be asked to leave."""

    def __init__(self, fleet, number, name):
        super().__init__(fleet, number, fleet.initial, STEPS)
        self.name, self.is_asked = name, False

    def _live(self):
        fleet, flat = self.fleet, self.flat
        request = Request(
            layouts.digest(flat.description), self.name, 1.0, layout=flat.description, steps=STEPS
        )
        link = Recorded(Link(self.way, fleet.clock), self)
        try:
            self.driver = Driver.join(link, flat, self, request, fleet.clock)
            self.state = "training"
            for step in range(self.driver.progress, STEPS):
                self._pause()
                if self.is_asked:
                    break
                flat.gradient[:] = fleet.local_step(self.index % MEMBERS, step, self.params)
                self.driver.step()
                self.note_base()
            if not self.is_asked:
                self.driver.drain()
                self.note_base()
            self.driver.leave("asked" if self.is_asked else "done")
            self.state = "left" if self.is_asked else "done"
        except (Refused, HubUnreachable):
            self.state = "refused"
        self.is_over = True

    # what `SteppingIn` sees of a group

    def ended(self):
        return None if not self.is_over else "" if self.state == "done" else self.state

    def leave(self):
        self.is_asked = True

    def kill(self):
        if not self.is_over:
            self.fleet.kill(self.index)


class Town:
    """A fleet, a hub with a group that steps in, and what a schedule does to them."""

    def __init__(self, seed, folder):
        self.rng = random.Random(seed)
        self.numbers = itertools.count()
        town = self

        class Room(Fleet):
            def member(self, fleet, index, params, steps, weight):
                return Process(fleet, next(town.numbers), f"m{index}")

        self.fleet = Room(
            "dga", MEMBERS, 2, 2, STEPS, rng=self.rng, disk=Disk(snapshot_every=6), policy=POLICY,
            bounded=True,
        )  # fmt: skip
        self.all = list(self.fleet.members)
        servers = ServersTable(
            fallback=("when-needed", "when-faster")[seed % 2], after_s=AFTER_S, back_s=BACK_S,
            data={"partition": "iid"},
        )  # fmt: skip
        job = Job(fleet=FleetTable(MEMBERS), servers=servers)
        self.told = Told(job, "", folder, None, None, False)
        self.changes, self.groups = [], []
        self.servers = self._servers()

    def _servers(self):
        def see(note):
            if note.event == "servers" and not note.reason.startswith("the group ended"):
                self.changes.append((self.fleet.now, note.reason))

        return SteppingIn(self.told, self.fleet.clock, see, start=self._start)

    def _start(self, told):
        if told.asks:
            return SimpleNamespace(ended=str, said=lambda: "4.0", kill=lambda: None)
        group = Process(self.fleet, next(self.numbers), NAME)
        self.groups.append((group, told.missing))
        self._add(group)
        return group

    def _add(self, process):
        self.fleet.members.append(process)
        self.all.append(process)

    def newest(self, name):
        return [each for each in self.all if each.name == name][-1]

    # what goes wrong

    def kill(self, name):
        process = self.newest(name)
        if not process.is_over:
            self.fleet.kill(process.index)

    def bring_back(self, name):
        """Start a device's process anew, unless it runs or is done."""
        last = self.newest(name)
        if last.is_over and last.state != "done" and not self.fleet.hub.finished:
            self._add(Process(self.fleet, next(self.numbers), name))

    def kill_hub(self):
        """The hub's machine is restarted: the group, a process of it, ends too."""
        self.servers.close()
        for member in self.fleet.members:
            if member.index in self.fleet.dead:
                member.wire.to_hub.clear()
        self.fleet.restart_hub()
        self.servers = self._servers()
        self.changes.append((self.fleet.now, "restart"))

    def pass_time(self, seconds):
        self.fleet.tick(seconds)
        for note in self.fleet.notes:
            self.servers(note)
        self.fleet.notes.clear()
        self.servers.look(self.fleet.hub)
        for member in self.fleet.members:
            if member.waits_in_vain:
                member.go()

    def run(self, events):
        """Things happen for a while, at the rate of one in eight per quarter of a second."""
        for _ in range(events):
            if not self.fleet.advance() or self.rng.random() < 0.05:
                self.pass_time(0.25)
            if self.fleet.hub.finished:
                return


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.groups) for seed in range(6, 50))]
)
def test_devices_go_and_come_and_the_base_stays_one(seed, tmp_path):
    town = Town(seed, tmp_path)
    town.run(150)
    assert town.fleet.hub.started
    names = [f"m{index}" for index in range(MEMBERS)]
    for _ in range(town.rng.randint(2, 4)):
        for name in town.rng.sample(names, town.rng.randint(2, 5)):
            town.kill(name)
        town.run(town.rng.randint(0, 300))
        if town.groups and town.rng.random() < 0.3:
            town.kill(NAME)
        if town.rng.random() < 0.2:
            town.kill_hub()
        town.run(town.rng.randint(0, 300))
        for name in town.rng.sample(names, town.rng.randint(2, 6)):
            town.bring_back(name)
        town.run(town.rng.randint(0, 600))
    for _ in range(MOST_EVENTS // 100):
        for index in range(MEMBERS):
            town.bring_back(f"m{index}")
        town.run(100)
        if town.fleet.hub.finished:
            break
    assert town.fleet.hub.finished, "the job comes to its end"
    town.servers.close()

    bases = {}
    for process in town.all:
        for applied, checksum in process.checksums.items():
            assert bases.setdefault(applied, checksum) == checksum, "replicas agree bit for bit"
    counted = town.fleet.disk.counted
    assert len(set(counted)) == len(counted), "each contribution counts once"
    replayed = town.fleet.fresh_hub()
    replayed.restore(town.fleet.disk.state, town.fleet.disk.records(), 0.0)
    assert np.array_equal(replayed.base, town.fleet.hub.base), "the journal has the same bits"
    for (earlier, before), (later, after) in itertools.pairwise(town.changes):
        if "restart" not in (before, after):
            assert later - earlier >= BACK_S
    for _, missing in town.groups:
        assert missing
