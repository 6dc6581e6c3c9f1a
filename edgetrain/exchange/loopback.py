"""A transport in memory: the public fake, which passes the same tests as ZeroMQ."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence

from edgetrain.exchange.transport import Traffic
from edgetrain.vectors.vector import Buffer


class Loopback:
    """A hub's end in memory; `connect` makes the members' ends. Safe between threads."""

    def __init__(self) -> None:
        self._inbox: queue.Queue[tuple[bytes, list[Buffer]]] = queue.Queue()
        self._members: dict[bytes, queue.Queue[list[Buffer]]] = {}
        self._numbers = itertools.count()

    def connect(self) -> LoopbackMember:
        """A new member's end."""
        name = b"loopback-%d" % next(self._numbers)
        box = self._members[name] = queue.Queue()
        return LoopbackMember(self, name, box)

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """See HubTransport."""
        try:
            yield self._inbox.get(timeout_s > 0, timeout_s)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        """See HubTransport."""
        box = self._members.get(to)
        if box is None:
            return False
        box.put(list(frames))
        return True

    def close(self) -> None:
        """See HubTransport."""
        self._members.clear()


class LoopbackMember:
    """A member's end of a Loopback."""

    def __init__(self, hub: Loopback, name: bytes, box: queue.Queue[list[Buffer]]) -> None:
        self._hub = hub
        self._name = name
        self._box = box
        self.connections = 1

    def send(self, frames: Sequence[Buffer]) -> None:
        """See MemberTransport."""
        self._hub._inbox.put((self._name, list(frames)))

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """See MemberTransport."""
        try:
            return self._box.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None

    def reconnect(self) -> None:
        """See Reconnecting."""
        self._box = self._hub._members[self._name] = queue.Queue()

    def received_bytes(self) -> int:
        """See MemberTransport. Messages in memory are always whole."""
        return 0

    def traffic(self) -> Traffic:
        """See MemberTransport. There is no socket to count at."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        """See MemberTransport."""
        self._hub._members.pop(self._name, None)
