"""How much of a thing is enough: messages a second from one sender, lines about the same refusal.

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
