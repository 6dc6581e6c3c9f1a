"""A hub and its members in one thread and in virtual time, without links: what is sent arrives.

The real halves of the protocol (`serve`, Hub, Journal, Link), for benchmarks that need hours of a
fleet in minutes. No model, no task, and nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import Observer, serve
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import CatchUp, FixedTensors, Request, Submission
from edgetrain.exchange.transport import Traffic
from edgetrain.training.simulated.virtual import SECOND, Mailbox, Process, World
from edgetrain.vectors.vector import Buffer, Vector, checksum

Frames = list[bytes]


def copied(frames: Sequence[Buffer]) -> Frames:
    """As a socket would take them."""
    return [bytes(frame) for frame in frames]


class Wire:
    """A member's end: a MemberTransport that can be cut and connects again."""

    def __init__(self, room: Room, name: bytes) -> None:
        self.name = name
        self.connections, self.addresses = 1, {"": ""}
        self._room = room
        self._inbox: Mailbox[Frames] = Mailbox(room.world)
        room.wires[name] = self

    def send(self, frames: Sequence[Buffer]) -> None:
        """See MemberTransport; what is sent over a connection that was cut is lost."""
        if self._room.wires.get(self.name) is self:
            self._room.inbox.put((self.name, copied(frames)))

    def arrive(self, frames: Frames) -> None:
        """Something from the hub."""
        self._inbox.put(frames)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport; waits in virtual time."""
        frames = self._inbox.get(timeout_s)
        return None if frames is None else list(frames)

    def reconnect(self) -> None:
        self._inbox = Mailbox(self._room.world)
        self._room.wires[self.name] = self

    def received_bytes(self) -> int:
        """See MemberTransport. Messages are always whole."""
        return 0

    def traffic(self) -> Traffic:
        """See MemberTransport. There is no socket to count at."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        """The connection is gone, and the hub's kernel knows it."""
        if self._room.wires.get(self.name) is self:
            del self._room.wires[self.name]


class Room:
    """One hub, served in virtual time. `wires` are the connections that stand, by name."""

    process: Process
    """The one that serves the hub."""

    def __init__(
        self,
        hub: Hub,
        observe: Observer = lambda effect: None,
        journal: Journal | None = None,
    ) -> None:
        self.world = World()
        self.hub = hub
        self.wires: dict[bytes, Wire] = {}
        self.inbox: Mailbox[tuple[bytes, Frames]] = Mailbox(self.world)
        self._cached: tuple[Sequence[Buffer], Frames] | None = None
        self._observe = observe
        self.serve(hub, journal)

    def serve(self, hub: Hub, journal: Journal | None) -> None:
        """Run this hub, from now on; the one before is killed, and what had arrived is lost."""
        world, observe = self.world, self._observe
        if hub is not self.hub:
            self.process.kill()
            self.hub, self.inbox = hub, Mailbox(world)
        self.process = world.start(
            "hub", lambda: serve(hub, self, world.clock, observe, journal=journal), world.now
        )

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """See HubTransport; waits in virtual time."""
        found = self.inbox.get(timeout_s)
        while found is not None:
            yield found[0], list(found[1])
            found = self.inbox.get(0.0)

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        wire = self.wires.get(to)
        if wire is None:
            return False
        if self._cached is None or self._cached[0] is not frames:
            self._cached = frames, copied(frames)
        wire.arrive(self._cached[1])
        return True

    def close(self) -> None:
        """See HubTransport."""

    def run(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Let so much virtual time pass, or less if it is enough; raises what the hub raised."""
        until = self.world.now + round(seconds * SECOND)
        passed = []
        self.world.at(until, lambda: passed.append(True))
        while not passed and not enough() and self.world.step():
            if self.process.error is not None:
                raise self.process.error


@dataclass
class Trainee:
    """A member with a link of its own and nothing to learn: it gives the same vector to each
    round."""

    name: str
    elements: int
    pace_s: float
    applied: int = 0
    rounds: int = 0
    """It has given to."""
    leaving: bool = False
    codec: Codec | None = None
    """In place of what the hub's welcome names, where its parts are of another size."""
    fixed: FixedTensors | None = None
    """What the first of them hands to the others."""
    process: Process = field(init=False)
    wire: Wire = field(init=False)

    def start(self, room: Room, wire: Wire) -> None:
        """Join now, and train until told to leave."""
        self.wire = wire
        self.process = room.world.start(self.name, lambda: self._live(room, wire), room.world.now)

    @property
    def over(self) -> bool:
        """Whether it has come to its end."""
        return self.process.over

    def _live(self, room: Room, wire: Wire) -> None:
        try:
            self._train(room, wire)
        finally:
            wire.close()

    def _train(self, room: Room, wire: Wire) -> None:
        link = Link(wire, room.world.clock)
        params: Vector = np.zeros(self.elements, np.float32)
        start = link.join(
            Request("model", self.name, fixed_tensors=self.fixed), params, checksum(params)
        )
        if self.codec is not None:
            link.outbox.codec = link.inbox.codec = self.codec
        self.applied, known, round = start.applied, start.checksum, start.round
        own: Vector = np.ones(self.elements, np.float32)
        while not self.leaving:
            room.world.sleep(self.pace_s)
            link.submit(Submission(round, own, 1.0, self.applied, known))
            self.rounds += 1
            round += 1
            while self.applied < round:
                found = link.wait(self.applied)
                if isinstance(found, CatchUp):
                    self.applied, round = found.applied, max(round, found.round)
                    known = found.checksum if found.base is not None else known
                    break
                self.applied, known = found.round + 1, found.checksum
        link.leave("done")
