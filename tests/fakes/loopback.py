"""A transport in memory, for threads of one process, in place of exchange/zeromq/."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.vector import Buffer


class Loopback:
    """A hub's end in memory, a HubTransport. `connect` makes the members' ends. Thread-safe."""

    def __init__(self, make_queue: Callable[[], queue.Queue[Any]] = queue.Queue) -> None:
        self._make_queue = make_queue
        self._inbox: queue.Queue[tuple[bytes, list[Buffer]]] = make_queue()
        self._members: dict[bytes, queue.Queue[list[Buffer]]] = {}
        self._numbers = itertools.count()
        self.restarts = 0

    def restart(self) -> None:
        """The hub's process ends, and with it all connections; another one listens here."""
        self.restarts += 1
        self._inbox = self._make_queue()
        self._members.clear()

    def connect(self) -> LoopbackMember:
        """A new member's end."""
        return LoopbackMember(self, b"loopback-%d" % next(self._numbers))

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        try:
            yield self._inbox.get(timeout_s > 0, timeout_s)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        box = self._members.get(to)
        if box is None:
            return False
        box.put(list(frames))
        return True

    def traffic(self) -> Traffic:
        """See HubTransport. There is no socket to count at."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        self._members.clear()

    # what its members' ends do

    def deliver(self, name: bytes, frames: Sequence[Buffer]) -> None:
        """Put a member's message into the hub's inbox."""
        self._inbox.put((name, list(frames)))

    def open_box(self, name: bytes) -> queue.Queue[list[Buffer]]:
        """A new, empty inbox for a member; the hub's messages go there from now on."""
        box = self._members[name] = self._make_queue()
        return box

    def disconnect(self, name: bytes) -> None:
        """Close a member's connection: the hub can send it nothing."""
        self._members.pop(name, None)


class LoopbackMember:
    """A member's end of a Loopback: a MemberTransport, and Reconnecting."""

    def __init__(self, hub: Loopback, name: bytes) -> None:
        self._hub = hub
        self._name = name
        self.addresses = {"": ""}
        """See Reconnecting."""
        self.reconnect()

    def send(self, frames: Sequence[Buffer]) -> None:
        self._hub.deliver(self._name, frames)

    @property
    def connections(self) -> int:
        return 1 + self._hub.restarts

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        if self._at != self._hub.restarts:
            self.reconnect()
        try:
            return self._box.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None

    def reconnect(self) -> None:
        self._at, self._box = self._hub.restarts, self._hub.open_box(self._name)

    def received_bytes(self) -> int:
        """See MemberTransport. Messages in memory are always complete."""
        return 0

    def traffic(self) -> Traffic:
        """See MemberTransport. There is no socket to count at."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        self._hub.disconnect(self._name)

    def cut(self) -> None:
        """The connection breaks, over a Loopback that loses what is under way then."""
        self._hub.cut(self._name)
