"""A member's end of ZeroMQ whose hub is in the same process: no network, and nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import zmq

from edgetrain.exchange.transport import Traffic
from edgetrain.exchange.zeromq.frames import frame_of, receive_frames, set_options
from edgetrain.exchange.zeromq.sockets import OpenSockets
from edgetrain.vectors.vector import Buffer


class InsideEnd:
    """A MemberTransport to the hub that listens at `endpoint`, "inproc://...", under this name.

    What arrives is the memory that was sent. `sockets` are the hub's, and close this end, too.
    """

    def __init__(self, sockets: OpenSockets, endpoint: str, name: bytes) -> None:
        self._sockets = sockets
        self._socket = sockets.open(zmq.DEALER)
        set_options(self._socket, -1)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[Buffer]) -> None:
        self._socket.send_multipart([frame_of(buffer) for buffer in frames], copy=False)

    def receive(self, timeout_s: float) -> list[Buffer] | None:
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        return receive_frames(self._socket)

    def received_bytes(self) -> int:
        """See MemberTransport: nothing arrives in pieces."""
        return 0

    def traffic(self) -> Traffic:
        """See MemberTransport: nothing is on a connection."""
        return Traffic(0, 0, 0, 0.0)

    def close(self) -> None:
        self._sockets.close_socket(self._socket)
