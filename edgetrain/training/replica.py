"""A hub's replica, served: it keeps a copy of the hub's journal, and becomes the hub if that is
gone. What it decides is in `exchange.hub.replica`; as a hub it is `training.hub`.

Nothing here prints: the caller passes functions for the lines that people read.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edgetrain.errors import BadMessage, ConfigError, EdgetrainError
from edgetrain.exchange.addresses import split_address, wait_to_listen
from edgetrain.exchange.further_messages import Follow
from edgetrain.exchange.hub.copies import PART_BYTES
from edgetrain.exchange.hub.effects import Effect, Note, Save, Send, Write
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Restarted
from edgetrain.exchange.hub.replica import HUB, Replica
from edgetrain.exchange.keys.credentials import credentials
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.messages import PROTOCOL, pack, unpack
from edgetrain.exchange.transport import HubTransport, Reconnecting
from edgetrain.exchange.zeromq.hub_socket import HubSocket
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.building import hub_of, message_limit
from edgetrain.jobs.job import Job
from edgetrain.jobs.resolved import journal_settings
from edgetrain.jobs.rules import resolve
from edgetrain.runs.environment import free_memory
from edgetrain.training.hub import (
    HubRequest,
    Say,
    announce,
    gate_of,
    make_run_folder,
    serve_job,
)
from edgetrain.training.stopping import Stop

LOOK_S = 0.02
"""Seconds between two looks at members while nothing comes from the hub."""

TELL_S = 2.0
"""Seconds between two messages to a hub whose job was taken over."""


class JournalCopy:
    """The replica's journal, in `folder`/journal. A new copy is made beside it, and takes its place
    once it is whole."""

    def __init__(self, folder: Path, job: Job, warn: Say, fresh: Callable[[], Hub]) -> None:
        self.folder = folder / "journal"
        self._beside = folder / "journal.new"
        self._job, self._warn, self._fresh = job, warn, fresh
        self._journal: Journal | None = None
        self._is_new = False

    def begin(self, save: Save) -> None:
        """A copy begins with this snapshot."""
        self.close()
        shutil.rmtree(self._beside, ignore_errors=True)
        self._journal = Journal(self._beside, journal_settings(self._job), self._warn)
        self._is_new = True
        self._journal.save(save.state)

    def append(self, write: Write) -> None:
        """A record follows. Raises EdgetrainError if the disk is full."""
        assert self._journal is not None
        self._journal.append(write.record)

    def settle(self, clock: Callable[[], float]) -> None:
        """All that the hub has is here: put a new copy in its place, and begin with a snapshot of
        its own where the journal has become long."""
        if self._is_new:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._beside.rename(self.folder)
            self._is_new = False
            self._reopen()
        journal = self._journal
        if journal is not None and journal.due:
            self.close()
            journal = self._reopen()
            assert journal.state is not None
            hub = self._fresh()
            hub.restore(journal.state, journal.records(), clock())
            journal.save(replace(hub.state(), epoch=hub.epoch - 1), hub.needed)

    def _reopen(self) -> Journal:
        self._journal = Journal(self.folder, journal_settings(self._job), self._warn)
        return self._journal

    def close(self) -> None:
        """Let go; works twice."""
        if self._journal is not None:
            self._journal.close()
        self._journal = None


def serve_replica(
    request: HubRequest,
    hub: str,
    stop: Stop,
    say: Say,
    warn: Say,
    clock: Callable[[], float] = time.monotonic,
    follow: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Hold what the hub at the address `hub` journals, until its job is over; or take over, and
    serve the job to its end. Returns the number of rounds. `request.bind` is where members find the
    replica. Raises as `serve_job`, and Refused if the hub takes another replica, or another job.
    """
    job = request.job
    if split_address(hub) == split_address(request.bind):
        raise ConfigError(
            f"--replica-of {hub} is this replica's own address", "give the hub's, or another --bind"
        )
    alone = replace(job, hub=replace(job.hub, replica=""))
    found = resolve(job)
    known = credentials(hub, None, request.keys, insecure=request.insecure)
    listening = wait_to_listen(*split_address(request.bind), say=say)
    gate = gate_of(request, listening)
    socket = HubSocket(listening.bind, message_limit(found.codec), gate)
    with contextlib.closing(socket):
        request = replace(request, job=alone)
        folder, _ = make_run_folder(request)
        announce(listening.reachable, socket.port, gate, say)
        say(f"replica of the hub at {hub}; run folder: {folder}")
        copy = JournalCopy(folder, alone, warn, lambda: hub_of(found))
        agreed = hub_of(found).state().agreed
        replica = Replica(agreed, job.hub.heartbeat_s, free_memory(), clock())
        up = MemberSocket(hub, max_message_bytes=2 * PART_BYTES, credentials=known)
        try:
            _Follower(replica, copy, up, socket, say, clock).serve(stop)
        finally:
            copy.close()
            up.close(0 if replica.taken else 1000)
    if not replica.taken:
        say(f"done: the hub's job is over after {replica.round} rounds")
        return replica.round
    say(f"the hub is silent, and more than half of the members agreed: taking over as {hub} was")
    over = threading.Event()
    told = Follow(PROTOCOL, agreed, replica.position, replica.next_epoch)
    threading.Thread(target=_tell_hub, args=(hub, known, told, over), daemon=True).start()
    try:
        return serve_job(replace(request, resume=folder), stop, say, warn, clock, follow)
    finally:
        over.set()


class _Follower:
    """Moves messages between hub, replica and members until the job is over, or taken over."""

    def __init__(
        self,
        replica: Replica,
        copy: JournalCopy,
        up: MemberSocket,
        down: HubTransport,
        say: Say,
        clock: Callable[[], float],
    ) -> None:
        self._replica, self._copy, self._up, self._down = replica, copy, up, down
        self._say, self._clock = say, clock
        self._connections = 0

    def serve(self, stop: Stop) -> None:
        """See the class. Raises Stopped, Refused, and EdgetrainError if the disk is full."""
        replica, clock = self._replica, self._clock
        self._carry_out(replica.follow(clock()))
        next_tick = clock()
        while not replica.taken and not replica.is_over:
            stop.check()
            self._hear_hub()
            for sender, frames in self._down.poll(0.0):
                with contextlib.suppress(BadMessage):
                    self._carry_out(replica.handle_member(sender, unpack(frames), clock()))
            if clock() >= next_tick:
                next_tick = clock() + replica.heartbeat_s / 4
                replica.note_bytes(self._up.received_bytes(), clock())
                self._carry_out(replica.tick(clock()))
        if replica.taken:
            self._copy.append(Write(Restarted(replica.next_epoch - 1)))

    def _hear_hub(self) -> None:
        frames = self._up.receive(LOOK_S)
        if isinstance(self._up, Reconnecting) and self._up.connections != self._connections:
            if self._connections:  # what was under way on the old one is lost
                self._carry_out(self._replica.follow(self._clock()))
            self._connections = self._up.connections
        while frames is not None:
            try:
                self._carry_out(self._replica.handle_hub(unpack(frames), self._clock()))
            except BadMessage as error:
                self._say(f"what the hub sends does not follow what is here: {error}; again")
                self._replica.begin_anew()
                self._carry_out(self._replica.follow(self._clock()))
            frames = self._up.receive(0.0)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Save():
                    self._copy.begin(effect)
                case Write():
                    self._append(effect)
                case Send(to=to) if to == HUB:
                    self._up.send(pack(effect.message))
                case Send():
                    self._down.send(effect.to, pack(effect.message))
                case Note():
                    self._say(effect.reason)
        if self._replica.is_whole:
            self._copy.settle(self._clock)

    def _append(self, write: Write) -> None:
        try:
            self._copy.append(write)
        except EdgetrainError as error:
            raise EdgetrainError(
                f"the replica cannot hold what the hub journals: {error.message}",
                "the hub goes on without it; make room, then start the replica again",
            ) from None


def _tell_hub(hub: str, known: Credentials | None, told: Follow, over: threading.Event) -> None:
    """Tell a hub that comes back that its job goes on here, until the job is `over`."""
    up = MemberSocket(hub, credentials=known)
    with contextlib.suppress(EdgetrainError):
        while not over.wait(TELL_S):
            up.receive(0.0)
            up.send(pack(told))
    up.close(0)
