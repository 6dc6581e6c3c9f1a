"""A member's end of ZeroMQ: one DEALER, and what its handshakes say."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgetrain.errors import HubUnreachable, Refused
from edgetrain.exchange.addresses import split_address
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.transport import Traffic, owned
from edgetrain.exchange.zeromq.door import (
    _FAILED,
    _watch,
)
from edgetrain.exchange.zeromq.frames import LINGER_MS, _common, _frame, _receive
from edgetrain.exchange.zeromq.tcp_counters import (
    _connection_to,
    _established,
    _sum,
    _tcp_info,
    _traffic,
)
from edgetrain.vectors.vector import Buffer


class MemberSocket:
    """A member's end, connected to one hub."""

    def __init__(
        self,
        address: str,
        max_message_bytes: int = -1,
        credentials: Credentials | None = None,
    ) -> None:
        self._hub = split_address(address)
        self._name = b"m" + os.urandom(16)
        if credentials is not None:
            self._name = owned(credentials.pair.public, os.urandom(16))
        self._max_message_bytes = max_message_bytes
        self._credentials = credentials
        self._encrypted = credentials is not None
        self._proved = False
        """Whether the hub has proved who it is, on this connection or an earlier one."""
        self._context = zmq.Context()
        self.connections = 0
        """As of Reconnecting; known as soon as the first message of a new connection is."""
        self._connection: socket.socket | None = None
        self._past = Traffic(0, 0, 0, 0.0)
        """Of connections that are gone."""
        self._open()

    def _open(self) -> None:
        host, port = self._hub
        self._socket = self._context.socket(zmq.DEALER)
        _common(self._socket, self._max_message_bytes)
        # The same over every connection: a hub that was restored knows where to say so.
        self._socket.setsockopt(zmq.ROUTING_ID, self._name)
        self._monitor: zmq.Socket[bytes] | None = None
        self._failed = 0
        self._stands = False
        if self._credentials is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._credentials.hub)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._credentials.pair.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._credentials.pair.secret)
        self._monitor = _watch(self._socket, _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    def reconnect(self) -> None:
        """Drop the connection and what is queued on it, and make another."""
        self._renew()
        self.connections = 0

    def _renew(self) -> None:
        self.traffic()
        self._forget_connection()
        self._close_socket(0)
        self._open()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; it is sent in the background, and once the connection stands."""
        self._socket.send_multipart([_frame(buffer) for buffer in frames], copy=False)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """The next message's frames, or None after `timeout_s` seconds without one.

        Raises Refused when the hub does not let this machine's key in, HubUnreachable when the hub
        is not the one whose key is pinned, or encrypts where this member does not.
        """
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            self._read_monitor()
            return None
        frames = _receive(self._socket)
        self._read_monitor()
        return frames

    def _read_monitor(self) -> None:
        while self._monitor is not None and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except (zmq.Again, RuntimeError):
                return
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._proved = self._stands = True
                    self.connections += 1
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise Refused(
                        "key",
                        "the hub does not let this machine's key in",
                        "ask its owner for a token (edgetrain keys enroll NAME), then enroll here",
                    )
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if not self._proved:
                    raise HubUnreachable(*_UNLIKE[self._encrypted])
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self._stands:
                    self._renew()  # what arrived was damaged, and libzmq connects no more
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._hang_up()  # and leave the next attempt to whoever minds the silence
                case _:
                    self._failed += 1
                    # A hub that was genuine once may be starting again behind a proxy.
                    lost = self._failed >= HANDSHAKES_TRIED and not self._proved
                    if self._encrypted and lost:
                        raise HubUnreachable(*_WRONG_KEY)

    def received_bytes(self) -> int:
        """Bytes so far, those of a message that is not whole yet too."""
        return self.traffic().received_bytes

    def traffic(self) -> Traffic:
        """Bytes at the socket, as the kernel counts them; zeros before the connection stands."""
        if not self._is_connected() or self._connection is None:
            return self._past
        return _sum(self._past, _traffic(_tcp_info(self._connection)))

    def _is_connected(self) -> bool:
        if self._connection is not None and not _established(self._connection):
            self._forget_connection()  # libzmq makes another by itself
        if self._connection is None:
            self._connection = _connection_to(self._hub[1])
        return self._connection is not None

    def _hang_up(self) -> None:
        """libzmq has given the connection up, and connects no more: see that nothing arrives on it
        either, which would pass for a sign of life. The descriptor here keeps it open."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._forget_connection()

    def _forget_connection(self) -> None:
        if self._connection is not None:
            self._past = _sum(self._past, _traffic(_tcp_info(self._connection)))
            self._connection.close()
            self._connection = None

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Send what is queued, for at most `linger_ms`, then close. Works twice.

        If the hub is known to be gone, what is queued is dropped at once.
        """
        lost = self._proved and not self._context.closed and not self._is_connected()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._close_socket(0 if lost else linger_ms)
        self._context.term()

    def _close_socket(self, linger_ms: int) -> None:
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close(linger_ms)


HANDSHAKES_TRIED = 5
"""After so many that broke off, and none that did not, the key is what is wrong."""


_WRONG_KEY = (
    "the hub breaks off when this machine proves that it knows the hub's key",
    "is it the hub whose key is pinned (`edgetrain keys list` there prints it), and was it started "
    "with its keys?",
)


_UNLIKE = {
    False: (
        "the hub encrypts, and this member was told not to",
        "give the hub's key: --hub-key, or `edgetrain keys enroll`",
    ),
    True: (
        "this member encrypts, and the hub does not",
        "start the hub with its keys, or, inside a network you trust, use --insecure here",
    ),
}


def answer(member: MemberSocket, patience_s: float) -> list[bytes] | None:
    """The next message to a member, or None after so long. Raises as `receive`."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        frames = member.receive(0.1)
        if frames is not None:
            return [bytes(frame) for frame in frames]
    return None
