"""Records of a hub's journal on their way to its replica: numbered, cut into parts, and kept until
the replica holds them. No clock, no socket, no decision about who may go on without whom.

A position is one integer: the hub's epoch in the upper 32 bits, below it a number that goes up by
one with every record, snapshot and ping. So positions of a restored hub are above all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from edgetrain.exchange.further_messages import Copy, Stored
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.records import Record, State

PART_BYTES = 1 << 20
"""A record is sent in parts of at most this many bytes."""

WINDOW = 16
"""Parts that may be under way, so that a slow replica fills no queue of the transport."""


Voter = tuple[str, int]
"""A member's name and session: a process that begins anew under a name is another voter."""


def position_of(epoch: int, number: int = 0) -> int:
    """See the module."""
    return epoch << 32 | number


@dataclass(frozen=True)
class _Sent:
    """A record that the replica is not known to hold."""

    position: int
    names: frozenset[Voter]
    """The members that are in once this record counts."""
    parts: tuple[Copy, ...]


def _cut(position: int, item: Record | State | None, begins: bool, whole: bool) -> tuple[Copy, ...]:
    header, payloads = (b"", []) if item is None else records.encode(item)
    # Copied: what is sent must not change, and a snapshot's vectors are the hub's own.
    data = memoryview(b"".join([header, *payloads]))
    cuts = range(0, max(1, data.nbytes), PART_BYTES)
    return tuple(
        Copy(position, n, len(cuts), begins, whole, len(header), data[at : at + PART_BYTES])
        for n, at in enumerate(cuts)
    )


class CopyStream:
    """The messages to the replica, in order."""

    def __init__(self) -> None:
        self.sent = 0
        """The newest position that was given out."""
        self.held = 0
        """The newest that the replica is known to hold."""
        self._names: frozenset[Voter] = frozenset()
        """The members that were in at `held`, and at all that was dropped since."""
        self._most = 0
        """The most of them that were in at any of these times."""
        self._kept_from = 0
        """All behind this position is in `_unheld`."""
        self._unheld: deque[_Sent] = deque()
        self._parts: deque[Copy] = deque()
        self._given = self._arrived = 0
        """Parts since the replica's last Follow: handed out, and come there."""

    @property
    def is_idle(self) -> bool:
        return not self._parts and self._given - self._arrived < WINDOW

    @property
    def lacks(self) -> bool:
        """Whether the replica is not known to hold everything that was sent."""
        return bool(self._unheld)

    def add(
        self,
        epoch: int,
        item: Record | State | None,
        names: Collection[Voter],
        *,
        begins: bool = False,
        whole: bool = True,
    ) -> None:
        """Number a record, and queue it; None: a ping."""
        self.sent = max(self.sent, position_of(epoch)) + 1
        sent = _Sent(self.sent, frozenset(names), _cut(self.sent, item, begins, whole))
        self._unheld.append(sent)
        self._parts.extend(sent.parts)

    def drop(self) -> None:
        """Nothing is under way any more: the replica is gone, or is to begin anew."""
        self._names, self._most = self.since_held(self._names)
        self._unheld.clear()
        self._parts.clear()
        self._given = self._arrived = 0
        self._kept_from = self.sent + 1

    def resume(self, position: int) -> bool:
        """Send again what follows this position. Returns whether all of that is still here."""
        if not self._kept_from <= position <= self.sent or position == 0:
            return False
        self._note_held(position)
        self._given = self._arrived = 0
        self._parts = deque(part for sent in self._unheld for part in sent.parts)
        return True

    def next_parts(self) -> list[Copy]:
        """The parts that may be sent now."""
        count = min(len(self._parts), WINDOW - (self._given - self._arrived))
        self._given += max(0, count)
        return [self._parts.popleft() for _ in range(count)]

    def accept(self, message: Stored) -> bool:
        """Note what the replica says it holds; whether that is more than before."""
        if message.position > self.sent or message.parts > self._given:
            return False
        moved = message.position > self.held or message.parts > self._arrived
        self._arrived = max(self._arrived, message.parts)
        self._note_held(message.position)
        return moved

    def _note_held(self, position: int) -> None:
        while self._unheld and self._unheld[0].position <= position:
            self._names = self._unheld.popleft().names
            self._most = len(self._names)
        if position > self.held:
            self.held = position
            self._kept_from = max(self._kept_from, position)

    def since_held(self, now: Collection[Voter]) -> tuple[frozenset[Voter], int]:
        """(members that were in at `held`, at everything sent since, and are now; the most that
        were in at any of these times)."""
        each = [self._names, *(sent.names for sent in self._unheld), frozenset(now)]
        return frozenset.intersection(*each), max(self._most, *map(len, each))
