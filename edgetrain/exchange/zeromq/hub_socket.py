"""A hub's end of ZeroMQ: one ROUTER that members connect to."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import zmq

from edgetrain.errors import NetworkError
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.pairs import short, spell
from edgetrain.exchange.limits import Refusals
from edgetrain.exchange.transport import Traffic, owned, owner_of
from edgetrain.exchange.zeromq.arrivals import Limits
from edgetrain.exchange.zeromq.frames import (
    HANDSHAKE_MS,
    UNREAD_MESSAGES,
    frame_of,
    payload_of,
    set_options,
    waiting_messages,
)
from edgetrain.exchange.zeromq.handshakes import (
    ENCRYPTED_HUB_EVENTS,
    PLAIN_HUB_EVENTS,
)
from edgetrain.exchange.zeromq.member_connections import MemberConnections
from edgetrain.exchange.zeromq.sockets import OpenSockets
from edgetrain.exchange.zeromq.tcp_counters import ConnectionsAt
from edgetrain.exchange.zeromq.watch import Watch
from edgetrain.vectors.allocator import keep_freed
from edgetrain.vectors.vector import Buffer

if TYPE_CHECKING:
    from edgetrain.exchange.keys.gate import Gatekeeper
    from edgetrain.exchange.zeromq.inside import InsideEnd
    from edgetrain.exchange.zeromq.member_socket import MemberSocket

MESSAGES_PER_POLL = 256
"""Messages, or events, that one poll handles, so that a flood of them cannot keep the caller from
its clock."""

NOW, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Numbers: to make one of flags takes as long as to send."""

BACKLOG = 4096
"""Connections that may wait to be accepted: a fleet's all come at once, and who finds the queue
full (libzmq's has room for 100) tries again a second later."""

INSIDE = "inproc://hub"
"""Address for ends in this process. A context has one hub."""

FEW_CONNECTIONS = 64
"""Up to this many the kernel's counters are read at every question for them."""


class HubSocket:
    """The hub's end: a HubTransport. `address` is where it listens, with the port it was given.

    With a `gate` every connection is encrypted, and only those that the gate admits carry
    messages. A device that comes with a token is enrolled here, and is not a member yet.
    `refusals.tell` is called with a line for those that were refused.
    """

    def __init__(
        self,
        address: str,
        max_message_bytes: int = -1,
        gate: Gatekeeper | None = None,
        handshake_ms: int = HANDSHAKE_MS,
    ) -> None:
        """Bind to `address`, "tcp://host:port" (port 0: any). Raises NetworkError."""
        host, port = split_address(address)
        keep_freed()  # libzmq allocates every payload: whole contributions, in every round
        self._handshake_ms = handshake_ms
        self._sockets = OpenSockets(self)
        self._socket = self._sockets.open(zmq.ROUTER)
        set_options(self._socket, max_message_bytes, handshake_ms)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        waiting = waiting_messages(max_message_bytes)
        self._socket.setsockopt(zmq.RCVHWM, waiting)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
        self.refusals = Refusals()
        self._door: Door | None = None
        self._members = MemberConnections()
        self._allowed: Mapping[bytes, str] = {}
        """The keys on the list, when last checked."""
        events = PLAIN_HUB_EVENTS if gate is None else ENCRYPTED_HUB_EVENTS
        monitor = self._sockets.watch(self._socket, events)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = Limits.of(descriptors, waiting, max_message_bytes)
        self._watch = Watch(monitor, limits, gate is not None, handshake_ms)
        self._sockets.before_close(self._watch.stop)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._alone = [(self._socket, zmq.POLLIN)]
        self._other: MemberSocket | None = None
        if gate is not None:
            self._allowed = gate.allowed()
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, gate.pair.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"edgetrain")
            from edgetrain.exchange.zeromq.door import Door  # of an encrypted hub

            door = Door(self._sockets.open(zmq.REP), gate, self.refusals, self._watch.was_refused)
            self._poller.register(door.socket, zmq.POLLIN)
            self._door = door
        shown = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(error, host, port) from None
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").decode().rsplit(":", 1)[1])
        self.address = f"tcp://{shown}:{self.port}"
        self._counters = ConnectionsAt(self.port)
        self._look_again = float("-inf")
        self._inside: set[bytes] = set()
        """The names of ends in this process."""
        self._socket.bind(INSIDE)
        self._sent_last: tuple[Sequence[Buffer], list[zmq.Frame | Buffer]] | None = None
        """The buffers sent last and their frames: a reply goes to every member."""

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """(sender, frames) of what has arrived, after waiting for the first at most `timeout_s`."""
        ready = self._wait(timeout_s)
        self._handle_newcomers(ready)
        if self._door is not None and self._door.gate.allowed() is not self._allowed:
            self._allowed = self._door.gate.allowed()
            for key in self._members.hang_up_all_but(self._allowed):
                line = f"key {short(key)}… has been revoked; its connections are ended"
                self.refusals.add("revoked", line)
        if self._socket not in ready:
            return
        receive = self._socket.recv
        for _ in range(MESSAGES_PER_POLL):
            sender, frames = receive(NOW), [frame := receive(NOW, False)]
            while frame.more:
                frames.append(frame := receive(NOW, False))
            if sender in self._inside or self._is_from_member(sender, frames):
                yield sender, [payload_of(frame) for frame in frames]
            if not zmq.zmq_poll(self._alone, 0):  # a fifth of what zmq.Again takes to be raised
                return

    def connect(self) -> InsideEnd:
        """An end of a member in this process; with a gate it has the hub's own key. It is closed
        with this one. May be called by another thread."""
        own = b"m" if self._door is None else owned(self._door.gate.pair.public, b"")
        name = own + os.urandom(16)
        self._inside.add(name)
        from edgetrain.exchange.zeromq.inside import InsideEnd

        return InsideEnd(self._sockets, INSIDE, name)

    def wake_for(self, other: MemberSocket) -> None:
        """From now on `poll` also returns, with nothing, when a message for this end is here."""
        self._other = other

    def _wait(self, timeout_s: float) -> set[object]:
        """Wait for messages, and handle newcomers meanwhile; returns what is ready to be read."""
        until = time.monotonic() + timeout_s
        # It may replace its socket between two polls.
        other = None if self._other is None else self._other.waitable
        if other is not None:
            self._poller.register(other, zmq.POLLIN)
        try:
            while True:
                left_s = max(0.0, until - time.monotonic())
                ready = {socket for socket, _ in self._poller.poll(math.ceil(left_s * 1000))}
                if self._socket in ready or other in ready or not ready:
                    return ready
                if not left_s:  # newcomers without end must not keep the caller from its clock
                    return ready
                self._handle_newcomers(ready)
        finally:
            if other is not None:
                self._poller.unregister(other)

    def _handle_newcomers(self, ready: set[object]) -> None:
        for kind, line in self._watch.read_lines():
            self.refusals.add(kind, line)
        if self._door is not None and self._door.socket in ready:
            self._door.answer_requests()

    def _is_from_member(self, sender: bytes, frames: Sequence[zmq.Frame]) -> bool:
        """Whether a message is from a member. Answers the enrolment of a token's holder; drops
        messages under a key that was revoked, or that is not the one in the sender's name."""
        door, descriptor = self._door, int(frames[0].get(zmq.SRCFD)) if frames else -1
        if door is None:
            self._watch.count_message(descriptor, b"")
            return True
        identity = str(frames[0].get("User-Id")) if frames else ""
        if identity.startswith("token "):
            answer, remark = door.gate.enrol(identity, [frame.bytes for frame in frames[:4]])
            if remark:
                self.refusals.add("token", f"{frames[0].get('Peer-Address')}: {remark}")
            self.send(sender, answer)
            return False
        if door.gate.knows(identity):
            if identity == f"member {spell(owner_of(sender))}":
                self._watch.count_message(descriptor, owner_of(sender))
                self._members.message_came(sender, descriptor)
                return True
            self.refusals.add("name", "a connection that goes by another's key; it is not heard")
            return False
        key = identity.removeprefix("member ")[:8]
        self.refusals.add("revoked", f"key {key}… has been revoked; what it sends is dropped")
        return False

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        """Queue a message for a peer; False if there is no connection to it, or its queue is full.

        Raises NetworkError. The buffers must not be written again.
        """
        if self._sent_last is None or self._sent_last[0] is not frames:
            self._sent_last = frames, [frame_of(buffer) for buffer in frames]
        send, (*first, last) = self._socket.send, self._sent_last[1]
        try:
            send(to, MORE)
            for frame in first:
                send(frame, MORE)
            send(last, NOW)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise NetworkError(f"cannot send: {error}") from None
        return True

    def traffic(self) -> Traffic:
        """Sums over all members' connections, those that have closed included."""
        now = time.monotonic()
        if now >= self._look_again:
            self._counters.look()
            # That looks at every open file: with a thousand connections it must not slow rounds.
            took_s = time.monotonic() - now
            many = self._counters.count > FEW_CONNECTIONS
            self._look_again = now + (100 * took_s if many else 0.0)
        return self._counters.traffic()

    @property
    def connections(self) -> int:
        """Members' connections at the last call of `traffic`."""
        return self._counters.count

    def close(self) -> None:
        """Send what is queued, for at most LINGER_MS, then close. Works twice."""
        if not self._socket.closed:
            self._watch.stop()
            self._socket.disable_monitor()
        self._sockets.close()


def _bind_error(error: zmq.ZMQError, host: str, port: int) -> NetworkError:
    if error.errno == zmq.EADDRINUSE:
        return NetworkError(
            f"port {port} on {host} is in use",
            "another hub may be running; choose a port with --bind tcp://HOST:PORT",
        )
    return NetworkError(f"cannot listen on {host}:{port}: {error}", "is it this machine's address?")
