"""A hub whose members average among themselves: it has no data, and counts rounds.

It is the place of membership, K, D, the final sync and the ends, as every hub. Its stretch of the
vector is empty: contributions are votes, replies say that a round counts. `turns` has what is said
between the two. Where members cannot connect as the topology needs it, the hub adds up all by
itself, as in a star, and says so.

A member that joins after the start waits until no round is being averaged. Then one that trains and
the newcomer have a turn of their own, which hands on the base, and the newcomer takes part in the
next round without adding to those that have begun. One that rounds went on without is refused: it
lacks their means, and joins anew. While nobody is heard of nobody is given up: rounds of the first
that comes back would have no others.
"""

from __future__ import annotations

from functools import partial

from edgetrain.exchange.further_messages import Ran
from edgetrain.exchange.hub.direct import DirectPart
from edgetrain.exchange.hub.effects import Effect, Send, refusal
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.places import LEAD, Reach, Stretches
from edgetrain.exchange.hub.protocol import FindDue, GoOn, Hub, Records, Restore
from edgetrain.exchange.hub.records import State
from edgetrain.exchange.hub.rounds import FoundDue
from edgetrain.exchange.hub.turns import Turns, in_places
from edgetrain.exchange.messages import CLIENT, NO_WEIGHT, Beat, Join, Message, Resume
from edgetrain.exchange.peers.schedules import places_of
from edgetrain.strategies.closing import ClosingRule, RoundView

BASE_GONE = (
    "all members that had the parameters have ended, or are gone: take the model of one that "
    "ended, or start the job anew"
)


class NeverWithout:
    """A round waits for every member that trains, however long: one that missed a round would not
    have its mean. A ClosingRule."""

    def due(self, round: RoundView, now: float) -> bool:
        return False


def _assign(topology: str, ranges: int, reach: Reach) -> Stretches:
    """Nothing for the hub, or all: also of a member alone, which nobody may be able to reach."""
    is_alone = len(reach.names) == 1
    found = None if is_alone else places_of(topology, reach.names, reach.can)
    return {LEAD: (0, ranges)} if found is None else {}


class CollectivePart(DirectPart):
    """The part of a hub whose rounds are averaged by its members, in a `topology` of
    `peers.schedules.SHAPES`.

    The parameters that training starts from are handed around in the same way, before round 0.
    """

    def __init__(self, topology: str, ranges: int) -> None:
        super().__init__(partial(_assign, topology, ranges))
        self.topology = topology
        self._has_base = False
        self._alone_since: float | None = None
        """Since when no member has been heard of."""

    def attach(self, hub: Hub) -> Hub:
        super().attach(hub)
        self.turns = self._fresh_turns()
        """Only to be looked at."""
        return hub

    def _fresh_turns(self) -> Turns:
        return Turns(self.topology, self.hub.members, lambda: self.places.reach)

    @property
    def is_star(self) -> bool:
        """Whether the hub adds up, because members cannot connect as they would have to."""
        return LEAD in self.places.stretches

    @property
    def _is_counting(self) -> bool:
        return self._is_welcoming and not self.is_star

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        if not self._is_counting:
            return super().handle(sender, message, now, go_on)
        member, effects = self.hub.members.get(sender), list[Effect]()
        if member is not None and isinstance(message, Ran) and not member.returning:
            member.mark_heard()
            if lost := self.turns.accept(member, message):
                return self.hub.expel(lost, "peers", "others do not hear from it", now)
            if (other := self.hub.members.named(message.lost)) is None:
                return self._move_on(now)
            # Whether its connection stands shows before the next turn, which the next tick begins.
            return [Send(other.sender, Beat(self.hub.epoch, other.merged))]
        if self.hub.started and isinstance(message, Join | Resume):
            if why_not := self._why_not_late(message):
                return turn_away(sender, message.name, "started", why_not)
            effects = self._take_back(sender, message, now)
        return effects + super().handle(sender, message, now, go_on) + self._move_on(now)

    def _take_back(self, sender: bytes, message: Join | Resume, now: float) -> list[Effect]:
        """What comes before the answer to one that comes, or comes back, after the start."""
        known = self.hub.members.in_session(message.session)
        if known is not None and known.may_be_at(sender):
            self.turns.renew()
            if isinstance(message, Join) and known.trains and known.applied < self.hub.round:
                # It never heard that it had begun, and the base that it has is not the newest.
                return self.hub.remove(known, "gone", "it joins anew", now)
        away = self.hub.members.away.get(message.name) if isinstance(message, Resume) else None
        if away is not None:  # it sends again what it gave to rounds that do not count yet
            self.hub.rounds.open_rounds.withdraw(away.name)
            away.forget_unmerged()
            self.turns.renew()
        return []

    def _why_not_late(self, message: Join | Resume) -> str:
        if isinstance(message, Resume):
            away = self.hub.members.away.get(message.name)
            if away is None or max(away.merged, away.first_round) >= self.hub.round:
                return ""
            return "rounds went on without it, and it lacks their means: join anew"
        if self.hub.rounds.merger.outer is not None:
            return (
                f"{self.hub.terms.strategy.spelled}: what the outer rule remembers is only in the "
                f"members of the {self.topology}: take a strategy without one (fedavg, dga), or "
                "a star"
            )
        if message.address == CLIENT:
            return f"a {self.topology} takes in nobody that others cannot connect to: let it listen"
        return ""

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        training = [member for member in self.hub.members if member.trains and not member.returning]
        if not self._is_counting or any(map(_is_heard, training)):
            self._alone_since = None
        elif training:  # the hub's own link may be down: the first that is back waits for the rest
            self._alone_since = now if self._alone_since is None else self._alone_since
            for member in training if now - self._alone_since < self.hub.policy.alone_s else ():
                member.mark_unreachable(now)
        effects = super().tick(now, go_on)
        if self.turns.why_not:
            for member in [*self.hub.members]:
                effects += self.hub.expel(member, "peers", self.turns.why_not, now)
        return effects + self._move_on(now)

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        """Members have the means of all rounds in the journal, and what they gave to the
        next ones: those run again, in turns with higher numbers."""
        super().restore(state, now, go_on, records)
        self.turns.start(self.hub.epoch)

    def _become_reducer_of(self, span: tuple[int, int], closing: ClosingRule | None = None) -> None:
        super()._become_reducer_of(span, closing if self.is_star else NeverWithout())
        self.turns, self._has_base = self._fresh_turns(), False
        if not self.is_star:
            self.hub.membership.is_ready = lambda: self._has_base and not self.hub.started

    # -- before the start ----------------------------------------------------------------------

    def _held_back(self, effects: list[Effect], now: float) -> list[Effect]:
        if self._is_counting and not self.hub.started:
            lost = self._lost(self.places.reach.names, effects)
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
        if self.hub.started:
            return self.hub.close_rounds(now)
        if self._has_base or not self.places.is_settled or not self._all_are_here:
            return []
        uploader = self.hub.membership.first_base.uploader
        weights = {m.name: 1.0 if m is uploader else NO_WEIGHT for m in self.hub.members}
        effects, self._has_base = self.turns.advance(0, weights, is_base=True)
        return effects + self.hub.start_if_ready(now)

    @property
    def _all_are_here(self) -> bool:
        whole = self.hub.membership.first_base.is_whole(self.hub.membership.model)
        return whole and self.hub.members.places >= self.hub.policy.members

    # -- rounds --------------------------------------------------------------------------------

    def find_due(self, now: float, go_on: FindDue) -> FoundDue:
        """A round that is due closes once all members have its mean. What members that have gone
        gave to it is dropped: nobody has that."""
        if self.is_star:
            return go_on()
        effects, may_go_on = self._hand_base_on()
        if not may_go_on:
            return effects, None
        said, due = go_on()
        entry = self.hub.rounds.open_rounds.get(self.hub.round) if due is None else due.entry
        if entry is None or (due is None and not self._lacks_only_lost()):
            return effects + said, None
        weights = {member.name: NO_WEIGHT for member in self.hub.members if member.trains}
        for contribution in entry.in_order:
            if contribution.member in weights:
                weights[contribution.member] = contribution.weight
            else:
                self.hub.rounds.open_rounds.withdraw(contribution.member)
        told, agreed = self.turns.advance(self.hub.round, weights)
        return effects + said + told, due if agreed else None

    def _lacks_only_lost(self) -> bool:
        """Whether the round waits for nobody but members whose connection is lost."""
        waited_for = [member for member in self.hub.members if member.is_waited_for(self.hub.round)]
        return not any(map(_is_heard, waited_for))

    def _hand_base_on(self) -> tuple[list[Effect], bool]:
        """Between two rounds: let a member give the base to the first that has come since the
        start. Returns whether the next round may be averaged."""
        came = next((m for m in self.hub.members if m.state == "waiting" and _is_heard(m)), None)
        if came is None or self.turns.is_averaging:
            return [], True
        can = self.turns.can
        training = [member for member in self.hub.members if member.trains]
        able = [m for m in training if _is_heard(m) and can(m.name, came.name)]
        if not able and not all(map(_is_heard, training)):
            return [], True
        if not able:
            reason = "no member can connect to it, or it to none" if training else BASE_GONE
            told = refusal(came.sender, "peers", reason)
            return [told, *self.hub.membership.remove(came, "refused", f"peers: {reason}")], True
        self.hub.rounds.open_rounds.withdraw(came.name)  # an earlier member's of that name
        weights = {able[0].name: 1.0, came.name: NO_WEIGHT}
        effects, agreed = self.turns.advance(self.hub.round, weights, is_base=True)
        return effects + (self.hub.membership.admit(came) if agreed else []), agreed


def _is_heard(member: MemberRecord) -> bool:
    return member.unreachable_since is None and not member.returning
