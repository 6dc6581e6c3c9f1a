"""What connections of a hub have sent without saying anything whole, and which of them to end.

libzmq bounds the size of a frame and the whole messages that wait to be read. It bounds neither the
connections, nor the frames of one message: those are kept until the last one is there. So a hub
counts, connection by connection:

    newcomer    no message of a member has come over it: it may be a stranger, or a token's holder
    member      one has

and ends those that are over these limits:

    newcomers                       Limits.newcomers, less a quarter; first those of the address
                                    that has most, and of these the oldest
    bytes of a newcomer             Limits.newcomer_bytes
    bytes of all newcomers          Limits.newcomers_bytes; the one with most
    bytes of a member               Limits.member_bytes since the last look that found a message of
                                    it; for all connections of one key, twice that

Who has gone over a limit of bytes would begin again with its next connection, and keep the thread
that deciphers for everyone busy: for BARRED_S the address gets no other.

Bytes are those that libzmq has read. A member that is not over its limit may have whole messages
waiting, which is why the limit allows for as many as libzmq lets wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MOST_NEWCOMERS = 1024
NEWCOMER_BYTES = 5 << 18
"""More than the largest message with which a member joins (1 MiB of layout)."""
NEWCOMERS_BYTES = 16 << 20
SLACK_BYTES = 2 << 20
"""Slack of a member's connection, above its waiting messages."""
BARRED_S = 5.0
"""Short, since honest members may share the address; long beside what sending that much takes."""
MOST_BARRED = 1024
"""Addresses remembered."""


@dataclass(frozen=True)
class Limits:
    """Limits of connections; None: no limit."""

    newcomers: int = MOST_NEWCOMERS
    member_bytes: int | None = None
    newcomer_bytes: int = NEWCOMER_BYTES
    newcomers_bytes: int = NEWCOMERS_BYTES

    @classmethod
    def of(cls, descriptors: int, waiting: int, max_message_bytes: int) -> Limits:
        """For a process with so many descriptors, and members of which `waiting` messages may wait
        (max_message_bytes -1: of any size)."""
        most = None if max_message_bytes < 0 else (waiting + 1) * max_message_bytes + SLACK_BYTES
        return cls(max(8, min(MOST_NEWCOMERS, descriptors // 4)), most)


@dataclass
class _Connection:
    """One connection. `counted`: bytes from which on they count."""

    owner: bytes | None = None
    """The member's key, b"" without keys; None: a newcomer."""
    messages: int = 0
    """Since the last look."""
    counted: int = 0
    received: int = 0

    @property
    def unfinished(self) -> int:
        return self.received - self.counted


class Arrivals:
    """The connections of a hub, by descriptor. No socket is touched here."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[int, _Connection] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def add(self, descriptor: int) -> None:
        self._known.pop(descriptor, None)  # the newest is the last
        self._known[descriptor] = _Connection()

    def remove(self, descriptor: int) -> None:
        """A connection has ended, or is being ended."""
        self._known.pop(descriptor, None)

    def count_message(self, descriptor: int, owner: bytes) -> bool:
        """Whether the connection is known. May be called beside a look of another thread, which
        sees the message, or the next look does."""
        connection = self._known.get(descriptor)
        if connection is not None:
            connection.owner = owner
            connection.messages += 1
        return connection is not None

    def find_crowd(self, address_of: Callable[[int], str]) -> list[int]:
        """The newcomers to end because there are too many."""
        new = [number for number, each in self._known.items() if each.owner is None]
        excess = len(new) - self._limits.newcomers
        if excess <= 0:
            return []
        excess += self._limits.newcomers // 4
        addresses = {number: address_of(number) for number in new}
        counts = Counter(addresses.values())
        new.sort(key=lambda number: -counts[addresses[number]])  # stable: the oldest come first
        return new[:excess]

    def find_excessive(self, received: Mapping[int, int]) -> list[tuple[int, int]]:
        """(descriptor, bytes) of connections to end, after a look at the bytes of all of them."""
        for number, total in received.items():
            connection = self._known.get(number)
            if connection is not None:
                connection.received = total
                if connection.messages:
                    connection.messages, connection.counted = 0, total
        limits = self._limits
        found = {n: c for n, c in self._known.items() if self._is_over(c)}
        new = [(n, c) for n, c in self._known.items() if c.owner is None and n not in found]
        found |= _largest_beyond(new, limits.newcomers_bytes)
        if limits.member_bytes is not None:
            owners = Counter(c.owner for c in self._known.values() if c.owner)
            for owner in [owner for owner, count in owners.items() if count > 2]:
                own = [(n, c) for n, c in self._known.items() if c.owner == owner]
                found |= _largest_beyond(own, 2 * limits.member_bytes)
        return [(number, connection.unfinished) for number, connection in found.items()]

    def _is_over(self, connection: _Connection) -> bool:
        limits, new = self._limits, connection.owner is None
        most = limits.newcomer_bytes if new else limits.member_bytes
        return most is not None and connection.unfinished > most


class Barred:
    """Addresses from which no connection is taken for BARRED_S."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, address: str, now: float) -> None:
        self._until.pop(address, None)
        self._until[address] = now + BARRED_S
        while len(self._until) > MOST_BARRED:
            del self._until[next(iter(self._until))]

    def has(self, address: str, now: float) -> bool:
        """Whether this address is one of them still."""
        until = self._until.get(address, now)
        if until <= now:
            self._until.pop(address, None)
        return now < until


def _largest_beyond(
    connections: list[tuple[int, _Connection]], most: int
) -> dict[int, _Connection]:
    """Those with most bytes, so that the rest have at most `most`."""
    left = sum(connection.unfinished for _, connection in connections)
    found = {}
    for number, connection in sorted(connections, key=lambda each: -each[1].unfinished):
        if left <= most:
            break
        left -= connection.unfinished
        found[number] = connection
    return found
