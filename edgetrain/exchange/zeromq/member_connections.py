"""The TCP connections of a hub's members, to end those of a key that is revoked.

libzmq has no call that ends one connection of a ROUTER, and goes on sending what it has queued for
it. But each message says which descriptor it came through, and a socket can be shut down from
outside: libzmq then closes it, and drops the queue.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container

from edgetrain.exchange.limits import CONNECTIONS_REMEMBERED
from edgetrain.exchange.transport import owner_of
from edgetrain.exchange.zeromq.tcp_counters import shut_down


class MemberConnections:
    """The descriptor of the connection that each sender's last message came through.

    If there are too many senders, those are forgotten that came first.
    """

    def __init__(self, most: int = CONNECTIONS_REMEMBERED) -> None:
        self._most = most
        self._known: dict[bytes, tuple[int, int]] = {}
        """(descriptor, inode). The inode tells whether a descriptor has another socket by now."""

    def message_came(self, sender: bytes, descriptor: int) -> None:
        if self._known.get(sender, (-1, 0))[0] == descriptor:
            return
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            self._known[sender] = descriptor, os.fstat(descriptor).st_ino
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def hang_up_all_but(self, keys: Container[bytes]) -> set[bytes]:
        """End the connections of senders whose key is not one of these; returns their keys."""
        ended = set()
        for sender in [sender for sender in self._known if owner_of(sender) not in keys]:
            descriptor, inode = self._known.pop(sender)
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    shut_down(descriptor)
                    ended.add(owner_of(sender))
        return ended
