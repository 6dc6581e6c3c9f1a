"""A member's link to a reducer that another member hosts, which may be lost with all it has."""

from __future__ import annotations

from typing import Any

from edgetrain.exchange.hub.records import Seat
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import Reply
from edgetrain.exchange.seam import CatchUp, Entry, RoundReply
from edgetrain.vectors.vector import Vector


class ReducerLink(Link):
    """A Link that keeps each contribution until the reply to it is whole, and knows what another
    reducer needs to go on.

    `merged`: of each member the number below which its contributions are in replies that are whole
    here, as far as this link has seen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a Link."""
        super().__init__(*args, **kwargs)
        self.merged: dict[str, int] = {}
        self._named: tuple[tuple[str, int], ...] = ()
        self._saw_all = False
        self._given_out: RoundReply | None = None
        """The last reply, which the member may not have added to its base yet."""

    def begin(self) -> Entry:
        """See Link."""
        entry = super().begin()
        self._saw_all = entry.applied == 0
        return entry

    def merged_of(self, seat: Seat) -> int:
        """Below which number a member's contributions are merged. Of one that no reply has named
        none is, if this link has been there from the first; else what the lead knows counts."""
        return self.merged.get(seat.name, seat.first_round if self._saw_all else seat.next_round)

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Exchange."""
        reply = super().wait(round)
        self._given_out = reply if isinstance(reply, RoundReply) else None
        return reply

    def _add_reply(self, reply: Reply) -> None:
        if self._silence.can_reconnect and self.inbox.is_gap(reply, self._session.applied):
            self._ask(self._session.epoch)
            return
        if not reply.part:
            self._named = reply.merged
        self.inbox.add_part(reply, self._silence.heard, reply.round == self._submitted)
        if self.inbox.is_whole(reply.round):
            self.merged |= dict(self._named)
            self.outbox.drop_answered(reply)

    @property
    def whole(self) -> int:
        """Replies that are whole here, those that were given out included."""
        return self.inbox.ready_after(self._session.applied)

    def add_waiting(self, base: Vector, applied: int) -> int:
        """Add to `base`, that of the stretch after `applied` replies, all that are whole here.
        Returns how many it then has. What was not given out is gone here: the hub has to be asked
        for its base."""
        if self._given_out is not None and self._given_out.round == applied:
            applied += _add(self._given_out, base)
        while self.inbox.is_whole(applied):
            applied += _add(self.inbox.pop_reply(applied), base)
        return applied


def _add(reply: RoundReply, base: Vector) -> int:
    at = 0
    for piece in reply.pieces:
        base[at : at + piece.size] += piece
        at += piece.size
    return 1
