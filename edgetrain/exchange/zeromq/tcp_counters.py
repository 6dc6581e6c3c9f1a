"""Bytes as Linux counts them on TCP connections: message headers and retransmissions included; and
how its TCP goes on after a pause.

libzmq does not say which sockets it has, so they are looked for among this process's open files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from edgetrain.exchange.descriptors import is_out_of_descriptors, reserve
from edgetrain.exchange.transport import Traffic

# struct tcp_info of Linux: tcpi_rtt (µs) at 68, tcpi_bytes_acked and _received at 120,
# tcpi_notsent_bytes at 144, tcpi_bytes_sent and _retrans at 200 (Linux 4.19 and newer).
_RTT, _BYTES, _SENT = struct.Struct("=I"), struct.Struct("=QQ"), struct.Struct("=QQ")
_ESTABLISHED = 1  # TCP_ESTABLISHED

_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

NO_TRAFFIC = Traffic(0, 0, 0, 0.0)


def restarts_after_idle() -> bool:
    """Whether this kernel's TCP starts slowly again after a pause, as it does by default."""
    try:
        return _AFTER_IDLE.read_text("ascii").strip() != "0"
    except OSError:
        return True


class ConnectionTo:
    """This process's connection to a remote `port`, and the bytes of those before it.

    There is one at a time, made and replaced by libzmq; this finds it again when it has changed.
    """

    def __init__(self) -> None:
        self.port = 0
        self._connection: socket.socket | None = None
        """A duplicate of libzmq's descriptor: it keeps the counters readable."""
        self._past = NO_TRAFFIC
        """Counters of closed connections."""

    def is_established(self) -> bool:
        if self._connection is not None and _tcp_info(self._connection)[0] != _ESTABLISHED:
            self.let_go()
        if self._connection is None:
            with contextlib.suppress(OSError):
                self._connection = connection_to(self.port)
        return self._connection is not None

    def traffic(self) -> Traffic:
        """Traffic of all connections so far; zeros before the first one stands."""
        if not self.is_established() or self._connection is None:
            return self._past
        return _traffic(_tcp_info(self._connection)).after(self._past)

    def hang_up(self) -> None:
        """Shut the connection down, in libzmq's hands too: nothing more arrives on it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self.let_go()

    def let_go(self) -> None:
        """Close the duplicate, and keep its counts. Works twice."""
        if self._connection is not None:
            self._past = _traffic(_tcp_info(self._connection)).after(self._past)
            self._connection.close()
            self._connection = None


class ConnectionsAt:
    """This process's connections at a local port, and the bytes of those before them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[str, Traffic] = {}
        self._past = NO_TRAFFIC

    @property
    def count(self) -> int:
        """Connections at the last call of `look`."""
        return len(self._seen)

    def look(self) -> None:
        """Read all connections' counters. Those that are gone keep what was last read."""
        found = {}
        try:
            for inode, connection in _connections():
                with connection:
                    if connection.getsockname()[1] == self._port:
                        found[inode] = _traffic(_tcp_info(connection))
        except OSError:
            return
        gone = [traffic for inode, traffic in self._seen.items() if inode not in found]
        self._past = NO_TRAFFIC.after(self._past, *gone)
        self._seen = found

    def traffic(self) -> Traffic:
        """Sums as of the last `look`; the round trip is the longest there was then."""
        return Traffic.of_all([self._past, *self._seen.values()])


def traffic_of_process() -> Traffic:
    found = NO_TRAFFIC
    for _, connection in _connections():
        with connection, contextlib.suppress(OSError):
            found = _traffic(_tcp_info(connection)).after(found)
    return found


def connection_to(port: int) -> socket.socket | None:
    """A duplicate of this process's established connection to a remote port, for the caller to
    close; None if there is none. Raises OSError if no descriptor is left."""
    for _, candidate in _connections():
        if candidate.getpeername()[1] == port:
            return candidate
        candidate.close()
    return None


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that stays libzmq's. Raises OSError if it is none."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def received_bytes_of(descriptor: int) -> int:
    """Bytes that were received at a connection and that libzmq has read; 0 if it is closed."""
    try:
        with _borrowed(descriptor) as borrowed:
            waiting = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
            received = _traffic(_tcp_info(borrowed)).received_bytes
    except OSError:
        return 0
    return received - int.from_bytes(waiting, sys.byteorder)


def peer_of(descriptor: int) -> str:
    """The address of the machine at the other end of a connection; "?" if it is closed."""
    try:
        with _borrowed(descriptor) as borrowed:
            return str(borrowed.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return "?"


def shut_down(descriptor: int) -> None:
    """End a connection that is libzmq's, which then closes it and drops what it has queued."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
        borrowed.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
    with reserve():
        return os.dup(descriptor)


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _traffic(info: bytes) -> Traffic:
    (round_trip_us,) = _RTT.unpack_from(info, 68)
    acked, received = _BYTES.unpack_from(info, 120)
    sent, again = _SENT.unpack_from(info, 200) if len(info) >= 216 else (acked, 0)
    return Traffic(sent, received, again, round_trip_us * 1e-6)


def _connections() -> Iterator[tuple[str, socket.socket]]:
    """Every established TCP connection of this process, by what Linux calls it: duplicates, for
    the caller to close. Raises OSError if no descriptor is left."""
    with reserve():
        entries = list(Path("/proc/self/fd").iterdir())
    for entry in entries:
        try:
            inode = str(entry.readlink())
            if not inode.startswith("socket:"):
                continue
            candidate = socket.socket(fileno=_duplicate(int(entry.name)))
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            continue
        try:
            inet = candidate.family in (socket.AF_INET, socket.AF_INET6)
            if inet and candidate.type == socket.SOCK_STREAM and candidate.getpeername():
                yield inode, candidate
                continue
        except OSError:
            pass
        candidate.close()
