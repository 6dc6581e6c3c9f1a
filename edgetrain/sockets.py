"""ZeroMQ, and nothing else: the one module that imports zmq.

A hub's end is a ROUTER, a member's a DEALER. Both hand over and take lists of frames; what they
mean is known by `messages`. libzmq's own I/O thread moves the bytes and the kernel watches the
connection, so that a member is alive while it computes and needs no Python thread. Payloads travel
without a copy: a buffer that was sent must not be written again.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from edgetrain.allocator import keep_freed
from edgetrain.errors import HubUnreachable, NetworkError
from edgetrain.messages import Buffer
from edgetrain.transport import SILENCE_S, Traffic

ZERO_COPY_BYTES = 1 << 16
"""Below this size a copy is cheaper than the bookkeeping that avoids it."""

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
    """All frames of one message; payload frames stay where libzmq put them."""
    return [
        frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer
        for frame in sock.recv_multipart(zmq.NOBLOCK, copy=False)
    ]


class HubSocket:
    """The hub's end. `address` is where it listens, with the port that was chosen."""

    def __init__(self, address: str, max_message_bytes: int = -1) -> None:
        host, port = split_address(address)
        keep_freed()  # libzmq allocates every payload: whole contributions, in every round
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _common(self._socket, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
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
        self._cached: tuple[Sequence[Buffer], list[zmq.Frame | Buffer]] | None = None

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, list[Buffer]]]:
        """(sender, frames) of what has arrived, after waiting for the first at most `timeout_s`."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return
        for _ in range(256):  # so that a flood cannot keep the caller from its clock
            try:
                sender, *frames = _receive(self._socket)
            except zmq.Again:
                return
            yield bytes(sender), frames

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
        for inode, connection in _connections():
            with connection:
                if connection.getsockname()[1] == self.port:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    self._seen[inode] = _traffic(info)
        seen = self._seen.values()
        return Traffic(
            sum(t.sent_bytes for t in seen),
            sum(t.received_bytes for t in seen),
            sum(t.retransmitted_bytes for t in seen),
            max((t.round_trip_s for t in seen), default=0.0),
        )

    def close(self) -> None:
        """Send what is queued (for a while), then let go; works twice."""
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

    def __init__(self, address: str, max_message_bytes: int = -1) -> None:
        self._hub = split_address(address)
        host, port = self._hub
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _common(self._socket, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTING_ID, b"m" + os.urandom(16))
        self._socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self._connection: socket.socket | None = None

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queue a message; it is sent in the background, and once the connection stands."""
        self._socket.send_multipart([_frame(buffer) for buffer in frames], copy=False)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        """The next message's frames, or None after `timeout_s` seconds without one."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        return _receive(self._socket)

    def received_bytes(self) -> int:
        """Bytes so far, those of a message that is not whole yet too."""
        return self.traffic().received_bytes

    def traffic(self) -> Traffic:
        """Bytes at the socket, as the kernel counts them; zeros before the connection stands."""
        if self._connection is None:
            self._connection = _connection_to(self._hub[1])
        if self._connection is None:
            return Traffic(0, 0, 0, 0.0)
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return _traffic(info)

    def close(self) -> None:
        """Send what is queued (for a while), then let go; works twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._socket.close()
        self._context.term()


# struct tcp_info of Linux: tcpi_rtt (µs) at 68, tcpi_bytes_acked and _received at 120,
# tcpi_notsent_bytes at 144, tcpi_bytes_sent and _retrans at 200 (Linux 4.19 and newer).
_RTT, _BYTES, _SENT = struct.Struct("=I"), struct.Struct("=QQ"), struct.Struct("=QQ")


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
