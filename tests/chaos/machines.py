"""Machines of a simulation that fail in ways that no job asks for.

A hub with a journal and a service manager: after a kill, or after a full disk stopped it, it is
started again from its journal. People tell it what to do.

    state     event                                     next state
    serving   `crash(until)`                            down; serving at `until`
    serving   the journal cannot be written: disk full  down; serving once there is room
    serving   the job is over, or the hub failed        over
    down      the time has come                         serving, restored from the journal
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.people import People
from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.journal import Journal, JournalDisk
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.hub import SimulatedHub
from edgetrain.training.simulated.member import SimulatedMember
from edgetrain.training.simulated.simulation import Simulation
from edgetrain.training.simulated.virtual import World
from edgetrain.training.simulated.wires import MemberWire, SimulatedNetwork
from edgetrain.vectors.vector import Buffer

OpenJournal = Callable[[int, JournalDisk], Journal]
"""Opens the journal of the hub with this number on this disk: called whenever that hub starts,
which closes it."""


class MachineClock:
    """The monotonic clock of one machine, in virtual seconds: the world's time plus its jumps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead = 0.0

    def __call__(self) -> float:
        return self._world.clock() + self._ahead

    def jump(self, seconds: float) -> None:
        """Be `seconds` later at once, and stay so."""
        self._ahead += seconds


class FillingDisk:
    """The disk of the hub's journal. While it is full, half of what is written still fits.

    `writev` and `free` are what a `JournalDisk` needs; `full_until` is the virtual time in
    nanoseconds at which the last of the writes that filled it is deleted.
    """

    def __init__(self, world: World) -> None:
        self.full = False
        self.full_until = 0
        self._world = world

    def fill(self, until: int) -> None:
        """Be full until this virtual time; the longest of several calls counts."""
        self.full, self.full_until = True, max(self.full_until, until)
        self._world.at(until, self._make_room)

    def _make_room(self) -> None:
        self.full = self._world.now < self.full_until

    def writev(self, file: int, buffers: Sequence[Buffer]) -> int:
        if not self.full:
            return os.writev(file, buffers)
        os.write(file, memoryview(buffers[0])[: memoryview(buffers[0]).nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self, folder: Path) -> int:
        """Bytes left for `folder`."""
        return 0 if self.full else 1 << 60


class FailingHub(SimulatedHub):
    """A hub that keeps a journal, and can be killed. Its clock can jump, its disk fill up."""

    def __init__(
        self,
        found: Resolved,
        world: World,
        network: SimulatedNetwork,
        observe: Observer,
        number: int,
        open_journal: OpenJournal,
    ) -> None:
        super().__init__(found, world, network, observe, number)
        self.clock: MachineClock = MachineClock(world)
        self.tap: Callable[[bytes, Sequence[Buffer]], None] = lambda to, frames: None
        """Sees each packed message that it sends."""
        self.people = People()
        self._open_journal = open_journal
        self._disk = FillingDisk(world)
        self._journal: Journal | None = None

    @property
    def job_is_over(self) -> bool:
        return self.process.over and not self.wire.down

    def crash(self, until: int) -> None:
        """Kill the process; start it again then. Does nothing to a hub that has ended, or that goes
        on without its journal as the job allows: killing that one loses rounds by design."""
        if self.process.over or (self._journal is not None and self._journal.tail is None):
            return
        self.process.kill()
        self.wire.crash()
        self._world.at(until, self._start_again)

    def fill_disk(self, until: int) -> None:
        """Let the journal's disk be full until then."""
        self._disk.fill(until)

    def _start_again(self) -> None:
        """Unless a crash and a full disk overlapped, and it has been started already."""
        if self.process.over and self.wire.down:
            self._network.restart_hub(self.wire)
            self.process = self._world.start(self._name, self._serve, self._world.now)

    def _serve(self) -> None:
        hub = self._fresh()
        disk = JournalDisk(self._disk.writev, self._disk.free)
        self._journal = journal = self._open_journal(self.number, disk)
        try:
            if journal.state is not None:
                hub.restore(journal.state, journal.records(), self.clock())
            orders, way = self.people.orders, _Tapped(self)
            serve(hub, way, self.clock, self._observe, journal=journal, orders=orders)
        except EdgetrainError:
            if not self._disk.full:
                raise
            self.wire.crash()
            self._world.at(self._disk.full_until + 1, self._start_again)
        finally:
            journal.close()


class _Tapped:
    """A hub's transport that shows what it sends."""

    def __init__(self, hub: FailingHub) -> None:
        self._hub, self._wire = hub, hub.wire
        self.poll, self.traffic, self.close = hub.wire.poll, hub.wire.traffic, hub.wire.close

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        self._hub.tap(to, frames)
        return self._wire.send(to, frames)


class FailingSimulation(Simulation):
    """A simulation of machines that can fail. `on_start` is called as training begins: the time to
    say what goes wrong."""

    hub: FailingHub

    def __init__(
        self,
        planned: Resolved,
        folder: Path,
        open_journal: OpenJournal,
        on_start: Callable[[], None],
    ) -> None:
        self._open_journal, self._on_start = open_journal, on_start
        super().__init__(planned, folder, False)
        for member in self.members:
            member.clock = MachineClock(self.world)

    def make_hub(self, number: int) -> FailingHub:
        return FailingHub(*self.hub_place(number), self._open_journal)

    def begin(self, began: float) -> None:
        super().begin(began)
        self._on_start()


def kill(member: SimulatedMember, network: SimulatedNetwork, until: int) -> None:
    """Kill its process, and start it again then. The machine closes its connection. Does nothing
    once the member is over."""
    if not member.process.over:
        for wire in member.wires:
            wire.up.cut = wire.down.cut = True
            network.remove_connection(wire)
        member.end_process(until)


def damage_next_message(member: SimulatedMember, network: SimulatedNetwork, upwards: bool) -> None:
    """Let the next message to the hub (`upwards`) or from it arrive damaged.

    The receiver breaks the connection. If it is the hub, ZeroMQ reconnects at the member. If it is
    the member, its ZeroMQ gives up, and the member reconnects once its patience has ended.
    """
    if not member.wires or member.process.over:
        return
    wire = member.wires[0]
    if upwards:
        wire.up.on_damage = wire.cut
    else:
        wire.down.on_damage = functools.partial(_give_up, wire, network)


def _give_up(wire: MemberWire, network: SimulatedNetwork) -> None:
    wire.up.cut = wire.down.cut = True
    wire.hub.remove_connection(wire.name)
