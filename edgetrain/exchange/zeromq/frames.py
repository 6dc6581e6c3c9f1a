"""ZeroMQ, and nothing else: the one module that imports zmq.

A hub's end is a ROUTER, a member's a DEALER. Both hand over and take lists of frames; what they
mean is known by `messages`. libzmq's own I/O thread moves the bytes and the kernel watches the
connection, so that a member is alive while it computes and needs no Python thread. Payloads travel
without a copy: a buffer that was sent must not be written again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from edgetrain.errors import HubUnreachable, NetworkError, Refused
from edgetrain.exchange.keys.keyring import Credentials, Gate, Pair, spell
from edgetrain.exchange.limits import Refusals
from edgetrain.exchange.messages import Buffer
from edgetrain.exchange.transport import SILENCE_S, Traffic, owned, owner_of
from edgetrain.vectors.allocator import keep_freed

ZERO_COPY_BYTES = 1 << 16
"""Below this size a copy is cheaper than the bookkeeping that avoids it."""

WAITING_MESSAGES = 64
"""So many messages of one peer wait to be read; then its connection is not read any more either,
and TCP stops it. They are bounded in size, so that nobody can fill the hub's memory."""

UNREAD_MESSAGES = 100_000
"""A peer that leaves so many messages unread is not reachable."""

HANDSHAKE_MS = 10_000
"""A connection that has not proved who it is after so long is closed."""

DOORS_PER_POLL = 16
"""New connections that are judged at a time, so that a crowd at the door keeps nobody inside."""

LINGER_MS = 5000
"""What was handed over but not sent yet gets so long when a socket closes."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port"; NetworkError says what is wrong with anything else."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise NetworkError(f"'{address}' is not an address: {error}") from None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path:
        raise NetworkError(
            f"'{address}' is not an address", "it reads tcp://HOST:PORT, as tcp://hub.local:5555"
        )
    return parts.hostname, port


def _common(sock: zmq.Socket[bytes], max_message_bytes: int) -> None:
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    # The protocol bounds what is in flight; a limit here would drop or block in the middle of it.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    sock.setsockopt(zmq.TCP_MAXRT, SILENCE_S * 1000)  # while something is under way
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)  # while nothing is
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_S // 2)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENCE_S // 2)
    sock.setsockopt(zmq.IPV6, 1)


def _frame(buffer: Buffer) -> zmq.Frame | Buffer:
    """Something to send; large buffers are referenced, not copied."""
    large = memoryview(buffer).nbytes >= ZERO_COPY_BYTES
    return zmq.Frame(buffer, copy=False) if large else buffer


def _receive(sock: zmq.Socket[bytes]) -> list[Buffer]:
    """All frames of one message."""
    return [_payload(frame) for frame in sock.recv_multipart(zmq.NOBLOCK, copy=False)]


def _payload(frame: zmq.Frame) -> Buffer:
    """What is in a frame; of a large one the memory where libzmq put it."""
    return frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer


_TIMED_OUT = (errno.EAGAIN, errno.ETIMEDOUT)


def new_pair() -> Pair:
    """A fresh Curve25519 key pair, drawn by libzmq (libsodium)."""
    public, secret = zmq.curve_keypair()
    return Pair(z85.decode(public), z85.decode(secret))


def pair_of(secret: bytes) -> Pair:
    """The pair that a secret key belongs to."""
    return Pair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


class _Door:
    """Judges who comes in: ZeroMQ asks it (ZAP, RFC 27) before a connection carries messages.

    Only sockets with a Gate have one. `answer` is called from the hub's own poll.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], gate: Gate) -> None:
        self.gate = gate
        self.refusals: Refusals
        self.callers = _Callers()
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Let in or turn away whoever stands there."""
        for _ in range(DOORS_PER_POLL):
            try:
                version, request, _, address, _, mechanism, *proved = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except (zmq.Again, ValueError):
                return
            identity, refused = "", "it has no key"
            if mechanism == b"CURVE" and len(proved) == 1:
                identity, refused = self.gate.admit(proved[0])
            if refused:
                self.callers.turned_away()
                kind = refused if "token" not in refused else "token"
                kind = "key" if refused.startswith("key ") else kind
                self.refusals.add(kind, f"{address.decode(errors='replace')}: {refused}")
            status = (b"400", b"refused") if refused else (b"200", b"")
            self.socket.send_multipart([version, request, *status, identity.encode(), b""])


_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_AT_THE_DOOR = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""An encrypted hub must not ask for HANDSHAKE_FAILED_PROTOCOL. libzmq tells that of every message
that cannot be deciphered, too (curve_mechanism_base.cpp, 4.3.5), and the telling leaves EAGAIN in
the errno by which it then judges the connection: instead of closing it, it never reads it again,
and takes for ever what is sent there. One flipped bit, and a member is neither heard nor missed."""


class _Callers:
    """Who went away from an encrypted hub without having proved itself, by what libzmq tells of all
    connections. What it cannot match it does not count: a refusal may go untold, none is made up.
    """

    def __init__(self) -> None:
        self._silent: set[int] = set()
        """Descriptors of connections that have said nothing yet."""
        self._proved = self._turned_away = 0
        """Of those: how many may do so, and how many may not."""
        self._explained = False

    def heard(self, descriptor: int) -> None:
        """A message came over this connection."""
        if descriptor in self._silent:
            self._silent.discard(descriptor)
            self._proved = max(0, self._proved - 1)

    def turned_away(self) -> None:
        """The door refused one, and said so."""
        self._turned_away += 1

    def tell(self, event: int, value: int) -> bool:
        """Whether this event is the end of one that could not prove itself."""
        if event == zmq.EVENT_ACCEPTED:
            self._silent.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proved += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._explained = True  # and its DISCONNECTED follows
        elif event == zmq.EVENT_DISCONNECTED:
            explained, self._explained = self._explained, False
            if value in self._silent:
                self._silent.discard(value)
                return not explained and self._is_unknown()
        return False

    def _is_unknown(self) -> bool:
        known = self._turned_away or self._proved
        if self._turned_away:
            self._turned_away -= 1
        elif self._proved:
            self._proved -= 1
        if not self._silent:
            self._turned_away = self._proved = 0
        return not known


_UNPROVED = (
    "it could not prove itself: its pinned key differs, it does not encrypt as this hub does, or "
    "it does not speak ZeroMQ"
)


def _watch(sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where libzmq tells of connections."""
    monitor = sock.get_monitor_socket(events)
    monitor.setsockopt(zmq.LINGER, 0)
    return monitor


_PROTOCOL: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it encrypts, and this hub does not",
}


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

    def close(self) -> None:
        """Send what is queued (for a while, if there is a hub), then let go; works twice."""
        lost = self._proved and not self._context.closed and not self._is_connected()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._close_socket(0 if lost else LINGER_MS)
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


# struct tcp_info of Linux: tcpi_rtt (µs) at 68, tcpi_bytes_acked and _received at 120,
# tcpi_notsent_bytes at 144, tcpi_bytes_sent and _retrans at 200 (Linux 4.19 and newer).
_RTT, _BYTES, _SENT = struct.Struct("=I"), struct.Struct("=QQ"), struct.Struct("=QQ")


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _established(connection: socket.socket) -> bool:
    return _tcp_info(connection)[0] == 1  # TCP_ESTABLISHED


def _sum(past: Traffic, now: Traffic) -> Traffic:
    return Traffic(
        past.sent_bytes + now.sent_bytes,
        past.received_bytes + now.received_bytes,
        past.retransmitted_bytes + now.retransmitted_bytes,
        now.round_trip_s,
    )


def _traffic(info: bytes) -> Traffic:
    (round_trip_us,) = _RTT.unpack_from(info, 68)
    acked, received = _BYTES.unpack_from(info, 120)
    sent, again = _SENT.unpack_from(info, 200) if len(info) >= 216 else (acked, 0)
    return Traffic(sent, received, again, round_trip_us * 1e-6)


def _connection_to(port: int) -> socket.socket | None:
    """This process's established TCP connection to a remote port: libzmq does not tell it."""
    for _, candidate in _connections():
        if candidate.getpeername()[1] == port:
            return candidate
        candidate.close()
    return None


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Every established TCP connection of this process, duplicated, by what Linux calls it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inode = str(entry.readlink())
            if not inode.startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        try:
            inet = candidate.family in (socket.AF_INET, socket.AF_INET6)
            if inet and candidate.type == socket.SOCK_STREAM and candidate.getpeername():
                yield inode, candidate
                continue
        except OSError:
            pass
        candidate.close()


def check_reachable(address: str, timeout_s: float) -> str:
    """Connect once without ZeroMQ, which would retry in silence; returns our own address.

    Raises HubUnreachable naming what failed: the name, the route, the port, or silence.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise HubUnreachable(
            f"the hub's name '{host}' cannot be resolved: {error.strerror}",
            "check the spelling, or use the IP address that the hub printed at its start",
        ) from None
    except TimeoutError:
        raise HubUnreachable(
            f"no answer from {address} within {timeout_s:g} s",
            "is the machine on, and does a firewall let the port through?",
        ) from None
    except ConnectionRefusedError:
        raise HubUnreachable(
            f"nothing listens at {address}",
            "start the hub first (edgetrain hub job.toml), and compare the port it prints",
        ) from None
    except OSError as error:
        raise HubUnreachable(f"{address} cannot be reached: {error.strerror or error}") from None
