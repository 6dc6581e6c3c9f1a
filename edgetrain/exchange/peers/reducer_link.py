"""A member's link to a reducer that another member hosts, which may be lost with all it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgetrain.exchange.hub.records import Seat
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.messages import Beat, Message, Reply
from edgetrain.exchange.seam import CatchUp, Entry, RoundReply, Submission
from edgetrain.vectors.vector import Vector


class ReducerLink(Link):
    """A Link that keeps each contribution until the reply to it is given out, and knows what
    another reducer needs to go on. A reply that is only here may be dropped when the connection
    breaks, and the reducer that could send it again may be the one that is lost.

    `merged`: of each member the number below which its contributions are in replies that were given
    out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a Link."""
        super().__init__(*args, **kwargs)
        self.merged: dict[str, int] = {}
        self._heads: dict[int, Reply] = {}
        """The first part of each reply that is not given out yet."""
        self._saw_all = False
        self._given_out: RoundReply | None = None
        """The last reply, which the member may not have added to its base yet."""
        self._caught: tuple[int, Vector] | None = None
        """Since the last contribution: a base that was given out in place of replies, with those
        given out behind it, and how many replies that has. The member may not have it yet."""

    def begin(self) -> Entry:
        """See Link."""
        entry = super().begin()
        self.inbox.keeps_frames = True
        self._saw_all = entry.applied == 0
        return entry

    def merged_of(self, seat: Seat) -> int:
        """Below which number a member's contributions are merged. Of one that no reply has named
        none is, if this link has been there from the first; else what the lead knows counts."""
        return self.merged.get(seat.name, seat.first_round if self._saw_all else seat.next_round)

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange. All that was given out is in the base that a contribution is made from."""
        self._caught = None
        return super().submit(submission)

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Exchange."""
        reply = super().wait(round)
        self._given_out = reply if isinstance(reply, RoundReply) else None
        if isinstance(reply, CatchUp):
            self._caught = None if reply.base is None else (reply.applied, reply.base.copy())
        elif self._caught is not None:
            self._caught = reply.round + 1, _added(self._caught[1], reply)
        if isinstance(reply, RoundReply):
            head = self._heads[round]
            self.merged |= dict(head.merged)
            self.outbox.drop_answered(head)
            # Those whose own replies this member missed, as it caught up with a base.
            self.outbox.drop_merged(self.merged.get(self.name, 0))
        self._heads = {number: head for number, head in self._heads.items() if number > round}
        return reply

    def _act(self, message: Message) -> None:
        # A beat says what is merged: that may be in a reply which is lost with the reducer.
        super()._act(replace(message, merged=0) if isinstance(message, Beat) else message)

    def _add_reply(self, reply: Reply) -> None:
        if self._silence.can_reconnect and self.inbox.is_gap(reply, self._session.applied):
            self._ask(self._session.epoch)
            return
        if not reply.part:
            self._heads[reply.round] = reply
        self.inbox.add_part(reply, self._silence.heard, reply.round == self._submitted)

    @property
    def given_out(self) -> int:
        """Replies that were given out."""
        return self._session.applied

    def add_given_out(self, base: Vector, applied: int) -> int:
        """Add to `base`, that of the stretch after `applied` replies, the last reply that was given
        out, if the base lacks it. Returns how many it then has."""
        reply = self._given_out
        if self._caught is not None:
            applied, base[:] = self._caught
        elif reply is not None and reply.round == applied:
            applied, _ = applied + 1, _added(base, reply)
        return applied

    def stand_still(self) -> int:
        """Drop replies that are not given out: they count no more. How many were given out."""
        self.inbox.clear()
        self._heads = {}
        return self.given_out


def _added(base: Vector, reply: RoundReply) -> Vector:
    """The same base, with the reply added to it."""
    at = 0
    for piece in reply.pieces:
        base[at : at + piece.size] += piece
        at += piece.size
    return base
