"""What others do to the hub of a fleet of real processes: take its descriptors, or its memory.

They come from the fleet's own process, straight to the hub's port. Whatever they do, the laws hold.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.zeromq.member_socket import MemberSocket

CROWD = 200
"""Connections of strangers, and"""
LEFT = 8
"""descriptors that the hub has for them."""

FRAMES, FRAME_BYTES = 64, 1 << 20


class Strangers:
    """Strangers at the hub at `place` (host, port), and one device that it knows. Linux only."""

    def __init__(self, place: tuple[str, int], device: Credentials) -> None:
        self._place, self._device = place, device
        self._held: list[socket.socket] = []
        self._limited: tuple[int, tuple[int, int]] | None = None
        """The process whose limit was lowered, and its limits before."""
        self._sender: MemberSocket | None = None

    def crowd(self, hub: int) -> None:
        """Leave the process `hub` few descriptors, and connect to it more often than it has."""
        self.go()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            limits = resource.prlimit(hub, resource.RLIMIT_NOFILE)
            used = max(int(each.name) for each in Path(f"/proc/{hub}/fd").iterdir())
            soft = min(limits[0], used + 1 + LEFT)
            resource.prlimit(hub, resource.RLIMIT_NOFILE, (soft, limits[1]))
            self._limited = hub, limits
        for _ in range(CROWD):
            end = socket.socket()
            end.setblocking(False)
            end.connect_ex(self._place)
            self._held.append(end)

    def go(self) -> None:
        """End the crowd, and let the hub have its descriptors again. Works twice."""
        for end in self._held:
            end.close()
        self._held = []
        if self._limited is not None:
            process, limits = self._limited
            self._limited = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                resource.prlimit(process, resource.RLIMIT_NOFILE, limits)

    def send_endless(self) -> None:
        """Send a message of very many frames from the device that the hub knows."""
        self._hang_up()
        host, port = self._place
        self._sender = MemberSocket(f"tcp://{host}:{port}", credentials=self._device)
        self._sender.send([os.urandom(FRAME_BYTES)] * FRAMES)

    def _hang_up(self) -> None:
        if self._sender is not None:
            self._sender.close(linger_ms=0)
            self._sender = None

    def close(self) -> None:
        """End everything. Works twice."""
        self.go()
        self._hang_up()
