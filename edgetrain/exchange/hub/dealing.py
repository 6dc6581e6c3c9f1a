"""A hub that hands out work: slices of a batch, to be computed at the base as it is.

When the search is over before the last round, members are told that there is no more work.

A round is one look at a batch: its loss and gradient, or its loss alone, at the base that all
replies so far lead to. Once every slice has an answer the search says where to go, and the reply to
the round leads there. Members contribute nothing of their own: all that train count as in a round.

An answer is not kept for sending again: a member that comes back gets slices anew, and what it had
is given out again. So a lost message, connection or member costs its slices, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.errors import BadPayload
from edgetrain.exchange.hub.contributions import NOT_FINITE, Contribution
from edgetrain.exchange.hub.deal import Deal
from edgetrain.exchange.hub.effects import Closed, Dealt, Effect, Note, Send
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.open_rounds import OpenRound
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.rounds import Due
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import (
    Assign,
    Beat,
    Computed,
    Contribute,
    Figure,
    Message,
    Telemetry,
)
from edgetrain.strategies.lbfgs import Lbfgs
from edgetrain.strategies.merging.rule import Mean
from edgetrain.vectors.vector import Buffer, Vector, all_finite

_SIGNS = (Computed, Beat, Telemetry, Figure)
"""Messages after which no member but the sender has more or less to do."""


class DealingHub(Hub):
    """A Hub of a strategy whose hub hands out work. `slices` of a batch; `copies` of a slice, at
    most, beside the first. `search` moves the base. Contributions' `codec` and `reply_codec` are
    those that round nothing."""

    def __init__(
        self,
        terms: Terms,
        policy: Policy,
        codec: Codec,
        reply_codec: Codec,
        search: Lbfgs,
        slices: int,
        copies: int,
    ) -> None:
        super().__init__(terms, policy, Mean(), codec, reply_codec, outer=search)
        self.deal = Deal(slices, copies)
        """Only to be looked at."""
        self._search = search
        self._parts: dict[str, tuple[int, list[Buffer]]] = {}
        """Of the answer that is arriving from each member: its slice, and its parts so far."""
        self._sent_home: set[str] = set()
        """Members that know that there is no more work."""

    # -- what a driver calls -------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        before = self.members.get(sender)
        effects = super().handle(sender, message, now)
        if isinstance(message, _SIGNS) and before is self.members.get(sender):
            return effects
        return effects + self._hand_out(now)

    def tick(self, now: float) -> list[Effect]:
        effects = super().tick(now)
        return effects + self._hand_out(now)

    # -- work goes out -------------------------------------------------------------------------

    def _hand_out(self, now: float) -> list[Effect]:
        """Give every member that has room what is left, one slice each before anyone gets a second
        one."""
        if not self.started or self.round >= self.terms.steps:
            return []
        if self._search.phase == "over":
            there = [member for member in self.members if _can_work(member)]
            told = [member for member in there if member.name not in self._sent_home]
            self._sent_home.update(member.name for member in told)
            return [self._work(member, ()) for member in told]
        if self.deal.round != self.round:
            self.deal.begin(self.round, now)
            self._parts = {}
        able = {member.name: member for member in self.members if _can_work(member)}
        self.deal.keep_only(able)
        given = self.deal.give_all(able, now)
        return [self._work(able[name], slices) for name, slices in given.items()]

    def _work(self, member: MemberRecord, slices: Iterable[int]) -> Send:
        wants, of = self._search.wants_gradient, self.deal.slices
        return Send(member.sender, Assign(self.round, of, wants, tuple(slices)))

    def _hand_more(self, member: MemberRecord, now: float) -> list[Effect]:
        if not _can_work(member):
            return []
        slice = self.deal.give(member.name, now)
        return [] if slice is None else [self._work(member, [slice])]

    # -- answers come in -----------------------------------------------------------------------

    def _handle_stranger(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        effects = super()._handle_stranger(sender, message, now)  # type: ignore[arg-type]
        if (member := self.members.get(sender)) is not None:
            self.deal.release(member.name)
            self._sent_home.discard(member.name)
            self._parts.pop(member.name, None)
        return effects

    def _handle_member(self, member: MemberRecord, message: Message, now: float) -> list[Effect]:
        is_answer = isinstance(message, Computed) and not member.returning
        if not (isinstance(message, Computed) and is_answer and member.standing == "in step"):
            return super()._handle_member(member, message, now)
        member.mark_heard()
        if not self.started or message.round > self.round:
            return self._expel(member, "order", f"an answer of round {message.round}", now)
        member.mark_applied(max(member.applied, message.round))
        if message.round < self.round or not self.deal.holds(member.name, message.slice):
            self._parts.pop(member.name, None)  # another answer was the first
            return self._hand_more(member, now) if message.part + 1 == message.parts else []
        if problem := self._why_not(message):
            return self._expel(member, *problem, now)
        slice, parts = self._parts.get(member.name, (message.slice, []))
        if slice != message.slice or message.part != len(parts):
            self._parts.pop(member.name, None)
            return self._handle_gap(member, f"part {message.part} of an answer", now)
        self._parts[member.name] = message.slice, [*parts, message.payload]
        if message.part + 1 < message.parts:
            return []
        return self._accept_answer(member, message, now)

    def _accept_part(self, member: MemberRecord, message: Contribute, now: float) -> list[Effect]:
        return self._expel(member, "order", "a contribution, where the hub hands out work", now)

    def _why_not(self, message: Computed) -> tuple[str, str] | None:
        """What is wrong with a part of an answer: (code, reason)."""
        wants, merger = self._search.wants_gradient, self.rounds.merger
        count = merger.parts(message.round) if wants else 1
        if message.parts != count or message.part >= count:
            return "order", f"part {message.part} of {message.parts}, an answer has {count}"
        size = memoryview(message.payload).nbytes
        most = merger.expected(message.round, message.part)[1] if wants else 0
        if size != most:
            return "size", f"{size} bytes of an answer, wanted are {most}"
        base = self.checksum(message.round)
        if base != message.checksum:
            return "diverged", (
                f"after {message.round} replies the base has checksum {base:016x}, the member's "
                f"{message.checksum:016x}"
            )
        return None

    def _accept_answer(self, member: MemberRecord, message: Computed, now: float) -> list[Effect]:
        """The first answer for a slice is whole."""
        _, parts = self._parts.pop(member.name)
        gradient: Vector | None = None
        if self._search.wants_gradient:
            codec, gradient = self.rounds.merger.codec, np.empty(self._elements, np.float32)
            try:
                for here, part in zip(codec.slices(gradient.size), parts, strict=True):
                    codec.decode(part, gradient[here])
            except BadPayload as error:
                return self._expel(member, "payload", str(error), now)
            if not all_finite(gradient):
                return self._expel(member, "payload", NOT_FINITE, now)
        member.note_answer()
        self.membership.unrequited.forget_sender(member.sender)
        self.deal.accept(member.name, message.slice, now)
        self.deal.sums.add(message.slice, message.samples, message.loss, gradient)
        before = self.round
        effects = self._close_rounds(now)
        return effects if self.round > before else effects + self._hand_more(member, now)

    @property
    def _elements(self) -> int:
        return self.rounds.merger.ranges.elements

    # -- a round closes ------------------------------------------------------------------------

    def _find_due(self, now: float) -> tuple[list[Effect], Due | None]:
        """Every slice has an answer, and somebody is there to be told."""
        if self.deal.round != self.round or not self.deal.is_whole:
            return [], None
        entry = OpenRound(self.deal.began)
        for member in self.members:
            if member.trains and not member.returning:
                key = member.name, self.round
                entry.contributions[key] = Contribution(member.name, 1.0, ())
                entry.senders[key] = member
        return [], Due(entry, (), self.deal.sums.mean()) if entry.contributions else None

    def _close_rounds(self, now: float) -> list[Effect]:
        before, at = self.round, self._search.t
        effects = super()._close_rounds(now)
        if self.round == before:
            return effects
        for member in self.members:
            if member.merged > member.next_round:
                member.skip_to(member.merged)
        deal = self.deal
        told = Dealt(deal.slices, deal.copies, deal.wasted, deal.sums.mean().loss, at)
        effects = [replace(e, dealt=told) if isinstance(e, Closed) else e for e in effects]
        effects += [Note("search", "hub", remark) for remark in self._search.remarks]
        return effects + self._hand_out(now)


def _can_work(member: MemberRecord) -> bool:
    """Whether a member would get work, and compute it."""
    is_here = member.standing == "in step" and member.unreachable_since is None
    return member.trains and is_here
