"""The hub's protocol: a message, a lost connection or a tick of the clock in, effects out.

Pure: no socket, no clock, no thread. `handle`, `unreachable`, `garbled`, `unreadable` and `tick`
take the time as an argument and return what has to be done, in order, as a list of effects. A
driver (`serve`, the simulator, a test) carries them out. `Hub` decides what a message is for:
`membership` (who is in) or `rounds` (contributions). What follows from a part of a contribution:

===================  ==========================================================================
`Rounds.accept`      the hub
===================  ==========================================================================
partial, duplicate   does nothing
complete             closes rounds, if one may be due
gap                  tells the member to say where it is; the 17th time in a row, expels it
fault                expels the member
===================  ==========================================================================

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edgetrain.codecs import Codec
from edgetrain.exchange.hub.admission import WhyNot
from edgetrain.exchange.hub.contributions import Spoilt
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.exchange.hub.effects import Effect, Event, Note, Save, Send, Write, refusal
from edgetrain.exchange.hub.members import AWAY, MemberRecord, Members
from edgetrain.exchange.hub.membership import Membership, turn_away
from edgetrain.exchange.hub.merger import Merger
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Record, Restarted, State
from edgetrain.exchange.hub.rounds import FoundDue, Rounds
from edgetrain.exchange.hub.steering import Steering
from edgetrain.exchange.hub.telemetry import observe_sign
from edgetrain.exchange.hub.terms import Policy, Terms, check_same_job
from edgetrain.exchange.messages import (
    Agree,
    Base,
    Beat,
    Contribute,
    Figure,
    Fixed,
    Join,
    Leave,
    Message,
    Resume,
    Telemetry,
)
from edgetrain.exchange.transport import owner_of
from edgetrain.strategies.closing import ClosingRule
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.ranges import Stretch
from edgetrain.vectors.vector import Vector

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Aggregator
    from edgetrain.strategies.lbfgs import Lbfgs
    from edgetrain.strategies.outer_rules import OuterRule

MOST_GAPS = 16
"""Gaps in a row in what a member sends. More are no accident."""

NOBODY = "no member is at its site: rounds do not wait for it until one is back"

ASTRAY = "something was lost on the way: say where you are"

ENTERS = Join, Resume
"""With these a peer becomes a member, or is one again."""

GoOn = Callable[[], list[Effect]]
FindDue = Callable[[], FoundDue]
Records = Iterable[Record]
Restore = Callable[[Records], None]
IsLost = Callable[[bytes], bool]


def nobody(peer: bytes) -> bool:
    return False


class HubPart:
    """What a hub may have beside members and rounds: a hub above it, a replica, ranges that move.

    It stands around what the hub does, at these points: `go_on` is what the hub does by itself, and
    what has the name of a method of Hub is around that. As they stand here nothing changes.
    """

    hub: Hub
    oldest_reply = 0
    """Replies to rounds before this one are no member's, whatever the journal has."""

    def attach(self, hub: Hub) -> Hub:
        """Become the part of this hub, at which nothing has happened; returns it."""
        self.hub, hub.part = hub, self
        return hub

    @property
    def holds(self) -> bool:
        """Whether the hub goes on once all members have left."""
        return False

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        return go_on()

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        return go_on()

    def obey(self, order: Order, now: float, go_on: GoOn) -> list[Effect]:
        return go_on()

    def hear(self, now: float) -> list[Effect]:
        """What has come another way than over the hub's transport. Called after each poll, until
        there is nothing more."""
        return []

    def find_due(self, now: float, go_on: FindDue) -> FoundDue:
        """See Rounds. `now` stands still while the job is paused."""
        return go_on()

    def close(self, effects: list[Effect], now: float) -> list[Effect]:
        """A round has closed with these effects. Returns what is to be done."""
        return effects

    def lose(self, effects: list[Effect], is_lost: IsLost = nobody) -> list[Effect]:
        """Peers that `is_lost` names are lost, or what one sent: with these effects. As `close`."""
        return effects

    def state(self, state: State) -> State:
        """The hub's state, with what the part has to know to go on."""
        return state

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        go_on(records)


class Hub:
    """One job's hub. Owns its parts, and so the base and all contributions until merged.

    `merge` merges contributions, `codec` decodes them, `outer` makes a step of that (None: that is
    it), `reply_codec` encodes it. Codecs that depend on the shapes of tensors are bound to the
    model that the first member describes. With `masks` contributions cannot be read, and only their
    sums are known. `closing` decides when a round closes; None: as `terms` and `policy` say.
    Its `part`, if one is attached, stands around all that it does.
    """

    def __init__(
        self,
        terms: Terms,
        policy: Policy,
        merge: SliceRule | RoundRule,
        codec: Codec,
        reply_codec: Codec,
        masks: Aggregator | None = None,
        closing: ClosingRule | None = None,
        outer: OuterRule | Lbfgs | None = None,
    ) -> None:
        self.part = HubPart()
        self.tail: int | None = None
        """The first round from which on the journal has every reply. The driver sets it."""
        self._make_merger = partial(
            Merger, merge, codec, reply_codec, masked=masks is not None, outer=outer
        )
        self._masks, self._closing = masks, closing
        self._begin(terms, policy, closing or terms.closing_rule(policy))

    def _begin(self, terms: Terms, policy: Policy, closing: ClosingRule) -> None:
        self.terms = terms
        self.members = Members(AWAY * policy.members)
        """Only to be looked at, like `rounds`, `membership` and `steering`."""
        delay = AgreedDelay(terms.local_steps, terms.delay, terms.steps, terms.strategy.ranges)
        merger, masks = self._make_merger(terms), self._masks
        self.rounds = Rounds(self.members, merger, delay, closing, masks, policy.deadline_s)
        self.membership = Membership(terms, policy, self.members, self.rounds)
        self.steering = Steering(self.members, self.rounds, self.membership, lambda: self.state())
        self._first: list[Effect] = []
        """Effects before all others, because the hub was restored."""

    def become(self, stretch: Stretch, closing: ClosingRule | None = None) -> None:
        """Be made anew, as the hub of another stretch, without members; no `closing`: as ever."""
        terms, policy = replace(self.terms, stretch=stretch), self.policy
        self._begin(terms, policy, closing or self._closing or terms.closing_rule(policy))

    # -- looking ------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """How patient the hub is. May be replaced; `closing` stays as it is."""
        return self.membership.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.membership.policy = policy

    @property
    def base(self) -> Vector | None:
        """The parameters that all replies so far lead to, [elements]; None if the hub keeps none.
        Only to be looked at, and valid until the next message."""
        return self.rounds.base

    @property
    def started(self) -> bool:
        return self.rounds.started

    @property
    def round(self) -> int:
        """The oldest open round, which is also the number of rounds merged."""
        return self.rounds.round

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    @property
    def finished(self) -> bool:
        """Whether all members have left, or too few are left and have not come back in time."""
        return (self.membership.finished and not self.part.holds) or self.steering.is_over

    @property
    def present(self) -> list[str]:
        return self.members.names

    @property
    def needed(self) -> int:
        """The oldest round whose reply a member may still ask the journal for."""
        known = [*self.members, *self.members.away]
        return min((m.applied for m in known if m.drawn is None), default=self.round)

    def checksum(self, applied: int, default: int = 0) -> int:
        """Checksum of the base after `applied` replies; `default`: the hub does not know it."""
        return self.rounds.checksums.get(applied, default)

    # -- what a driver calls ------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """One message; `sender` is how the transport knows its connection."""
        return self.part.handle(sender, message, now, partial(self.take_in, sender, message, now))

    def take_in(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """`handle` without the part."""
        first, self._first = self._first, []
        if isinstance(message, ENTERS):
            if self.steering.course == "stopped":
                return first + self.steering.send_home(sender, message)
            return first + self._handle_stranger(sender, message, now)
        if (member := self.members.get(sender)) is None:
            unknown = refusal(sender, "unknown", "the hub does not know this member: join again")
            return [*first, unknown]
        return first + self._handle_member(member, message, now)

    def _handle_stranger(self, sender: bytes, message: Join | Resume, now: float) -> list[Effect]:
        membership = self.membership
        event: Event = "refused"
        why_not: WhyNot
        if membership.unrequited.is_enough(sender):
            # It may not even read what it is sent: it gets no more over this connection.
            event, why_not = "gone", ("again", membership.unrequited.reason)
            member = self.members.get(sender)
        elif isinstance(message, Join):
            return membership.join(sender, message) + self.start_if_ready(now)
        else:
            tail = None if self.tail is None else max(self.tail, self.part.oldest_reply)
            member, why_not = membership.find_returning(sender, message, tail)
            if member is not None and why_not is None:
                resumed = membership.resume(member, sender, message, tail)
                return resumed + self.close_rounds(now)
        assert why_not is not None
        if member is None or not member.is_in:
            return turn_away(sender, message.name, *why_not)
        removed = self.remove(member, event, ": ".join(why_not), now)
        return [refusal(sender, *why_not), *removed]

    def _handle_member(self, member: MemberRecord, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Leave):
            member.mark_heard()
            return self.remove(member, "left", message.reason, now)
        if member.returning:
            # Meant for the hub that died, and perhaps only the rest of it.
            return [Send(member.sender, Beat(self.epoch))]
        if member.standing == "astray":
            return [refusal(member.sender, "unknown", ASTRAY)]
        member.mark_heard()
        if isinstance(message, Contribute):  # by far the most
            accepted = self.rounds.accept(member, message, self.steering.time(now))
            if accepted.outcome == "gap":
                return self.handle_gap(member, accepted.reason, now)
            effects: list[Effect] = []
            for fault in accepted.faults:
                if fault.member.is_in:
                    effects += self.expel(fault.member, fault.code, fault.reason, now)
            if accepted.outcome == "complete":
                self.membership.unrequited.forget_sender(member.sender)
                effects += accepted.remarks
                if accepted.may_be_due:
                    effects += self.close_rounds(now)
            return effects
        match message:
            case Beat() if member.note_end(message.merged):
                return _nobody_at(member) + self.close_rounds(now)
            case Beat() | Telemetry() | Figure() | Agree():
                return observe_sign(member, message, self.policy.status_s, now)
            case Base() | Fixed():
                problem, then = self.membership.accept_base(member, message), self.start_if_ready
            case _ if (masks := self.rounds.masks) is not None and masks.takes(message):
                problem = masks.accept_message(member.name, message)
                then = self.close_rounds
            case _:
                name = type(message).__name__
                return self.expel(member, "order", f"{name} is for members", now)
        return then(now) if problem is None else self.expel(member, *problem, now)

    def unreachable(self, sender: bytes, now: float) -> list[Effect]:
        """The transport could not deliver to this peer: its connection is lost, for now."""
        effects = _note_unreachable(self, sender, now)
        return self.part.lose(effects, lambda peer: peer == sender)

    def garbled(self, sender: bytes, now: float) -> list[Effect]:
        """Bytes from this peer were not a valid message: damaged on the way, like what follows."""
        if (member := self.members.get(sender)) is None or member.returning or not self.started:
            return []
        return self.part.lose(self.handle_gap(member, "what it sends is no message", now))

    def revoke_all_but(self, keys: Container[bytes], now: float) -> list[Effect]:
        """Expel all members whose key is not one of these, also those that could come back."""
        first, self._first = self._first, []
        effects = first + self.membership.revoke_all_but(keys) + self.close_rounds(now)
        return self.part.lose(effects, lambda peer: bool(key := owner_of(peer)) and key not in keys)

    def unreadable(self, sender: bytes, now: float) -> list[Effect]:
        """The journal could not send this peer what `Replay` asked for."""
        self.tail = None
        if (member := self.members.get(sender)) is None:
            return []
        reason = "the replies it missed cannot be read any more"
        return self.part.lose(self.expel(member, "session", reason, now))

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: beats, missing members, deadlines. Call it a few times per beat."""
        return self.part.tick(now, partial(self._tick, now))

    def _tick(self, now: float) -> list[Effect]:
        effects, self._first, at = self._first, [], self.steering.time(now)
        for member, patience_s in self.membership.find_given_up(at):
            if member.is_in:  # one before it may have taken it along
                effects += self.remove(member, "gone", f"unreachable for {patience_s:g} s", now)
        effects += self.start_if_ready(now) + self.close_rounds(now)
        effects += self.rounds.end_if_short(at, self.policy.rejoin_s, self.policy.empty_after_s)
        self.membership.check_desertion(at)
        return effects + self.membership.beats(now)

    def obey(self, order: Order, now: float) -> list[Effect]:
        """Do what people order, or refuse it: see `steering`. Each order is answered."""
        obey = partial(self.steering.obey, order, now)
        return self.part.obey(order, now, lambda: obey() + self.close_rounds(now))

    # -- contributions and rounds -------------------------------------------------------------

    def start_if_ready(self, now: float) -> list[Effect]:
        """Begin to train, once the base and all members, or enough of them, are here."""
        if self.started or not self.membership.may_start(now):
            return []
        effects = self.membership.admit_all()
        effects.insert(0, Save(self.state()))
        if not self.terms.strategy.hub_keeps_base:
            self.rounds.merger.forget_base()
        self.rounds.start(self.epoch)
        return effects + (self.close_rounds(now) if self.rounds.masks else [])

    def handle_gap(self, member: MemberRecord, reason: str, now: float) -> list[Effect]:
        """Tell a member whose messages were lost to come back; expel it if that does not help."""
        if member.gaps >= MOST_GAPS:
            return self.expel(member, "order", reason, now)
        member.mark_astray()
        return [refusal(member.sender, "unknown", ASTRAY), Note("late", member.name, reason)]

    def close_rounds(self, now: float) -> list[Effect]:
        """Close the oldest open rounds as long as they are due. A spoilt contribution is dropped,
        and its sender expelled; then the round is checked again, because it may lack a quorum."""
        effects, at = list[Effect](), self.steering.time(now)
        while self.started and not self.steering.stands:
            said, due = self.part.find_due(at, partial(self.rounds.find_due, at))
            effects += said
            if due is None:
                break
            try:
                closed = self.rounds.close(due, at)
            except Spoilt as spoilt:
                member = self.rounds.drop_contribution(spoilt.contribution)
                effects += _expelled(self.membership, member, str(spoilt))
            else:
                closed += self.membership.give_up_behind()
                effects += self.part.close(closed, now)
        arrivals = self.rounds.arrivals
        return effects + (arrivals.say_last(self.round, self.epoch) if arrivals else [])

    def expel(self, member: MemberRecord, code: str, reason: str, now: float) -> list[Effect]:
        """Refuse a member that broke a rule. What it gave to open rounds so far still counts."""
        removed = self.remove(member, "refused", f"{code}: {reason}", now)
        return [refusal(member.sender, code, reason), *removed]

    def remove(self, member: MemberRecord, event: Event, reason: str, now: float) -> list[Effect]:
        """See Membership. A round may be due without it."""
        return self.membership.remove(member, event, reason) + self.close_rounds(now)

    # -- what survives a restart --------------------------------------------------------------

    def state(self) -> State:
        """All that the hub has to know to go on, for the journal. Contributions to open rounds are
        not in it: members keep those until they are answered. The vectors are the hub's own."""
        return self.part.state(_state_of(self))

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """Become, before anything else happens, the hub that wrote this: the same bits.

        Members keep their places and time to come back: see `Policy`. Raises ConfigError if the
        journal is another job's, Diverged if it contradicts itself.
        """
        self.part.restore(state, now, partial(self.go_on_from, state, now), records)
        self._first = [
            Write(Restarted(self.epoch)),
            Note("started", "hub", f"resumed after {self.round} rounds"),
        ]

    def go_on_from(self, state: State, now: float, records: Iterable[Record] = ()) -> None:
        """`restore` without the part, and as if nothing had been lost."""
        check_same_job(state.agreed, self.agreed())
        self.rounds.restore(state)
        self.membership.restore(state, self.steering.followed(state, records, now), now)
        self.rounds.start(self.epoch)

    def agreed(self) -> str:
        """What its journal, and all hubs that go on by it, have to agree on."""
        codec, reply_codec = self.rounds.merger.codecs
        return self.terms.agreed(codec.name, reply_codec.name, self.rounds.masks is not None)


def _note_unreachable(hub: Hub, sender: bytes, now: float) -> list[Effect]:
    hub.membership.unrequited.forget_sender(sender)
    member = hub.members.get(sender)
    if member is None or member.unreachable_since is not None:
        return []
    member.mark_unreachable(hub.steering.time(now))
    return [Note("late", member.name, "its connection is gone")]


def _state_of(hub: Hub) -> State:
    rounds, model, merger = hub.rounds, hub.membership.model, hub.rounds.merger
    seats, away = (tuple(m.seat() for m in each) for each in (hub.members, hub.members.away))
    return State(
        hub.agreed(), model.digest, model.description, model.elements, hub.epoch, hub.round,
        rounds.delay.delay, seats, away, tuple(rounds.checksums.items()), hub.base, merger.unsent(),
        merger.outer_state(), *rounds.delay.to_keep(), hub.membership.fixed.payloads,
        course=hub.steering.course,
    )  # fmt: skip


def _expelled(membership: Membership, member: MemberRecord, reason: str) -> list[Effect]:
    if not member.is_in:  # its connection may be another member's by now
        return [Note("refused", member.name, f"payload: {reason}")]
    removed = membership.remove(member, "refused", f"payload: {reason}")
    return [refusal(member.sender, "payload", reason), *removed]


def _nobody_at(member: MemberRecord) -> list[Effect]:
    """What people are told when a gateway says that it contributes no more."""
    return [Note("late", member.name, NOBODY)] if member.behind else []
