"""Who waits for whom in a run in which nothing moves: a line for people, from what the hub knows.

Something moves while members contribute, take steps (their reports say so) or are answered; beats
are no movement. Nothing depends on it. Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain.exchange.hub.effects import Note
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.open_rounds import expected
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.messages import Beat, Message, Refuse, Standby, Telemetry

STANDS_S = 10.0
"""Seconds without movement until people are told; then again after twice as long, and so on."""

MOST_NAMED = 4
"""Members of whom a line says how they are."""


@dataclass
class _Heard:
    """The last messages of one direction of a connection."""

    name: str = "nothing"
    """Kind of the last one that was not a beat."""
    moved: float | None = None
    at: float | None = None
    """When the last of any kind passed."""
    step: int = -1
    """In the last report."""

    def note(self, message: Message, now: float) -> bool:
        self.at = now
        if isinstance(message, Beat | Refuse | Standby):
            return False
        if isinstance(message, Telemetry):
            grew, self.step = message.step > self.step, message.step
            return grew
        self.name, self.moved = type(message).__name__, now
        return True

    def said(self, now: float) -> str:
        if self.at is None:
            return "nothing yet"
        beat = f"a sign of life {now - self.at:.1f} s ago"
        return beat if self.moved is None else f"{self.name} {now - self.moved:.1f} s ago, {beat}"


class Standstill:
    """Watches what a hub's driver receives and sends. `hub` is only looked at."""

    def __init__(self, hub: Hub, now: float) -> None:
        self._hub = hub
        self._moved, self._next_s = now, STANDS_S
        self._from: dict[bytes, _Heard] = {}
        self._to: dict[bytes, _Heard] = {}

    def note_received(self, sender: bytes, message: Message, now: float) -> None:
        self._note(self._from, sender, message, now)

    def note_sent(self, to: bytes, message: Message, now: float) -> None:
        self._note(self._to, to, message, now)

    def _note(self, way: dict[bytes, _Heard], peer: bytes, message: Message, now: float) -> None:
        if self._hub.members.get(peer) is None:
            return
        heard = way.get(peer)
        if heard is None:
            if len(way) > 2 * len(self._hub.members):
                self._forget_others()
            heard = way[peer] = _Heard()
        if heard.note(message, now):
            self._moved = now

    def check(self, now: float) -> Note | None:
        """What people should know now: that nothing moves, or that it moves again."""
        hub, stood_s = self._hub, now - self._moved
        if not hub.started or not len(hub.members) or hub.steering.stands:
            self._moved = now
        elif stood_s >= self._next_s:
            self._next_s = 2 * stood_s
            self._forget_others()
            return Note("stands", "hub", self._describe(stood_s, now))
        elif stood_s < STANDS_S < self._next_s:
            self._next_s = STANDS_S
            return Note("stands", "hub", "it moves again")
        return None

    def _forget_others(self) -> None:
        """Forget connections without a member."""
        for way in (self._from, self._to):
            for peer in [peer for peer in way if self._hub.members.get(peer) is None]:
                del way[peer]

    def _describe(self, stood_s: float, now: float) -> str:
        hub = self._hub
        entry = hub.rounds.open_rounds.get(hub.round)
        given = set(entry.members) if entry else set()
        arrivals = hub.rounds.arrivals
        if arrivals is None:
            waited = expected(hub.members, hub.round) - given
        else:
            waited = arrivals.find_missing(entry)
        opened = f" (open for {now - entry.opened:.1f} s)" if entry else ""
        open_rounds = sorted(hub.rounds.open_rounds.sizes().items())
        sizes = ", ".join(f"{round}: {count}" for round, count in open_rounds[:MOST_NAMED])
        members = [m for m in hub.members if m.name in waited or not waited]
        named = "; ".join(self._of(member, now) for member in members[:MOST_NAMED])
        more = f"; and {len(members) - MOST_NAMED} more" if len(members) > MOST_NAMED else ""
        return (
            f"no progress for {stood_s:.0f} s: round {hub.round}{opened} is missing "
            f"{len(waited)} of {len(hub.members)} contributions; contributions by open round: "
            f"{sizes or 'none'}; {named}{more}"
        )

    def _of(self, member: MemberRecord, now: float) -> str:
        link = "connected"
        if member.unreachable_since is not None:
            link = f"unreachable for {now - member.unreachable_since:.1f} s"
        elif member.standing != "in step":
            link = member.standing
        came = self._from.get(member.sender, _Heard()).said(now)
        went = self._to.get(member.sender, _Heard()).said(now)
        return (
            f"{member.name} ({link}, {member.state}, {member.applied} replies applied, next "
            f"round {member.next_round}) last from it: {came}; last to it: {went}"
        )
