"""The map of a job: who can connect to whom, and who reduces which ranges of the vector.

Only jobs whose members connect to each other have one. Whether a member can be reached shows only
when another one tries: so all try each other once, before training begins, and say whom they
reached. What follows from that is decided by `assign`, which the job passes in.

=========  ==================================  =========  =======================================
state      what happens                        next       what the hub says
=========  ==================================  =========  =======================================
gathering  all places of the job are taken     trying     a Map that asks to try, to all
(any)      a member joins again                the same   the newest Map, to it
trying     the last Reached came               settled    a Map, to all
trying     `try_s` have passed                 settled    a Map, to all; and who said nothing
(both)     before the start: members come, go  gathering
settled    members come, go or come back       the same   a Map with a higher number, to all
=========  ==================================  =========  =======================================

A member that joins after the start tries nobody and is tried by nobody. Pure: no socket, no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal

import msgpack

from edgetrain.exchange.further_messages import Reached
from edgetrain.exchange.hub.effects import Effect, Note, Send
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import CLIENT, Map, Peer
from edgetrain.exchange.transport import owner_of

TRY_S = 20.0
"""Seconds that members have to say whom they reached."""

LEAD = ""
"""The name of the hub itself in `Stretches`; no member has it."""

Stretches = Mapping[str, tuple[int, int]]
"""(first, end) of the consecutive ranges that each reducer has, by its name."""


@dataclass(frozen=True)
class Reach:
    """The tried connections between members, and their results."""

    names: tuple[str, ...] = ()
    """The members, in the order of their indices."""
    trips_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds of a round trip, by (who connected, to whom)."""

    def can(self, one: str, other: str) -> bool:
        """Whether a member has reached another one."""
        return (one, other) in self.trips_s

    def round_trip_s(self, one: str, other: str) -> float:
        """Seconds of a round trip, where a member has reached another one. Raises KeyError."""
        return self.trips_s[one, other]

    def flags(self) -> list[bytes]:
        """Who has reached whom, a byte each, in the order of `names`: all that outlives a hub."""
        return [bytes(self.can(one, other) for other in self.names) for one in self.names]

    @classmethod
    def of_flags(cls, names: Sequence[str], flags: Sequence[bytes]) -> Reach:
        """As `flags` gave it. Round trips are not known: 0."""
        pairs = ((a, b) for a, row in zip(names, flags, strict=True) for b in compress(names, row))
        return cls(tuple(names), dict.fromkeys(pairs, 0.0))

    def reached_by_all(self) -> tuple[str, ...]:
        """The members that all others have reached, in order."""
        return tuple(
            name
            for name in self.names
            if all(self.can(other, name) for other in self.names if other != name)
        )


Assign = Callable[[Reach], Stretches]
"""Decides who reduces what. Every range has one reducer; a member that is not named has none."""


class Places:
    """A job's map. `reach` and `stretches` are only to be looked at."""

    def __init__(self, assign: Assign, try_s: float = TRY_S) -> None:
        self.state: Literal["gathering", "trying", "settled"] = "gathering"
        self.reach = Reach()
        self.stretches: Stretches = {}
        self.moved: dict[tuple[int, int], Peer] = {}
        """Who took over a stretch, at which address."""
        self._assign, self._try_s = assign, try_s
        self._until = 0.0
        self._answers: dict[str, dict[str, float]] = {}
        """Members reached by each answering member: seconds, by name."""
        self._reached: list[bytes] = []
        """The flags of `reach`."""
        self._map = Map(0, True, 0, "", 0, 0, ())

    @property
    def is_settled(self) -> bool:
        """Whether it is known who reduces what."""
        return self.state == "settled"

    def accept(self, member: MemberRecord, message: Reached) -> None:
        """Accept a member's report of reached members; one for an earlier map is ignored."""
        if self.state == "trying" and message.number == self._map.number:
            self._answers[member.name] = {name: 1e-4 * trip for name, trip in message.reached}

    def map_to(self, member: MemberRecord) -> Send:
        return Send(member.sender, replace(self._map, name=member.name))

    def update(
        self, members: Members, epoch: int, *, full: bool, started: bool, now: float
    ) -> list[Effect]:
        """Tell members what has changed. `full`: all places are taken; `started`: they train."""
        rows = self._rows(members)
        same = _without_stretches(rows) == _without_stretches(self._map.rows)
        if not started and not (same and full):
            self.state = "gathering"
        if self.state == "gathering" and full:
            self.state, self._until = "trying", now + self._try_s
            self._answers, self.stretches = {}, {}
            return self._announce(members, epoch, trying=True)
        if self.state == "trying":
            silent = [member.name for member in members if member.name not in self._answers]
            if silent and now < self._until:
                return []
            return [*_note_silent(silent), *self._settle(members, epoch)]
        if self.state == "settled" and rows != self._map.rows:
            return self._announce(members, epoch)
        return []

    def _settle(self, members: Members, epoch: int) -> list[Effect]:
        self.state = "settled"
        names = tuple(member.name for member in _in_order(members))
        self.reach = Reach(
            names,
            {
                (one, other): trip_s
                for one, reached in self._answers.items()
                for other, trip_s in reached.items()
                if one in names and other in names
            },
        )
        self._reached = self.reach.flags()
        self.stretches = self._assign(self.reach)
        return self._announce(members, epoch)

    def _announce(self, members: Members, epoch: int, trying: bool = False) -> list[Effect]:
        number = max(self._map.number + 1, (epoch << 32) + 1)
        ticket = self._map.ticket or _ticket(members)
        rows = self._rows(members)
        self._map = Map(number, trying, ticket, "", *self.stretches.get(LEAD, (0, 0)), rows)
        return [self.map_to(member) for member in members]

    def _rows(self, members: Members) -> tuple[Peer, ...]:
        """The rows of a map: those that are in, those that may come back, and reducers that have
        left, at their last address."""
        known = {row[0]: row for row in reversed(self._map.rows)}
        found = [self._row(member, is_in=True) for member in _in_order(members)]
        away = [member for member in members.away if members.named(member.name) is None]
        found += [self._row(member, is_in=False) for member in away]
        names = {LEAD, *(peer.name for peer in found)}
        found += [Peer(*known[name]) for name in self.stretches if name not in names]
        return (*found, *self.moved.values())

    def holders(self) -> dict[tuple[int, int], str]:
        first = {span: name for name, span in self.stretches.items() if name != LEAD}
        return first | {span: peer.name for span, peer in self.moved.items()}

    def move(self, span: tuple[int, int], member: MemberRecord, address: str) -> None:
        """A member has taken over this stretch, and listens at an address of its own for it."""
        self.stretches = {name: own for name, own in self.stretches.items() if own != span}
        self.moved[span] = Peer(member.name, address, _key(member), *span)

    def chart(self, done: Mapping[str, int], lost: Iterable[tuple[int, int]]) -> bytes:
        """The settled map as bytes, for a journal; `done`: members that have left behind their last
        step, with the replies that they have; `lost`: the stretches that nobody reduces."""
        map = self._map
        spans = [[name, *span] for name, span in self.stretches.items()]
        moved = [list(_fields(peer)) for peer in self.moved.values()]
        rows = [list(row) for row in map.rows]
        reached = [self.reach.names, self._reached]
        packed: bytes = msgpack.packb(
            [map.number, map.ticket, rows, spans, moved, sorted(done.items()), reached, [*lost]]
        )
        return packed

    def restore(
        self, chart: bytes, members: Members
    ) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Go on with the map of a journal, and the addresses in it. Returns `done` and `lost`."""
        found = msgpack.unpackb(chart)
        number, ticket, rows, stretches, moved, done, (names, reached), lost = found
        self.reach, self._reached = Reach.of_flags(names, reached), reached
        self.state, self.stretches = "settled", {name: (a, b) for name, a, b in stretches}
        self.moved = {(row[3], row[4]): Peer(*row) for row in moved}
        span = self.stretches.get(LEAD, (0, 0))
        self._map = Map(number, False, ticket, "", *span, tuple(tuple(row) for row in rows))
        addresses = {row[0]: row[1] for row in reversed(rows)}
        for member in (*members, *members.away):
            member.settle(addresses.get(member.name, "") or CLIENT)
        return dict(done), [(first, end) for first, end in lost]

    def _row(self, member: MemberRecord, *, is_in: bool) -> Peer:
        first, end = self.stretches.get(member.name, (0, 0))
        can_be_reached = member.address != CLIENT and (is_in or first < end)
        address = member.address if can_be_reached else ""
        return Peer(member.name, address, _key(member), first, end)


def _in_order(members: Iterable[MemberRecord]) -> list[MemberRecord]:
    return sorted(members, key=lambda member: (member.index, member.name))


def _without_stretches(rows: Iterable[tuple[str, str, str, int, int]]) -> list[tuple[str, ...]]:
    return [row[:3] for row in rows]


def _fields(peer: Peer) -> tuple[str, str, str, int, int]:
    return peer.name, peer.address, peer.key, peer.first, peer.end


def _key(member: MemberRecord) -> str:
    owner = owner_of(member.sender)
    return spell(owner) if owner else ""


def _ticket(members: Members) -> int:
    """64 bits that nobody knows who does not know all sessions."""
    sessions = b"".join(member.session.to_bytes(8, "little") for member in members)
    return int.from_bytes(hashlib.blake2b(sessions, digest_size=8).digest(), "little")


def _note_silent(silent: list[str]) -> list[Effect]:
    if not silent:
        return []
    return [Note("map", "hub", f"{', '.join(silent)} did not say whom they reach")]
