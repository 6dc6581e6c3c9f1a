"""The hub of a simulation: `serve` as a process in virtual time, and what can go wrong with it.

A machine with a service manager: a hub that was killed, or that a full disk stopped, is started
again from its journal.

    state     event                                     next state
    serving   `crash(until)`                            down; serving at `until`
    serving   the journal cannot be written: disk full  down; serving once there is room
    serving   the job is over, or the hub failed        over
    down      the time has come                         serving, restored from the journal
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.hub.effects import Note, Observed
from edgetrain.exchange.hub.journal import Journal, JournalDisk
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.resolved import Resolved
from edgetrain.training.simulated.local import noise_of
from edgetrain.training.simulated.machines import FillingDisk, MachineClock
from edgetrain.training.simulated.virtual import Process, World
from edgetrain.training.simulated.wires import SimulatedNetwork

OpenJournal = Callable[[JournalDisk], Journal]
"""Opens the hub's journal on this disk: called whenever the hub starts, which closes it."""


class SimulatedHub:
    """The hub's machine. `process` is the one that runs, or ran last; `clock` can jump.

    `given_up` are names of members that it could not reach for too long and that have not come
    back. `observe` gets what the hub does. Times are virtual nanoseconds, as `World.at` has them.
    """

    def __init__(
        self,
        found: Resolved,
        world: World,
        network: SimulatedNetwork,
        observe: Observer,
        open_journal: OpenJournal | None = None,
    ) -> None:
        """It starts with the world. Without `open_journal` nothing is kept: then it must not crash,
        and its disk does not matter."""
        self.clock = MachineClock(world)
        self.given_up: set[str] = set()
        self._found, self._world, self._network = found, world, network
        self._observer = observe
        self._open_journal = open_journal
        self._disk = FillingDisk(world)
        self._journal: Journal | None = None
        self.process: Process = world.start("hub", self._serve)

    @property
    def job_is_over(self) -> bool:
        """Whether it has ended, and will not be started again."""
        return self.process.over and not self._network.hub.down

    def crash(self, until: int) -> None:
        """Kill the process; start it again then. Does nothing to a hub that has ended, or that goes
        on without its journal as the job allows: killing that one loses rounds by design."""
        if self.process.over or (self._journal is not None and self._journal.tail is None):
            return
        self.process.kill()
        self._network.hub.crash()
        self._world.at(until, self._start_again)

    def fill_disk(self, until: int) -> None:
        """Let the journal's disk be full until then."""
        self._disk.fill(until)

    def _start_again(self) -> None:
        """Unless a crash and a full disk overlapped, and it has been started already."""
        if self.process.over and self._network.hub.down:
            self._network.restart_hub()
            self.process = self._world.start("hub", self._serve, self._world.now)

    def _observe(self, effect: Observed) -> None:
        if isinstance(effect, Note):
            if effect.event == "gone":
                self.given_up.add(effect.member)
            elif effect.event in ("joined", "back"):
                self.given_up.discard(effect.member)
        self._observer(effect)

    def _serve(self) -> None:
        hub = hub_of(self._found, source=noise_of(self._found.job, "hub"))
        # The members' own lines are in the same folder, in the same virtual time.
        hub.policy = replace(hub.policy, status_s=0.0)
        if self._open_journal is None:
            serve(hub, self._network.hub, self.clock, self._observe)
            return
        self._journal = journal = self._open_journal(
            JournalDisk(self._disk.writev, self._disk.free)
        )
        try:
            if journal.state is not None:
                hub.restore(journal.state, journal.records(), self.clock())
            serve(hub, self._network.hub, self.clock, self._observe, journal=journal)
        except EdgetrainError:
            if not self._disk.full:
                raise
            self._network.hub.crash()
            self._world.at(self._disk.full_until + 1, self._start_again)
        finally:
            journal.close()
