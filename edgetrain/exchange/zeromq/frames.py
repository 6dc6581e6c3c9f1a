"""Limits and options of both ends, and frames: large ones are referenced, not copied."""

from __future__ import annotations

import zmq

from edgetrain.exchange.transport import SILENCE_S
from edgetrain.vectors.vector import Buffer

ZERO_COPY_BYTES = 1 << 16
"""Below this size a copy is cheaper than the bookkeeping that avoids it."""
FEW_BYTES = 1 << 13
"""Up to this size libzmq leaves messages in what it reads at once, where they must not stay."""

WAITING_MESSAGES = 64
"""Messages of one peer that may wait to be read. Beyond this many its connection is not read
either, and TCP stops the peer. Messages are bounded in size, so nothing can fill the hub's memory.
"""

WAITING_BYTES = 16 << 20
"""Fewer messages may wait if they are larger than this together; but at least FEWEST_WAITING."""
FEWEST_WAITING = 4

UNREAD_MESSAGES = 100_000
"""A peer that leaves this many messages unread counts as unreachable."""

HANDSHAKE_MS = 10_000
"""A connection is closed if its handshake takes longer than this."""

LINGER_MS = 5000
"""Time that a closing socket has to send what is still queued."""


def set_options(
    sock: zmq.Socket[bytes], max_message_bytes: int, handshake_ms: int = HANDSHAKE_MS
) -> None:
    """Set the options that both ends have in common. `max_message_bytes` -1: no limit."""
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    # The protocol bounds what is in flight; a limit here would drop or block in the middle of it.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    sock.setsockopt(zmq.TCP_MAXRT, SILENCE_S * 1000)  # while something is under way
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)  # while nothing is
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE_S // 2)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENCE_S // 2)
    sock.setsockopt(zmq.IPV6, 1)


def waiting_messages(max_message_bytes: int) -> int:
    """Messages of this size (-1: no limit) of one peer that may wait to be read."""
    if max_message_bytes < 0:
        return WAITING_MESSAGES
    return max(FEWEST_WAITING, min(WAITING_MESSAGES, WAITING_BYTES // max(1, max_message_bytes)))


def frame_of(buffer: Buffer) -> zmq.Frame | Buffer:
    """What to send for a buffer; a large one is referenced, not copied, and all of what another
    frame brought (`payload_of`) goes on as that frame."""
    view = memoryview(buffer)
    if view.nbytes <= FEW_BYTES:
        return buffer
    if isinstance(view.obj, zmq.Frame) and len(view.obj) == view.nbytes:
        return view.obj
    return zmq.Frame(buffer, copy=view.nbytes < ZERO_COPY_BYTES)


def payload_of(frame: zmq.Frame) -> Buffer:
    """The bytes of a received frame; of a larger one the memory where libzmq put them."""
    return frame.bytes if len(frame) <= FEW_BYTES else frame.buffer


def receive_frames(sock: zmq.Socket[bytes]) -> list[Buffer]:
    """All frames of one message that has arrived. Raises zmq.Again if there is none."""
    return [payload_of(frame) for frame in sock.recv_multipart(zmq.NOBLOCK, copy=False)]
