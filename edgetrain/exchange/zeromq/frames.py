"""ZeroMQ, and nothing else: the one module that imports zmq.

A hub's end is a ROUTER, a member's a DEALER. Both hand over and take lists of frames; what they
mean is known by `messages`. libzmq's own I/O thread moves the bytes and the kernel watches the
connection, so that a member is alive while it computes and needs no Python thread. Payloads travel
without a copy: a buffer that was sent must not be written again.
"""

from __future__ import annotations

import errno
import struct

import zmq

from edgetrain.exchange.transport import SILENCE_S
from edgetrain.vectors.vector import Buffer

ZERO_COPY_BYTES = 1 << 16
"""Below this size a copy is cheaper than the bookkeeping that avoids it."""

WAITING_MESSAGES = 64
"""So many messages of one peer wait to be read; then its connection is not read any more either,
and TCP stops it. They are bounded in size, so that nobody can fill the hub's memory."""

UNREAD_MESSAGES = 100_000
"""A peer that leaves so many messages unread is not reachable."""

HANDSHAKE_MS = 10_000
"""A connection that has not proved who it is after so long is closed."""


LINGER_MS = 5000
"""What was handed over but not sent yet gets so long when a socket closes."""


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


# struct tcp_info of Linux: tcpi_rtt (µs) at 68, tcpi_bytes_acked and _received at 120,
# tcpi_notsent_bytes at 144, tcpi_bytes_sent and _retrans at 200 (Linux 4.19 and newer).
_RTT, _BYTES, _SENT = struct.Struct("=I"), struct.Struct("=QQ"), struct.Struct("=QQ")
