"""A hub that hands out work: slices of a batch, to be computed at the base as it is.

When the search is over before the last round, members are told that there is no more work.

A round is one look at a batch: its loss and gradient, or its loss alone, at the base that all
replies so far lead to. Once every slice has an answer the search says where to go, and the reply to
the round leads there. Members contribute nothing of their own: all that train count as in a round.

An answer is not kept for sending again: a member that comes back gets slices anew, and what it had
is given out again. So a lost message, connection or member costs its slices, and nothing else.

Hubs of several have a stretch of each gradient. The first one leads: it hands out slices, and each
hub is answered with its part. When all slices are here, members carry `Products` from hub to hub:

=========================  =====================  ================================================
products of                come from              what they mean
=========================  =====================  ================================================
another hub's stretch      that hub, to the lead  its share of what the search decides by
the lead's stretch         the lead, late         it waits: a hub gives out by itself what it lacks
all ranges                 the lead               the sum; the lead has closed the round by it
=========================  =====================  ================================================

The lead alone makes the sum, and has it in its journal first: so all hubs decide the same, whatever
dies. Another hub has its stretch of the batch's gradient in its journal before anybody has products
of it: a round that the lead has closed is never computed again. What is said is said again with the
beats, until a round closes; nobody keeps it for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from edgetrain.errors import BadPayload
from edgetrain.exchange.further_messages import Assign, Computed, Products
from edgetrain.exchange.hub.contributions import NOT_FINITE, BatchMean, Contribution
from edgetrain.exchange.hub.deal import Deal
from edgetrain.exchange.hub.effects import Closed, Dealt, Effect, Note, Send, Write
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.open_rounds import OpenRound
from edgetrain.exchange.hub.protocol import FindDue, GoOn, Hub, HubPart
from edgetrain.exchange.hub.records import Round, Sent
from edgetrain.exchange.hub.rounds import Due, FoundDue
from edgetrain.exchange.messages import Beat, Contribute, Figure, Join, Message, Resume, Telemetry
from edgetrain.strategies.lbfgs import Lbfgs, Numbers, joined
from edgetrain.vectors.ranges import Stretch
from edgetrain.vectors.vector import Buffer, Vector, all_finite

_SIGNS = (Computed, Beat, Telemetry, Figure)
"""Messages after which no member but the sender has more or less to do."""


class DealingPart(HubPart):
    """The part of a hub that hands out work. `slices` of a batch; `copies` of a slice, at most,
    beside the first. `search` is the hub's `outer`: it moves the base. The hub's codecs are those
    that round nothing. `stretches`: of all hubs, the lead's first; (): there is one."""

    def __init__(
        self, search: Lbfgs, slices: int, copies: int, stretches: Sequence[Stretch] = ()
    ) -> None:
        self.deal = Deal(slices, copies)
        """Only to be looked at."""
        self._search = search
        self._parts: dict[str, tuple[int, list[Buffer]]] = {}
        """Arriving answers, by member: the slice, and its parts so far."""
        self._sent_home: set[str] = set()
        """Members that know that there is no more work."""
        self._stretches = stretches
        self._mean: BatchMean | None = None
        """Mean of the open round, once every slice has an answer."""
        self._shares: dict[tuple[int, int], Numbers] = {}
        """Shares of the open round, by ranges: the loss, and products."""
        self._is_awaited = False
        """Whether the lead waits for this hub in the open round."""
        self._again = 0.0
        """When it says its newest numbers again."""
        self._t = 0.0
        """Where the search was as the open round was found to be due."""

    def attach(self, hub: Hub) -> Hub:
        super().attach(hub)
        own = hub.terms.stretch
        if own.count > 1:
            self._search.summed_in = np.float64
        stretches = self._stretches or [own]
        self._is_alone, self._leads = len(stretches) == 1, own == stretches[0]
        self._spans = [(each.first, each.end) for each in stretches]
        self._own, self._whole = (own.first, own.end), (0, own.count)
        return hub

    # -- what happens ---------------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        before = self.hub.members.get(sender)
        is_answer = isinstance(message, Computed | Products | Contribute)
        if before is not None and before.standing == "in step" and is_answer:
            before.mark_heard()
            effects = self._accept(before, message, now)
        else:
            effects = go_on()
        after = self.hub.members.get(sender)
        if isinstance(message, Join | Resume) and after is not None:
            self.deal.release(after.name)
            self._sent_home.discard(after.name)
            self._parts.pop(after.name, None)
        if isinstance(message, _SIGNS) and before is after:
            return effects
        return effects + self._hand_out(now)

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        return go_on() + self._hand_out(now) + self._say_again(now)

    # -- work goes out -------------------------------------------------------------------------

    def _hand_out(self, now: float) -> list[Effect]:
        """Give every member that has room what is left, one slice each before anyone gets a second
        one."""
        if not self.hub.started or self.hub.round >= self.hub.terms.steps:
            return []
        if self._search.phase == "over":
            there = [member for member in self.hub.members if _can_work(member)]
            told = [member for member in there if member.name not in self._sent_home]
            self._sent_home.update(member.name for member in told)
            return [self._work(member, ()) for member in told]
        if self.deal.round != self.hub.round:
            self.deal.begin(self.hub.round, now)
            self._parts = {}
        if not self._hands_out:
            return []
        able = {member.name: member for member in self.hub.members if _can_work(member)}
        self.deal.keep_only(able)
        given = self.deal.give_all(able, now)
        return [self._work(able[name], slices) for name, slices in given.items()]

    @property
    def _hands_out(self) -> bool:
        """Whether this hub gives out work now: else members answer what the lead gives out."""
        is_short = self._mean is None and self._search.wants_gradient
        return self._leads or (self._is_awaited and is_short)

    def _work(self, member: MemberRecord, slices: Iterable[int]) -> Send:
        wants, of = self._search.wants_gradient, self.deal.slices
        return Send(member.sender, Assign(self.hub.round, of, wants, tuple(slices)))

    def _hand_more(self, member: MemberRecord, now: float) -> list[Effect]:
        if not (_can_work(member) and self._hands_out):
            return []
        slice = self.deal.give(member.name, now)
        return [] if slice is None else [self._work(member, [slice])]

    # -- answers come in -----------------------------------------------------------------------

    def _accept(self, member: MemberRecord, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Products):
            problem = self._accept_products(message)
            return self.hub.expel(member, *problem, now) if problem else self.hub.close_rounds(now)
        if not isinstance(message, Computed):
            told = "a contribution, where the hub hands out work"
            return self.hub.expel(member, "order", told, now)
        if not self.hub.started or message.round > self.hub.round:
            return self.hub.expel(member, "order", f"an answer of round {message.round}", now)
        member.mark_applied(max(member.applied, message.round))
        deal, slice = self.deal, message.slice
        is_first = deal.holds(member.name, slice) if self._leads else deal.lacks(slice)
        is_first = is_first and self._mean is None
        if message.round < self.hub.round or not is_first:
            self._parts.pop(member.name, None)  # another answer was the first
            return self._hand_more(member, now) if message.part + 1 == message.parts else []
        if problem := self._why_not(message):
            return self.hub.expel(member, *problem, now)
        slice, parts = self._parts.get(member.name, (message.slice, []))
        if slice != message.slice or message.part != len(parts):
            self._parts.pop(member.name, None)
            return self.hub.handle_gap(member, f"part {message.part} of an answer", now)
        self._parts[member.name] = message.slice, [*parts, message.payload]
        if message.part + 1 < message.parts:
            return []
        return self._accept_answer(member, message, now)

    def _why_not(self, message: Computed) -> tuple[str, str] | None:
        wants, merger = self._search.wants_gradient, self.hub.rounds.merger
        count = len(merger.sizes(message.round)) if wants else 1
        if message.parts != count or message.part >= count:
            return "order", f"part {message.part} of {message.parts}, an answer has {count}"
        size = memoryview(message.payload).nbytes
        most = merger.sizes(message.round)[message.part] if wants else 0
        if size != most:
            return "size", f"{size} bytes of an answer, wanted are {most}"
        base = self.hub.checksum(message.round)
        if base != message.checksum:
            return "diverged", (
                f"after {message.round} replies the base has checksum {base:016x}, the member's "
                f"{message.checksum:016x}"
            )
        return None

    def _accept_answer(self, member: MemberRecord, message: Computed, now: float) -> list[Effect]:
        _, parts = self._parts.pop(member.name)
        gradient: Vector | None = None
        if self._search.wants_gradient:
            codec, gradient = self.hub.rounds.merger.codec, np.empty(self._elements, np.float32)
            try:
                for here, part in zip(codec.slices(gradient.size), parts, strict=True):
                    codec.decode(part, gradient[here])
            except BadPayload as error:
                return self.hub.expel(member, "payload", str(error), now)
            if not all_finite(gradient):
                return self.hub.expel(member, "payload", NOT_FINITE, now)
        member.note_answer()
        self.hub.membership.unrequited.forget_sender(member.sender)
        self.deal.accept(member.name, message.slice, now)
        self.deal.sums.add(message.slice, message.samples, message.loss, gradient)
        if self._leads:
            self._again = math.inf  # an answer at this base: all hubs have closed the last round
        before = self.hub.round
        effects = self.hub.close_rounds(now)
        return effects if self.hub.round > before else effects + self._hand_more(member, now)

    @property
    def _elements(self) -> int:
        return self.hub.rounds.merger.ranges.elements

    # -- a round closes ------------------------------------------------------------------------

    def find_due(self, now: float, go_on: FindDue) -> FoundDue:
        """Every slice has an answer, the products of all hubs are known, and somebody is there to
        be told."""
        if self.deal.round != self.hub.round:
            return [], None
        said, told, mean = self._share(now), self._shares.get(self._whole), self._mean
        if told is None or (mean is None and self._search.wants_gradient):
            return said, None
        vector = None if mean is None else mean.vector
        products = told[1:] if told.size > 1 else None
        end = BatchMean(float(told[0]), vector, products)
        entry, self._t = OpenRound(self.deal.began), self._search.t
        for member in self.hub.members:
            if member.trains and not member.returning:
                key = member.name, self.hub.round
                entry.contributions[key] = Contribution(member.name, 1.0, ())
                entry.senders[key] = member
        return said, Due(entry, (), end) if entry.contributions else None

    def _share(self, now: float) -> list[Effect]:
        """Once every slice has an answer, find this hub's numbers, and say them to the lead; the
        lead adds up those of all."""
        said, search = list[Effect](), self._search
        if self._mean is None and (search.offered is not None or self.deal.is_whole):
            offered = search.offered
            mean = self.deal.sums.mean() if offered is None else BatchMean(0.0, offered)
            self._mean, numbers = mean, np.array([mean.loss])
            if mean.vector is not None and not self._is_alone:
                assert self.hub.base is not None
                numbers = np.append(numbers, search.products(self.hub.base, mean.vector))
            self._shares[self._own] = numbers
            self._again = now + self.hub.policy.heartbeat_s
            if mean.vector is not None and not self._leads:
                if offered is None:
                    search.offered = mean.vector
                    said.append(Write(_offer(self.hub.round, mean.vector)))
                said += self._say(self.hub.round, self._own)
        spans = self._spans if search.wants_gradient else [self._own]
        if self._leads and all(span in self._shares for span in spans):
            self._shares[self._whole] = joined([self._shares[span] for span in spans])
        return said

    def _accept_products(self, message: Products) -> tuple[str, str] | None:
        """Numbers of another hub, or of all: what is wrong with them, as (code, reason)."""
        if message.round != self.hub.round or self.deal.round != self.hub.round:
            return None
        span, search = (message.first, message.end), self._search
        if span == self._own or span not in (*self._spans, self._whole):
            return "order", f"products of the ranges {message.first} to {message.end}"
        most = 8 * (1 + search.products_count * search.wants_gradient)
        if (size := memoryview(message.payload).nbytes) != most:
            return "size", f"{size} bytes of products, wanted are {most}"
        numbers = np.frombuffer(message.payload, np.float64)
        if not np.isfinite(numbers).all():
            return "payload", NOT_FINITE
        self._is_awaited = not self._leads
        if self._leads is not (span == self._whole):
            self._shares.setdefault(span, numbers)
        return None

    def _say(self, round: int, span: tuple[int, int]) -> list[Effect]:
        numbers = self._search.told if span == self._whole else self._shares[span]
        told = Products(round, *span, numbers.tobytes())
        return [Send(member.sender, told) for member in self.hub.members if _can_work(member)]

    def _say_again(self, now: float) -> list[Effect]:
        """With the beats: what was said may be lost. The lead says now that it waits."""
        if self._is_alone or not self.hub.started or now < self._again:
            return []
        self._again = now + self.hub.policy.heartbeat_s
        if self._mean is not None:
            return self._say(self.hub.round, self._own)
        return self._say(self.hub.round - 1, self._whole) if self._leads and self.hub.round else []

    def close(self, effects: list[Effect], now: float) -> list[Effect]:
        for member in self.hub.members:
            if member.merged > member.next_round:
                member.skip_to(member.merged)
        deal = self.deal
        self._mean, self._shares, self._is_awaited = None, {}, False
        self._again = now + self.hub.policy.heartbeat_s
        if self._leads and not self._is_alone:  # before the reply, which members then wait for
            written = (isinstance(e, Write) and isinstance(e.record, Round) for e in effects)
            here = 1 + [*written].index(True)
            effects[here:here] = self._say(self.hub.round - 1, self._whole)
        told = Dealt(deal.slices, deal.copies, deal.wasted, float(self._search.told[0]), self._t)
        effects = [replace(e, dealt=told) if isinstance(e, Closed) else e for e in effects]
        effects += [Note("search", "hub", remark) for remark in self._search.remarks]
        return effects + self._hand_out(now)


def _can_work(member: MemberRecord) -> bool:
    is_here = member.standing == "in step" and member.unreachable_since is None
    return member.trains and is_here


def _offer(round: int, gradient: Vector) -> Sent:
    return Sent(round, (), 1.0, 0, round, 0, 0, 1.0, gradient.data.cast("B"))
