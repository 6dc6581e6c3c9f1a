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

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from edgetrain.codecs import Codec
from edgetrain.exchange.hub.admission import WhyNot
from edgetrain.exchange.hub.arrival_rounds import say_last
from edgetrain.exchange.hub.contributions import Spoilt
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.exchange.hub.effects import Effect, Event, Note, Save, Send, Write, refusal
from edgetrain.exchange.hub.members import AWAY, MemberRecord, Members
from edgetrain.exchange.hub.membership import Membership, turn_away
from edgetrain.exchange.hub.merger import Merger
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.records import Record, Restarted, State
from edgetrain.exchange.hub.rounds import Due, Rounds
from edgetrain.exchange.hub.steering import Steering
from edgetrain.exchange.hub.telemetry import observe_sign
from edgetrain.exchange.hub.terms import Policy, Terms, check_same_job
from edgetrain.exchange.messages import (
    Advertise,
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
    Reveal,
    Shares,
    Telemetry,
)
from edgetrain.strategies.closing import ClosingRule
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.vector import Vector

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Aggregator
    from edgetrain.strategies.lbfgs import Lbfgs
    from edgetrain.strategies.outer_rules import OuterRule

MOST_GAPS = 16
"""Gaps in a row in what a member sends. More are no accident."""

NOBODY = "no member is at its site: rounds do not wait for it until one is back"

ASTRAY = "something was lost on the way: say where you are"


class Hub:
    """One job's hub. Owns its parts, and so the base and all contributions until merged.

    `merge` merges contributions, `codec` decodes them, `outer` makes a step of that (None: that is
    it), `reply_codec` encodes it. Codecs that depend on the shapes of tensors are bound to the
    model that the first member describes. With `masks` contributions cannot be read, and only their
    sums are known. `closing` decides when a round closes; None: as `terms` and `policy` say.
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
        self.terms = terms
        self.tail: int | None = None
        """The first round from which on the journal has every reply. The driver sets it."""
        self.members = Members(AWAY * policy.members)
        """Only to be looked at, like `rounds` and `membership`."""
        merger = Merger(merge, codec, reply_codec, terms, masked=masks is not None, outer=outer)
        closing = closing or terms.closing_rule(policy)
        delay = AgreedDelay(terms.every, terms.delay, terms.steps, terms.strategy.ranges)
        self.rounds = Rounds(self.members, merger, delay, closing, masks, policy.deadline_s)
        self.membership = Membership(terms, policy, self.members, self.rounds)
        self.steering = Steering(self.members, self.rounds, self.membership, lambda: self.state())
        """What people have told it. Only to be looked at."""
        self._first: list[Effect] = []
        """What comes before everything else, because the hub was restored."""

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
    def delay(self) -> int:
        return self.rounds.delay.delay

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    @property
    def finished(self) -> bool:
        """Whether all members have left, or too few are left and have not come back in time."""
        return self.membership.finished or self.steering.is_over

    @property
    def present(self) -> list[str]:
        return self.members.names

    @property
    def needed(self) -> int:
        """The oldest round whose reply a member may still ask the journal for."""
        known = [*self.members, *self.members.away]
        return min((member.applied for member in known), default=self.round)

    def checksum(self, applied: int, default: int = 0) -> int:
        """Of the base after `applied` replies; `default` if the hub does not know it."""
        return self.rounds.checksums.get(applied, default)

    # -- what a driver calls ------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """One message; `sender` is how the transport knows its connection."""
        first, self._first = self._first, []
        if isinstance(message, Join | Resume):
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
            return membership.join(sender, message) + self._start_if_ready(now)
        else:
            member, why_not = membership.find_returning(sender, message, self.tail)
            if member is not None and why_not is None:
                resumed = membership.resume(member, sender, message, self.tail)
                return resumed + self._close_rounds(now)
        assert why_not is not None
        if member is None or not member.is_in:
            return turn_away(sender, message.name, *why_not)
        removed = self._remove(member, event, ": ".join(why_not), now)
        return [refusal(sender, *why_not), *removed]

    def _handle_member(self, member: MemberRecord, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Leave):
            member.mark_heard()
            return self._remove(member, "left", message.reason, now)
        if member.returning:
            # Meant for the hub that died, and perhaps only the rest of it.
            return [Send(member.sender, Beat(self.epoch))]
        if member.standing == "astray":
            return [refusal(member.sender, "unknown", ASTRAY)]
        member.mark_heard()
        match message:
            case Beat() if member.note_end(message.merged):
                return _nobody_at(member) + self._close_rounds(now)
            case Beat() | Telemetry() | Figure() | Agree():
                return observe_sign(member, message, self.policy.status_s, now)
            case Contribute():
                return self._accept_part(member, message, now)
            case Base() | Fixed():
                problem, then = self.membership.accept_base(member, message), self._start_if_ready
            case Advertise() | Shares() | Reveal() if self.rounds.masks is not None:
                problem = self.rounds.masks.accept_message(member.name, message)
                then = self._close_rounds
            case _:
                name = type(message).__name__
                return self._expel(member, "order", f"{name} is for members", now)
        return then(now) if problem is None else self._expel(member, *problem, now)

    def unreachable(self, sender: bytes, now: float) -> list[Effect]:
        """The transport could not deliver to this peer: its connection is lost, for now."""
        self.membership.unrequited.forget_sender(sender)
        member = self.members.get(sender)
        if member is None or member.unreachable_since is not None:
            return []
        member.mark_unreachable(self.steering.time(now))
        return [Note("late", member.name, "its connection is gone")]

    def garbled(self, sender: bytes, now: float) -> list[Effect]:
        """Bytes from this peer were not a valid message: damaged on the way, like what follows."""
        if (member := self.members.get(sender)) is None or member.returning or not self.started:
            return []
        return self._handle_gap(member, "what it sends is no message", now)

    def revoke_all_but(self, keys: Container[bytes], now: float) -> list[Effect]:
        """Expel all members whose key is not one of these, also those that could come back."""
        first, self._first = self._first, []
        return first + self.membership.revoke_all_but(keys) + self._close_rounds(now)

    def unreadable(self, sender: bytes, now: float) -> list[Effect]:
        """The journal could not send this peer what `Replay` asked for."""
        self.tail = None
        if (member := self.members.get(sender)) is None:
            return []
        return self._expel(member, "session", "the replies it missed cannot be read any more", now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: beats, missing members, deadlines. Call it a few times per beat."""
        effects, self._first, at = self._first, [], self.steering.time(now)
        for member, patience_s in self.membership.find_given_up(at):
            if member.is_in:  # one before it may have taken it along
                effects += self._remove(member, "gone", f"unreachable for {patience_s:g} s", now)
        effects += self._start_if_ready(now) + self._close_rounds(now)
        effects += self.rounds.end_if_short(at, self.policy.return_s, self.policy.deserted_s)
        self.membership.check_desertion(at)
        return effects + self.membership.beats(now)

    def obey(self, order: Order, now: float) -> list[Effect]:
        """Do what people order, or refuse it: see `steering`. Each order is answered."""
        return self.steering.obey(order, now) + self._close_rounds(now)

    # -- contributions and rounds -------------------------------------------------------------

    def _start_if_ready(self, now: float) -> list[Effect]:
        """Begin to train, once the base and all members, or enough of them, are here."""
        if self.started or not self.membership.may_start(now):
            return []
        effects = self.membership.admit_all()
        effects.insert(0, Save(self.state()))
        if not self.terms.strategy.hub_keeps_base:
            self.rounds.merger.forget_base()
        self.rounds.start(self.epoch)
        return effects + (self._close_rounds(now) if self.rounds.masks else [])

    def _accept_part(self, member: MemberRecord, message: Contribute, now: float) -> list[Effect]:
        accepted = self.rounds.accept(member, message, self.steering.time(now))
        if accepted.outcome == "gap":
            return self._handle_gap(member, accepted.reason, now)
        effects: list[Effect] = []
        for fault in accepted.faults:
            if fault.member.is_in:
                effects += self._expel(fault.member, fault.code, fault.reason, now)
        if accepted.outcome == "complete":
            self.membership.unrequited.forget_sender(member.sender)
            effects += accepted.remarks
            if accepted.may_be_due:
                effects += self._close_rounds(now)
        return effects

    def _handle_gap(self, member: MemberRecord, reason: str, now: float) -> list[Effect]:
        """Tell a member whose messages were lost to come back; expel it if that does not help."""
        if member.gaps >= MOST_GAPS:
            return self._expel(member, "order", reason, now)
        member.mark_astray()
        return [refusal(member.sender, "unknown", ASTRAY), Note("late", member.name, reason)]

    def _close_rounds(self, now: float) -> list[Effect]:
        """Close the oldest open rounds as long as they are due. A spoilt contribution is dropped,
        and its sender expelled; then the round is checked again, because it may lack a quorum."""
        effects, now = list[Effect](), self.steering.time(now)
        while self.started and not self.steering.stands:
            said, due = self._find_due(now)
            effects += said
            if due is None:
                break
            try:
                effects += self.rounds.close(due, now)
            except Spoilt as spoilt:
                member = self.rounds.drop_contribution(spoilt.contribution)
                effects += _expelled(self.membership, member, str(spoilt))
            else:
                effects += self.membership.give_up_behind()
        return effects + say_last(self.rounds.arrivals, self.round, self.members, self.epoch)

    def _find_due(self, now: float) -> tuple[list[Effect], Due | None]:
        """See Rounds. A subclass may have more to say before a round closes."""
        return self.rounds.find_due(now)

    def _expel(self, member: MemberRecord, code: str, reason: str, now: float) -> list[Effect]:
        """Refuse a member that broke a rule. What it gave to open rounds so far still counts."""
        removed = self._remove(member, "refused", f"{code}: {reason}", now)
        return [refusal(member.sender, code, reason), *removed]

    def _remove(self, member: MemberRecord, event: Event, reason: str, now: float) -> list[Effect]:
        return self.membership.remove(member, event, reason) + self._close_rounds(now)

    # -- what survives a restart --------------------------------------------------------------

    def state(self) -> State:
        """All that the hub has to know to go on, for the journal. Contributions to open rounds are
        not in it: members keep those until they are answered. The vectors are the hub's own."""
        rounds, model = self.rounds, self.membership.model
        seats, away = (tuple(m.seat() for m in each) for each in (self.members, self.members.away))
        return State(
            self._agreed(), model.digest, model.description, model.elements, self.epoch,
            self.round, self.delay, seats, away, tuple(rounds.checksums.items()), self.base,
            rounds.merger.unsent(), rounds.merger.outer_state(), *rounds.delay.to_keep(),
            self.membership.fixed.payloads, course=self.steering.course,
        )  # fmt: skip

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """Become, before anything else happens, the hub that wrote this: the same bits.

        Members keep their places and time to come back: see `Policy`. Raises ConfigError if the
        journal is another job's, Diverged if it contradicts itself.
        """
        check_same_job(state.agreed, self._agreed())
        self.rounds.restore(state)
        self.membership.restore(state, self.steering.followed(state, records, now), now)
        self.rounds.start(self.epoch)
        self._first = [
            Write(Restarted(self.epoch)),
            Note("started", "hub", f"goes on after {self.round} rounds"),
        ]

    def _agreed(self) -> str:
        codec, reply_codec = self.rounds.merger.codecs
        return self.terms.agreed(codec.name, reply_codec.name, self.rounds.masks is not None)


def _expelled(membership: Membership, member: MemberRecord, reason: str) -> list[Effect]:
    if not member.is_in:  # its connection may be another member's by now
        return [Note("refused", member.name, f"payload: {reason}")]
    removed = membership.remove(member, "refused", f"payload: {reason}")
    return [refusal(member.sender, "payload", reason), *removed]


def _nobody_at(member: MemberRecord) -> list[Effect]:
    """What people are told when a gateway says that it contributes no more."""
    return [Note("late", member.name, NOBODY)] if member.behind else []
