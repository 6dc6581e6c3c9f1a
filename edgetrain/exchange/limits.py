"""How much of a thing is enough: messages a second from one sender, bases sent to one that gives
nothing, lines about the same refusal.

Pure bookkeeping of bounded size; the time is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MESSAGES_PER_S = 10_000
"""More than any member has a reason to send, and less than keeps a hub from its other members."""


class Rate:
    """Counts what each sender sent in the current second. Forgets all of it with the next one."""

    def __init__(self, most: int = MESSAGES_PER_S) -> None:
        self.most = most
        self._second = 0
        self._counts: Counter[bytes] = Counter()

    def allows(self, sender: bytes, now: float) -> bool:
        """Whether one more is still within the limit; it is counted."""
        second = int(now)
        if second != self._second:
            self._second = second
            self._counts.clear()
        self._counts[sender] += 1
        return self._counts[sender] <= self.most

    def just_passed(self, sender: bytes) -> bool:
        """Whether what was counted last was the first beyond the limit."""
        return self._counts[sender] == self.most + 1


MOST_UNREQUITED = 32
"""Bases, or replies sent again, for one connection that gives nothing whole: twice as many as the
gaps that a member on a bad link may have in a row before it is expelled."""

CONNECTIONS_REMEMBERED = 1 << 14
"""Connections that such things were sent to: more than a hub has descriptors for."""


class Unrequited:
    """Counts what was sent to each connection that has given nothing since. Bounded: of too many
    connections those are forgotten that were sent something the longest time ago."""

    def __init__(
        self, most: int = MOST_UNREQUITED, connections: int = CONNECTIONS_REMEMBERED
    ) -> None:
        self.most = most
        self._connections = connections
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Connections that are remembered."""
        return len(self._counts)

    def add(self, sender: bytes) -> None:
        """One more was sent there."""
        self._counts[sender] = self._counts.pop(sender, 0) + 1  # the newest is the last
        while len(self._counts) > self._connections:
            del self._counts[next(iter(self._counts))]

    def is_enough(self, sender: bytes) -> bool:
        """Whether no more is to be sent there."""
        return self._counts.get(sender, 0) >= self.most

    def forget(self, sender: bytes) -> None:
        """It has given something, or is gone."""
        self._counts.pop(sender, None)


class Refusals:
    """Tells of those that were turned away: each of the first `few`, then one in ten times as many.

    By kind, because addresses and names can be had for nothing. The kinds are few, and so is what
    is kept.
    """

    def __init__(self, few: int = 3) -> None:
        self._few = few
        self._counts: Counter[str] = Counter()
        self.tell: Callable[[str], None] = lambda line: None

    def add(self, kind: str, line: str) -> None:
        """Somebody was turned away; `kind` is one of a few words."""
        told = self.shorten(kind, line)
        if told is not None:
            self.tell(told)

    def shorten(self, kind: str, line: str) -> str | None:
        """What is to be told of it, if anything."""
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= self._few:
            return line
        if count == 10 ** (len(str(count)) - 1):
            return f"{line} ({count} of this kind so far)"
        return None
