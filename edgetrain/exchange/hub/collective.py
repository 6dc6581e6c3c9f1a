"""A hub whose members average among themselves: it has no data, and counts rounds.

It is the place of membership, K, D, the landing and the ends, as every hub. Its stretch of the
vector is empty: contributions are votes, replies say that a round counts. `turns` has what is said
between the two. Where members cannot connect as the topology needs it, the hub adds up all by
itself, as in a star, and says so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from edgetrain.exchange.hub.direct import DirectHub
from edgetrain.exchange.hub.effects import Effect
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.places import LEAD, Reach, Stretches
from edgetrain.exchange.hub.records import Record, State
from edgetrain.exchange.hub.rounds import Due
from edgetrain.exchange.hub.terms import Terms
from edgetrain.exchange.hub.turns import Turns, in_places
from edgetrain.exchange.messages import NO_WEIGHT, Join, Message, Ran, Resume
from edgetrain.exchange.peers.schedules import places_of
from edgetrain.strategies.closing import RoundView

if TYPE_CHECKING:
    from collections.abc import Iterable


class NeverWithout:
    """A round waits for every member that trains, however long: one that missed a round would not
    have its mean. A ClosingRule."""

    def due(self, round: RoundView, now: float) -> bool:
        """See ClosingRule."""
        return False


def _assign(topology: str, ranges: int, reach: Reach) -> Stretches:
    """Nothing for the hub, or all."""
    found = places_of(topology, reach.names, reach.can)
    return {LEAD: (0, ranges)} if found is None else {}


class CollectiveHub(DirectHub):
    """A DirectHub whose rounds are averaged by its members, in a `topology` of
    `peers.schedules.SHAPES`. The other arguments are as for a Hub.

    The parameters that training starts from are handed around in the same way, before round 0. A
    member cannot join after the start, and one that was given up cannot come back: nobody could
    give it the base.
    """

    def __init__(self, terms: Terms, *args: Any, topology: str, **kwargs: Any) -> None:
        assign = partial(_assign, topology, terms.stretch.count)
        super().__init__(terms, *args, assign=assign, **kwargs)
        self.topology = topology
        self._usual = kwargs.get("closing")
        self.turns = self._fresh_turns()
        """Only to be looked at."""
        self._has_base = False

    def _fresh_turns(self) -> Turns:
        return Turns(self.topology, self.members, lambda: self.places.reach)

    @property
    def is_star(self) -> bool:
        """Whether the hub adds up, because members cannot connect as they would have to."""
        return LEAD in self.places.stretches

    @property
    def _is_counting(self) -> bool:
        """Whether members are in that average among themselves."""
        return self._is_welcoming and not self.is_star

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """See Hub."""
        if not self._is_counting:
            return super().handle(sender, message, now)
        if self.started and isinstance(message, Join | Resume):
            known = isinstance(message, Resume) and self.members.named(message.name) is not None
            if not known:
                why_not = f"a {self.topology} takes nobody in after the start: start anew"
                return turn_away(sender, message.name, "started", why_not)
        member = self.members.get(sender)
        if member is not None and isinstance(message, Ran) and not member.returning:
            member.mark_heard()
            lost = self.members.named(self.turns.accept(member, message))
            effects = self._expel(lost, "peers", "others do not hear from it", now) if lost else []
            return effects + self._move_on(now)
        effects = super().handle(sender, message, now)
        if isinstance(message, Resume):
            self.turns.renew()
        return effects + self._move_on(now)

    def tick(self, now: float) -> list[Effect]:
        """See Hub."""
        effects = super().tick(now)
        if self.turns.why_not:
            for member in [*self.members]:
                effects += self._expel(member, "peers", self.turns.why_not, now)
        return effects + self._move_on(now)

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """See Hub. Members have the means of all rounds in the journal, and what they gave to the
        next ones: those run again, in turns with higher numbers."""
        super().restore(state, records, now)
        self.turns.start(self.epoch)

    def _become_reducer_of(self, span: tuple[int, int]) -> None:
        self._parts[1]["closing"] = self._usual if self.is_star else NeverWithout()
        super()._become_reducer_of(span)
        self.turns, self._has_base = self._fresh_turns(), False

    # -- before the start ----------------------------------------------------------------------

    def _welcome_all(self, now: float) -> list[Effect]:
        effects = super()._welcome_all(now)
        if not self.is_star:
            self.membership.is_ready = lambda: self.places.is_settled and self._has_base
        return effects

    def _held_back(self, effects: list[Effect], now: float) -> list[Effect]:
        if self._is_counting and not self.started:
            lost = [name for name in self.places.reach.names if self.members.named(name) is None]
            return effects + self._begin_again(lost[0]) if lost else effects
        return super()._held_back(effects, now)

    def _words(self) -> str:
        places = self.places.reach
        order = places_of(self.topology, in_places(places.names), places.can)
        if order is None:
            return f"star: the hub adds up, because members cannot connect as a {self.topology}"
        return f"{self.topology}: {', '.join(order)}"

    def _move_on(self, now: float) -> list[Effect]:
        """Hand out the base, if that comes next, or look at the oldest round again."""
        if not self._is_counting:
            return []
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

    # -- rounds --------------------------------------------------------------------------------

    def _find_due(self, now: float) -> tuple[list[Effect], Due | None]:
        """A round that is due closes once all members have its mean. What members that have gone
        gave to it is dropped: nobody has that."""
        said, due = super()._find_due(now)
        if due is None or self.is_star:
            return said, due
        weights = {member.name: NO_WEIGHT for member in self.members if member.trains}
        for contribution in due.entry.in_order:
            if contribution.member in weights:
                weights[contribution.member] = contribution.weight
            else:
                self.rounds.open_rounds.withdraw(contribution.member)
        effects, agreed = self.turns.advance(self.round, weights)
        return said + effects, due if agreed else None
