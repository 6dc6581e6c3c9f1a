"""A member's end of ZeroMQ: one DEALER, connected to one hub.

A hub may have several addresses: it moves to another network, or a board with two interfaces comes
back with one. They are tried in turn, whatever is at the first: nothing, something that is silent,
a hub with another key, one that does not let this machine in, or (not encrypted) one of another
job. Only once all have said so, that is raised. A DEALER that was connected to all of them at once
would deal its messages out among them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence

import zmq

from edgetrain.errors import EdgetrainError, HubUnreachable, Refused
from edgetrain.exchange.addresses import all_said, join_address, split_address
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.messages import Refuse, unpack
from edgetrain.exchange.transport import Traffic, owned
from edgetrain.exchange.zeromq.frames import LINGER_MS, frame_of, receive_frames, set_options
from edgetrain.exchange.zeromq.handshakes import (
    MEMBER_EVENTS,
    MemberHandshake,
    next_event,
)
from edgetrain.exchange.zeromq.sockets import OpenSockets
from edgetrain.exchange.zeromq.tcp_counters import ConnectionTo
from edgetrain.vectors.vector import Buffer

log = logging.getLogger("edgetrain")

_OF_OTHERS = ("job", "model", "session")
"""Codes by which a hub of another job refuses."""


class MemberSocket:
    """A member's end: a MemberTransport, and Reconnecting. Encrypted if it has credentials."""

    def __init__(
        self,
        address: str | Sequence[str],
        max_message_bytes: int = -1,
        credentials: Credentials | None = None,
    ) -> None:
        """Connect to "tcp://host:port", or the first of these. Raises NetworkError."""
        hubs = [address] if isinstance(address, str) else address
        self._hubs = deque(split_address(each) for each in hubs)
        """Host and port of the hub's addresses; the first is in use."""
        self._said: dict[str, EdgetrainError] = {}
        """By address: why it is not the hub's. Empty once the hub was heard."""
        self._moves = self._alive_bytes = 0
        self._has_moved = False
        """It went to another address, and nothing was sent there yet."""
        self._name = b"m" + os.urandom(16)
        if credentials is not None:
            self._name = owned(credentials.pair.public, os.urandom(16))
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials
        self._handshake = MemberHandshake(encrypted=credentials is not None)
        self._connection = ConnectionTo()
        self._sockets = OpenSockets(self)
        self._open()

    def _open(self) -> None:
        """Make the socket and connect it, under the same name as every socket before it: a hub that
        was restored knows where to say so."""
        host, port = self._hubs[0]
        self._was_heard = False
        self._handshake.socket_renewed()
        self._socket = self._sockets.open(zmq.DEALER)
        set_options(self._socket, self._max_message_bytes)
        self._socket.setsockopt(zmq.ROUTING_ID, self._name)
        if self._credentials is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._credentials.hub)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._credentials.pair.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._credentials.pair.secret)
        self._monitor = self._sockets.watch(self._socket, MEMBER_EVENTS)
        self._connection.port = port
        shown = f"[{host}]" if ":" in host else host
        self._socket.connect(f"tcp://{shown}:{port}")

    @property
    def connections(self) -> int:
        """See Reconnecting. Known as soon as the first message of a new connection is. Below 0
        where what was sent went to another address: it has to be sent again."""
        return -self._moves if self._has_moved else self._handshake.connections

    @property
    def addresses(self) -> dict[str, str]:
        shown = (join_address(*hub) for hub in self._hubs)
        return {at: self._said[at].message if at in self._said else "" for at in shown}

    def reconnect(self) -> None:
        """See Reconnecting. An address that was silent gives way to the next."""
        if not self._was_heard and len(self._hubs) > 1:
            self._hubs.rotate(-1)
            log.info("no answer; trying the hub at %s, port %d", *self._hubs[0])
        self._renew()
        self._handshake.connections = 0

    def _give_way(self, error: EdgetrainError) -> None:
        """Go to the next address: this one is not the hub's. Raises once none is."""
        self._said[join_address(*self._hubs[0])] = error
        if len(self._said) == len({*self._hubs}):
            raise all_said(self._said)
        self._was_heard = False
        self.reconnect()
        self._moves, self._has_moved = self._moves + 1, True

    def _renew(self) -> None:
        """Drop the connection and what is queued on it, and make another."""
        self._connection.is_established()  # libzmq may have replaced it: count the last one too
        self._connection.let_go()
        self._close_socket(0)
        self._open()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; it is sent in the background, once the connection stands.

        Once the hub has refused this machine's key there is no connection, and libzmq makes no
        other: then the message is dropped. Raises as `receive` does.
        """
        self._has_moved = False
        try:
            packed = [frame_of(buffer) for buffer in frames]
            self._socket.send_multipart(packed, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # without NOBLOCK it would wait for a connection for ever
            self._read_monitor()

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """The next message's frames, or None after `timeout_s` seconds without one.

        Raises Refused if the hub does not let this machine's key in, HubUnreachable if the hub is
        not the one whose key is pinned, or one end encrypts and the other does not.
        """
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            self._read_monitor()
            return None
        frames = receive_frames(self._socket)
        if (refused := self._refusal(frames)) is not None:
            self._give_way(refused)
            return None
        self._was_heard = True
        self._said.clear()
        self._read_monitor()
        return frames

    def _refusal(self, frames: Sequence[Buffer]) -> Refused | None:
        """What another job's hub says, at one of several addresses without encryption: with it, a
        hub that has proved its key is the one."""
        if self._credentials is not None or len(self._hubs) == 1 or frames[0] != Refuse.kind:
            return None
        message = unpack(frames)
        if not isinstance(message, Refuse) or message.code not in _OF_OTHERS:
            return None
        return Refused(message.code, f"the hub refused: {message.code}: {message.reason}")

    def _read_monitor(self) -> None:
        while (found := next_event(self._monitor)) is not None:
            try:
                remedy = self._handshake.record_event(found[0])
            except (Refused, HubUnreachable) as error:
                self._give_way(error)
                return
            match remedy:
                case "renew":
                    self._renew()
                case "hang up":
                    self._connection.hang_up()

    @property
    def waitable(self) -> zmq.Socket[bytes] | None:
        """The handle for another poll to wait for a message; None: closed."""
        return None if self._socket.closed else self._socket

    def received_bytes(self) -> int:
        """See MemberTransport. Only what a hub sends that has proved itself is a sign of life."""
        if self._handshake.state == "stands":
            self._alive_bytes = self.traffic().received_bytes
        return self._alive_bytes

    def traffic(self) -> Traffic:
        """Bytes at the socket, as the kernel counts them; zeros before the connection stands."""
        return self._connection.traffic()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Send what is queued, for at most `linger_ms`, then close. Works twice.

        If the hub is known to be gone, what is queued is dropped at once.
        """
        known = self._handshake.proved and not self._sockets.context.closed
        lost = known and not self._connection.is_established()
        self._connection.let_go()
        self._close_socket(0 if lost else linger_ms)
        self._sockets.close()

    def _close_socket(self, linger_ms: int) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._sockets.close_socket(self._monitor)
        self._sockets.close_socket(self._socket, linger_ms)


def wait_for_message(member: MemberSocket, timeout_s: float) -> list[bytes] | None:
    """The next message to a member, or None after `timeout_s`. Raises as `receive` does."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        frames = member.receive(0.1)
        if frames is not None:
            return [bytes(frame) for frame in frames]
    return None
