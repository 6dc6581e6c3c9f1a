"""A member's link to a reducer that another member hosts, which may be lost with all it has."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from edgetrain.errors import Refused
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.member.session import Back
from edgetrain.exchange.messages import Beat, Message, Refuse, Reply, Start
from edgetrain.exchange.seam import CatchUp, Entry, RoundReply, Submission
from edgetrain.vectors.vector import Vector

log = logging.getLogger("edgetrain")


@dataclass
class _Place:
    """The member's position by its applied replies: see Session."""

    applied: int = 0
    checksum: int = 0
    next_round: int = 0


class ReducerLink(Link):
    """A Link that keeps each contribution until the reply behind the one with it is given out, and
    knows what another reducer needs to go on. A reply that is only here may be dropped when the
    connection breaks, and the reducer that could send it again may be the one that is lost; or the
    others may not have got it. Without a delay the next reply proves that they have.

    `given_out` counts the replies that were given out, and those in a base that was, in their
    place. `merged` has of each member the number below which its contributions are in these; of a
    member that it lacks there is none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As a Link."""
        super().__init__(*args, **kwargs)
        self.merged: dict[str, int] = {}
        self._heads: dict[int, Reply] = {}
        """The first part of each reply that is not given out yet."""
        self._place = _Place()
        self._base_merged: dict[str, int] = {}
        """`merged` of the base that `wait` gives next in place of replies."""
        self._given_out: RoundReply | None = None
        """The last reply, which the member may not have added to its base yet."""
        self._caught: tuple[int, Vector] | None = None
        """Since the last contribution: a base that was given out in place of replies, with those
        given out behind it, and how many replies that has. The member may not have it yet."""
        self._dropped = 0
        """Contributions with numbers below this are kept no longer."""
        self._is_another = False
        """Whether this is another reducer than before, which has not answered yet."""

    def begin(self) -> Entry:
        entry = super().begin()
        self.inbox.keeps_frames = True
        self._place = _Place(entry.applied, entry.checksum, entry.round)
        return entry

    def _accept_before_start(self, message: Message) -> Entry | None:
        entry = super()._accept_before_start(message)
        if entry is not None and isinstance(message, Start):
            self.merged = dict(message.each)
        return entry

    def ask_again(self, *, base: bool = False, round: int = 0) -> None:
        self._place.next_round = max(self._place.next_round, round)
        super().ask_again(base=base, round=round)

    def submit(self, submission: Submission) -> Vector | None:
        """See Exchange. All that was given out is in the base that a contribution is made from."""
        self._caught = None
        self._place = _Place(submission.applied, submission.checksum, submission.round + 1)
        return super().submit(submission)

    def wait(self, round: int) -> RoundReply | CatchUp:
        reply, place = super().wait(round), self._place
        self._given_out = reply if isinstance(reply, RoundReply) else None
        if isinstance(reply, CatchUp):
            self._caught = None
            place.next_round = max(place.next_round, reply.round)
            if reply.base is not None:
                self._caught = reply.applied, reply.base.copy()
                place.applied, place.checksum = reply.applied, reply.checksum
                self.merged = self._base_merged
        else:
            if self._caught is not None:
                self._caught = reply.round + 1, reply.add_to(self._caught[1])
            place.applied, place.checksum = reply.round + 1, reply.checksum
            self._drop(self._own_merged)
            self.merged |= dict(self._heads[round].merged)
        self._heads = {number: head for number, head in self._heads.items() if number > round}
        return reply

    @property
    def _own_merged(self) -> int:
        return self.merged.get(self.name, 0)

    def _drop(self, merged: int) -> None:
        """Keep contributions with numbers below this no longer."""
        self._dropped = merged
        self.outbox.drop_merged(merged)

    def settle(self) -> bool:
        self._drop(self._own_merged)
        return super().settle()

    def _act(self, message: Message) -> None:
        if self._is_another and isinstance(message, Refuse) and message.code in _OTHER_BASE:
            # The one before gave this member replies that nobody else has: they count no more.
            log.warning("takes the base of another reducer: %s", message.reason)
            self._session.applied = self._session.checksum = 0
            self.ask_again(base=True)
            return
        # A beat says what is merged: that may be in a reply which is lost with the reducer.
        super()._act(replace(message, merged=0) if isinstance(message, Beat) else message)

    def _return(self, back: Back) -> None:
        self._is_another, merged = False, dict(back.start.each)
        if (number := merged.get(self.name, 0)) < self._dropped:
            raise Refused(
                "session",
                f"{self.name}'s contribution {number} to {self.stretch} is lost with the member "
                "that reduced them: nobody else had the reply",
                "join again",
            )
        if not back.start.keep:
            self._base_merged = merged
        super()._return(back)

    def _add_reply(self, reply: Reply) -> None:
        if self._silence.can_reconnect and self.inbox.is_gap(reply, self._session.applied):
            self._ask(self._session.epoch)
            return
        if not reply.part:
            self._heads[reply.round] = reply
        self.inbox.add_part(reply, self._silence.heard, reply.round == self._submitted)

    # -- the reducer is lost -------------------------------------------------------------------

    @property
    def given_out(self) -> int:
        return self._place.applied

    def add_given_out(self, base: Vector, applied: int) -> int:
        """Add to `base`, that of the stretch after `applied` replies, the last reply that was given
        out, if the base lacks it. Returns how many it then has."""
        reply = self._given_out
        if self._caught is not None:
            applied, base[:] = self._caught
        elif reply is not None and reply.round == applied:
            applied, _ = applied + 1, reply.add_to(base)
        return applied

    def stand_still(self) -> int:
        """Drop what is not given out: it counts no more. Returns `given_out`."""
        self.inbox.clear()
        self._heads, self._catch_up, place = {}, None, self._place
        session = self._session
        session.applied, session.checksum = place.applied, place.checksum
        session.next_round = place.next_round
        return self.given_out

    def ask_another(self) -> None:
        """Another reducer is at the other end from now on: say to it where this member is."""
        self._is_another = True
        self.ask_again()


_OTHER_BASE = "ahead", "diverged"
"""Codes of refusals of a member with another base than a reducer has."""
