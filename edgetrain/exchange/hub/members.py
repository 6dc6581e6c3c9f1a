"""Who is in a job: the hub's members, by connection, by name and by session; and who may come back.

Keeps the seats and nothing else: whether someone may come in is the hub's decision. No method looks
at all members, so that a fleet of thousands joins in the time that its messages take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from edgetrain.exchange.hub.records import Seat
from edgetrain.exchange.transport import owner_of
from edgetrain.vectors.vector import Buffer

AWAY = 4
"""Members that were given up and may come back are remembered: so many times those that may be
in."""


MemberState = Literal["waiting", "training", "late", "gone", "left"]


@dataclass
class MemberRecord:
    """One member, as the hub knows it. The hub changes it; connection and name change through the
    Members alone."""

    name: str
    sender: bytes
    index: int
    weight: float
    checksum: int
    session: int = 0
    state: MemberState = "waiting"
    """waiting (for the start), training, late, gone, left."""
    first_round: int = 0
    """Rounds from this one on wait for it."""
    next_round: int = 0
    """The round its next contribution is meant for."""
    merged: int = 0
    """What it gave to rounds before this one has been merged."""
    returning: bool = False
    """The hub has restarted and has not heard of it since: nothing it gave is here but what is
    merged."""
    resumed: bool = False
    """It has come back at least once: what it repeats is not wrong."""
    astray: bool = False
    """Something it sent was lost on the way: it has been told to come back, and say where it is."""
    strays: int = 0
    """How often that was so since its last whole contribution."""
    applied: int = 0
    """Replies it had applied when it last said so."""
    incoming: list[Buffer] = field(default_factory=list)
    unreachable_since: float | None = None

    @property
    def present(self) -> bool:
        """It is in, and not given up."""
        return self.state in ("waiting", "training", "late")

    def may_be_at(self, sender: bytes) -> bool:
        """Whether this member may have this connection: one that came with a key stays with it."""
        key = owner_of(self.sender)
        return not key or key == owner_of(sender)

    def seat(self) -> Seat:
        """What the journal keeps of it."""
        return Seat(
            self.name, self.sender, self.session, self.index, self.weight, self.first_round,
            self.merged,
        )  # fmt: skip

    @classmethod
    def of(cls, seat: Seat) -> MemberRecord:
        """A member that is not heard of yet, as the journal knows it."""
        member = cls(seat.name, seat.address, seat.index, seat.weight, 0, seat.session, "training")
        member.first_round, member.next_round = (
            seat.first_round,
            max(seat.next_round, seat.first_round),
        )
        member.merged, member.returning = seat.next_round, True
        member.applied = max(0, seat.next_round - 1)
        return member


class Away:
    """Members that were given up and may come back, by name: the newest of them, `most` at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: dict[str, MemberRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MemberRecord]:
        """The one that was given up first comes first."""
        return iter(self._records.values())

    def get(self, name: str) -> MemberRecord | None:
        """The member of that name."""
        return self._records.get(name)

    def pop(self, name: str) -> MemberRecord | None:
        """The member of that name, which is forgotten here."""
        return self._records.pop(name, None)

    def remember(self, member: MemberRecord) -> None:
        """Of a member that is not in any more: its place in the rounds, and no payloads."""
        member.state = "gone"
        self._records.pop(member.name, None)
        self._records[member.name] = member
        while len(self._records) > self._most:
            del self._records[next(iter(self._records))]


class Members:
    """The members that are in: each has a connection, a name and an index of its own."""

    def __init__(self) -> None:
        self._by_sender: dict[bytes, MemberRecord] = {}
        self._by_name: dict[str, MemberRecord] = {}
        self._by_session: dict[int, MemberRecord] = {}
        self._indexes: Counter[int] = Counter()
        # A member that comes back keeps its index, whoever has got it meanwhile.
        # No index, and no name of that number, below these is free.
        self._low_index = self._low_name = 0

    def __len__(self) -> int:
        return len(self._by_sender)

    def __iter__(self) -> Iterator[MemberRecord]:
        """The members in the order in which they came, or came back."""
        return iter(self._by_sender.values())

    def __getitem__(self, sender: bytes) -> MemberRecord:
        return self._by_sender[sender]

    def get(self, sender: bytes) -> MemberRecord | None:
        """The member behind a connection."""
        return self._by_sender.get(sender)

    def named(self, name: str) -> MemberRecord | None:
        """The member of that name."""
        return self._by_name.get(name)

    def in_session(self, session: int) -> MemberRecord | None:
        """The member that told this number when it joined; 0 is no session."""
        return self._by_session.get(session) if session else None

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._by_name)

    def add(self, member: MemberRecord) -> None:
        """Take a member in. Its connection, name and index are free."""
        self._by_sender[member.sender] = self._by_name[member.name] = member
        self._indexes[member.index] += 1
        if member.session:
            self._by_session[member.session] = member

    def remove(self, member: MemberRecord) -> None:
        """Let a member go; what it had is free again."""
        del self._by_sender[member.sender], self._by_name[member.name]
        self._indexes[member.index] -= 1
        if self._by_session.get(member.session) is member:
            del self._by_session[member.session]
        self._low_index = min(self._low_index, member.index)
        number = member.name.removeprefix("m")
        if number.isdecimal() and len(number) < 10:
            self._low_name = min(self._low_name, int(number))

    def free_index(self) -> int:
        """The lowest that nobody has."""
        self._low_index = next(i for i in count(self._low_index) if not self._indexes[i])
        return self._low_index

    def free_name(self) -> str:
        """The first of m0, m1, … that nobody has."""
        self._low_name = next(i for i in count(self._low_name) if f"m{i}" not in self._by_name)
        return f"m{self._low_name}"
