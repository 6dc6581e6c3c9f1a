"""Limits against floods: messages and entries of one sender, bases sent to a connection that
contributes nothing, log lines about the same kind of refusal.

Counters of bounded size, without a clock: the time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MESSAGES_PER_S = 10_000
"""More than any member has a reason to send, and few enough that a hub can still serve the others.
"""


ENTRIES_A_MINUTE = 60
"""Times that the owner of one key may join or come back: more than the worst link gives a reason
for."""


class SenderRate:
    """Messages of each sender in the current period of time; the next one starts without any."""

    def __init__(self, most: int = MESSAGES_PER_S, period_s: float = 1.0) -> None:
        self.most, self._period_s = most, period_s
        self._period = 0
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count_message(self, sender: bytes, now: float) -> bool:
        """Count one message; returns whether it is within the limit. `now`: seconds."""
        period = int(now // self._period_s)
        if period != self._period:
            self._period = period
            self._counts.clear()
        self._counts[sender] = count = self._counts.get(sender, 0) + 1
        return count <= self.most

    def is_first_beyond(self, sender: bytes) -> bool:
        """Whether the message counted last was the sender's first beyond the limit."""
        return self._counts[sender] == self.most + 1


MOST_UNREQUITED = 32
"""Bases, or replies sent again, for one connection without a whole contribution in between. Twice
the gaps in a row after which a member on a bad link is expelled."""

CONNECTIONS_REMEMBERED = 1 << 14
"""Connections to keep a count for: more than a hub has descriptors."""


class Unrequited:
    """What was sent to each connection since its last whole contribution.

    If there are too many connections, those are forgotten that were sent something the longest
    time ago.
    """

    def __init__(
        self, most: int = MOST_UNREQUITED, connections: int = CONNECTIONS_REMEMBERED
    ) -> None:
        self.most = most
        self._connections = connections
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count_sent(self, sender: bytes) -> None:
        """Count one base, or one repetition of replies, sent over this connection."""
        self._counts[sender] = self._counts.pop(sender, 0) + 1  # the newest is the last
        while len(self._counts) > self._connections:
            del self._counts[next(iter(self._counts))]

    @property
    def reason(self) -> str:
        return (
            f"a base or replies were sent over this connection {self.most} times, and nothing "
            "whole has come since: come back over another one"
        )

    def is_enough(self, sender: bytes) -> bool:
        return self._counts.get(sender, 0) >= self.most

    def forget_sender(self, sender: bytes) -> None:
        """Start this connection at 0: it has contributed, or is gone."""
        self._counts.pop(sender, None)


class Refusals:
    """Log lines about refusals: of each kind the first `few`, then the 10th, 100th, 1000th.

    Lines are counted by kind because addresses and names cost an attacker nothing. There are few
    kinds, so little is kept. `report` is called with each line to be logged.
    """

    def __init__(self, few: int = 3) -> None:
        self._few = few
        self._counts: Counter[str] = Counter()
        self.report: Callable[[str], None] = lambda line: None

    def add(self, kind: str, line: str) -> None:
        """Count a refusal, and report it unless there were many of its kind."""
        counted = self.count_line(kind, line)
        if counted is not None:
            self.report(counted)

    def count_line(self, kind: str, line: str) -> str | None:
        """Count a refusal; returns the line to log, or None."""
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= self._few:
            return line
        if count == 10 ** (len(str(count)) - 1):
            return f"{line} ({count} of this kind so far)"
        return None
