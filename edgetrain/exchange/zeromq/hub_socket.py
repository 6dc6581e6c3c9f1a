"""A hub's end of ZeroMQ: one ROUTER that members connect to."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgetrain.errors import NetworkError
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.gate import Gate
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.limits import Refusals
from edgetrain.exchange.transport import Traffic, owner_of
from edgetrain.exchange.zeromq.door import (
    _AT_THE_DOOR,
    _FAILED,
    _PROTOCOL,
    _UNPROVED,
    _Door,
    _watch,
)
from edgetrain.exchange.zeromq.frames import (
    _TIMED_OUT,
    HANDSHAKE_MS,
    UNREAD_MESSAGES,
    WAITING_MESSAGES,
    _common,
    _frame,
    _payload,
)
from edgetrain.exchange.zeromq.tcp_counters import (
    _connections,
    _traffic,
)
from edgetrain.vectors.allocator import keep_freed
from edgetrain.vectors.vector import Buffer


class HubSocket:
    """The hub's end. `address` is where it listens, with the port that was chosen.

    With a `gate` every connection is encrypted, and only those it admits carry messages; whoever
    comes with a token is enrolled here, and is no member. `refusals.tell` is told of the others.
    """

    def __init__(self, address: str, max_message_bytes: int = -1, gate: Gate | None = None) -> None:
        host, port = split_address(address)
        keep_freed()  # libzmq allocates every payload: whole contributions, in every round
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _common(self._socket, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
        self.refusals = Refusals()
        self._door: _Door | None = None
        if gate is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, gate.pair.secret)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"edgetrain")
            self._door = _Door(self._context, gate)
            self._door.refusals = self.refusals
        self._monitor = _watch(self._socket, _FAILED if gate is None else _AT_THE_DOOR)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if self._door is not None:
            self._poller.register(self._door.socket, zmq.POLLIN)
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
        self._seen: dict[str, Traffic] = {}
        self._past = Traffic(0, 0, 0, 0.0)
        self._look_again = float("-inf")
        self._cached: tuple[Sequence[Buffer], list[zmq.Frame | Buffer]] | None = None

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """(sender, frames) of what has arrived, after waiting for the first at most `timeout_s`."""
        ready = self._ready(timeout_s)
        if self._monitor in ready:
            self._read_monitor()
        if self._door is not None and self._door.socket in ready:
            self._door.answer()
        if self._socket not in ready:
            return
        for _ in range(256):  # so that a flood cannot keep the caller from its clock
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._door is None or self._passes(self._door.gate, sender.bytes, frames):
                yield sender.bytes, [_payload(frame) for frame in frames]

    def _ready(self, timeout_s: float) -> set[object]:
        """What there is to read; waits for messages, not for what happens at the door."""
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            ready = {socket for socket, _ in self._poller.poll(math.ceil(left_s * 1000))}
            if self._socket in ready or not ready:
                return ready
            if not left_s:  # a crowd at the door must not keep the caller from its clock
                return ready
            if self._monitor in ready:
                self._read_monitor()
            if self._door is not None and self._door.socket in ready:
                self._door.answer()

    def _passes(self, gate: Gate, sender: bytes, frames: Sequence[zmq.Frame]) -> bool:
        """Whether a message is a member's; a token's holder is enrolled, a revoked one dropped."""
        if frames and self._door is not None:
            self._door.callers.heard(int(frames[0].get(zmq.SRCFD)))
        identity = str(frames[0].get("User-Id")) if frames else ""
        if identity.startswith("token "):
            answer, said = gate.enrol(identity, [frame.bytes for frame in frames[:3]])
            if said:
                self.refusals.add("token", f"{frames[0].get('Peer-Address')}: {said}")
            self.send(sender, answer)
            return False
        if gate.knows(identity):
            if identity == f"member {spell(owner_of(sender))}":
                return True
            self.refusals.add("name", "a connection that goes by another's key; it is not heard")
            return False
        key = identity.removeprefix("member ")[:8]
        self.refusals.add("revoked", f"key {key}… has been revoked; what it sends is dropped")
        return False

    def _read_monitor(self) -> None:
        """Those that failed before the gate was asked: other keys, other mechanisms, silence."""
        for _ in range(256):
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except (zmq.Again, RuntimeError):
                return
            value = int(event["value"])
            if self._door is not None and self._door.callers.tell(event["event"], value):
                self.refusals.add("unproved", f"a connection: {_UNPROVED}")
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                said = _PROTOCOL.get(value, "it does not speak ZeroMQ as members do")
                self.refusals.add(said, f"a connection: {said}")
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in _TIMED_OUT:
                seconds = HANDSHAKE_MS // 1000
                said = f"a connection: it did not say who it is within {seconds} s"
                self.refusals.add("silent", said)

    def send(self, to: bytes, frames: Sequence[Buffer]) -> bool:
        """Queue a message for a peer; False when there is no connection to it."""
        if self._cached is None or self._cached[0] is not frames:
            self._cached = frames, [_frame(buffer) for buffer in frames]
        try:
            self._socket.send_multipart([to, *self._cached[1]], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise NetworkError(f"cannot send: {error}") from None
        return True

    def traffic(self) -> Traffic:
        """Sums over the members' connections; one that has closed keeps what was last seen of
        it."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look()
            # It looks at every open file: with a thousand connections that must not slow rounds.
            took_s = time.monotonic() - now
            self._look_again = now + (100 * took_s if len(self._seen) > 64 else 0.0)
        seen = [self._past, *self._seen.values()]
        return Traffic(
            sum(t.sent_bytes for t in seen),
            sum(t.received_bytes for t in seen),
            sum(t.retransmitted_bytes for t in seen),
            max(t.round_trip_s for t in seen),
        )

    def _look(self) -> None:
        """Read the counters of the connections there are; add up those of the ones that are no
        more."""
        found = {}
        for inode, connection in _connections():
            with connection:
                if connection.getsockname()[1] == self.port:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found[inode] = _traffic(info)
        gone = [traffic for inode, traffic in self._seen.items() if inode not in found]
        self._past = Traffic(
            self._past.sent_bytes + sum(t.sent_bytes for t in gone),
            self._past.received_bytes + sum(t.received_bytes for t in gone),
            self._past.retransmitted_bytes + sum(t.retransmitted_bytes for t in gone),
            0.0,
        )
        self._seen = found

    def close(self) -> None:
        """Send what is queued (for a while), then let go; works twice."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
        if self._door is not None:
            self._door.socket.close()
        self._socket.close()
        self._context.term()


def _bind_error(error: zmq.ZMQError, host: str, port: int) -> NetworkError:
    if error.errno == zmq.EADDRINUSE:
        return NetworkError(
            f"port {port} on {host} is in use",
            "another hub may be running; choose a port with --bind tcp://HOST:PORT",
        )
    return NetworkError(f"cannot listen on {host}:{port}: {error}", "is it this machine's address?")
