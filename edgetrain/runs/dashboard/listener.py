"""Where the dashboard takes connections: strangers, which have not shown the token, have limits.

A stranger that asks nothing for SILENT_S is ended; of more than MOST_STRANGERS, the oldest of the
address with most. It counts what the kernel accepts, so also connections that are silent in TLS.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

SILENT_S = 10.0
MOST_STRANGERS = 64

Peer = tuple[str, int]


class LimitedListener(socket.socket):
    """A socket that listens for an event loop. Each connection is the loop's, which closes it."""

    def __init__(self, listener: socket.socket) -> None:
        """Takes over the descriptor of `listener`."""
        family, kind, protocol = listener.family, listener.type, listener.proto
        super().__init__(family, kind, protocol, fileno=listener.detach())
        self._strangers: dict[Peer, tuple[socket.socket, asyncio.TimerHandle]] = {}
        """The oldest first."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        peer = address[:2]
        self.came_in(peer)  # an earlier one of this address and port has ended
        timer = asyncio.get_running_loop().call_later(SILENT_S, _end, connection)
        self._strangers[peer] = connection, timer
        if len(self._strangers) > MOST_STRANGERS:
            self._end_one_of_the_crowd()
        return connection, address

    def asked(self, peer: Peer) -> None:
        """A whole request came from this peer. It is a stranger still."""
        if peer in self._strangers:
            self._strangers[peer][1].cancel()

    def came_in(self, peer: Peer) -> None:
        """This peer has shown the token, or the cookie: no limit is for it."""
        self.asked(peer)
        self._strangers.pop(peer, None)

    def _end_one_of_the_crowd(self) -> None:
        for peer in [peer for peer, (each, _) in self._strangers.items() if each.fileno() < 0]:
            self.came_in(peer)  # the loop has closed it
        counts = Counter(host for host, _ in self._strangers)
        if len(self._strangers) > MOST_STRANGERS:
            peer = max(self._strangers, key=lambda peer: counts[peer[0]])  # of equals, the oldest
            connection, _ = self._strangers[peer]
            self.came_in(peer)
            _end(connection)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end has ended it
        connection.shutdown(socket.SHUT_RDWR)
