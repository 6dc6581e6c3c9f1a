"""A hub whose members average among themselves: it has no data, and counts rounds.

It is the place of membership, K, D, the landing and the ends, as every hub. Its stretch of the
vector is empty: contributions are votes, replies say that a round counts. `turns` has what is said
between the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgetrain.exchange.hub.effects import Effect
from edgetrain.exchange.hub.mapping import MappingHub
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.places import LEAD
from edgetrain.exchange.hub.rounds import Due
from edgetrain.exchange.hub.terms import Terms
from edgetrain.exchange.hub.turns import Turns
from edgetrain.exchange.messages import NO_WEIGHT, Join, Message, Ran, Resume
from edgetrain.strategies.closing import RoundView
from edgetrain.vectors.ranges import Stretch


class NeverWithout:
    """A round waits for every member that trains, however long: one that missed a round would not
    have its mean. A ClosingRule."""

    def due(self, round: RoundView, now: float) -> bool:
        """See ClosingRule."""
        return False


class CollectiveHub(MappingHub):
    """A MappingHub whose rounds are averaged by its members, in a `topology` of
    `peers.schedules.SHAPES`. The other arguments are as for a Hub.

    The parameters that training starts from are handed around in the same way, before round 0. A
    member cannot join after the start, and one that was given up cannot come back: nobody could
    give it the base.
    """

    def __init__(self, terms: Terms, *args: Any, topology: str, **kwargs: Any) -> None:
        terms = replace(terms, stretch=Stretch(1, 0, 0))
        kwargs["closing"] = NeverWithout()
        super().__init__(terms, *args, assign=lambda reach: {LEAD: (0, 1)}, **kwargs)
        self.turns = Turns(topology, self.members, lambda: self.places.reach)
        """Only to be looked at."""
        self._has_base = False
        self.membership.is_ready = lambda: self.places.is_settled and self._has_base

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """See Hub."""
        if self.started and isinstance(message, Join):
            why_not = f"a {self.turns.topology} takes nobody in after the start: start anew"
            return turn_away(sender, message.name, "started", why_not)
        member = self.members.get(sender)
        if member is not None and isinstance(message, Ran):
            member.mark_heard()
            lost = self.members.named(self.turns.accept(member, message))
            effects = self._expel(lost, "peers", "others do not hear from it", now) if lost else []
            return effects + self._go_on(now)
        effects = super().handle(sender, message, now)
        if isinstance(message, Resume):
            self.turns.renew()
        return effects + self._go_on(now)

    def tick(self, now: float) -> list[Effect]:
        """See Hub."""
        effects = super().tick(now)
        if self.turns.why_not:
            for member in [*self.members]:
                effects += self._expel(member, "peers", self.turns.why_not, now)
        return effects + self._go_on(now)

    def _go_on(self, now: float) -> list[Effect]:
        """Hand out the base, if that comes next, or look at the oldest round again."""
        if self.started:
            return self._close_rounds(now)
        if self._has_base or not self.places.is_settled or not self._all_are_here:
            return []
        uploader = self.membership.first_base.uploader
        weights = {m.name: 1.0 if m is uploader else NO_WEIGHT for m in self.members}
        effects, self._has_base = self.turns.advance(0, weights, is_base=True)
        return effects + self._start_if_ready(now)

    @property
    def _all_are_here(self) -> bool:
        """Whether all members have joined, and one says that training starts from its base."""
        whole = self.membership.first_base.is_whole(self.membership.model)
        return whole and self.members.places >= self.policy.members

    def _find_due(self, now: float) -> tuple[list[Effect], Due | None]:
        """A round that is due closes once all members have its mean. What members that have gone
        gave to it is dropped: nobody has that."""
        said, due = super()._find_due(now)
        if due is None:
            return said, None
        weights = {member.name: NO_WEIGHT for member in self.members if member.trains}
        for contribution in due.entry.in_order:
            if contribution.member in weights:
                weights[contribution.member] = contribution.weight
            else:
                self.rounds.open_rounds.withdraw(contribution.member)
        effects, agreed = self.turns.advance(self.round, weights)
        return said + effects, due if agreed else None
