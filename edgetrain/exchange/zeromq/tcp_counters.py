"""Bytes as TCP counts them: headers of messages and what was sent again included."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.frames import _BYTES, _RTT, _SENT


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
