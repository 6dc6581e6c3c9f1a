"""Members come, come back and go: what the hub says to them and writes down about it.

`admission` has the rules of who may, `members` the state of each member (with its tables), `rounds`
all about contributions. Here a decision becomes changed records and effects. No method closes a
round; after each that removes a member, or lets one resume, the caller checks whether one is due.

The last member that is lost leaves the job deserted, not finished: if every member is unreachable,
the hub's own link is probably down, and the job stays open for `Policy.empty_after_s`. A hub that
is restored waits that long for the first member: after a power cut of everything, devices take
minutes to boot. The others have `Policy.rejoin_s` from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.hub.admission import Admission, AgreedModel, WhyNot, most_places
from edgetrain.exchange.hub.base_transfer import FirstBase, FixedValues, base_messages
from edgetrain.exchange.hub.effects import Effect, Event, Note, Replay, Send, Write, refusal
from edgetrain.exchange.hub.evaluators import DONE, Evaluators
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.hub.records import Departed, Entered, Record, State
from edgetrain.exchange.hub.rounds import Rounds
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.limits import Unrequited
from edgetrain.exchange.messages import PROTOCOL, Base, Beat, Fixed, Join, Resume, Start, Welcome
from edgetrain.exchange.transport import owner_of

REVOKED = "key: its key has been revoked"
"""Why a member is removed whose key is not on the list any more."""


def turn_away(sender: bytes, name: str, code: str, reason: str) -> list[Effect]:
    """Refuse a peer that is not a member."""
    return [refusal(sender, code, reason), Note("refused", name or "?", f"{code}: {reason}")]


def _welcome(
    terms: Terms, policy: Policy, rounds: Rounds, member: MemberRecord, uploads: bool, epoch: int
) -> Welcome:
    merger, masks = rounds.merger, rounds.masks
    return Welcome(
        name=member.name,
        index=member.index,
        members=policy.members,
        strategy=terms.strategy.spelled,
        local_steps=terms.local_steps,
        delay=terms.delay.code,
        codec=merger.codec.name,
        reply_codec=merger.reply_codec.name,
        heartbeat_s=policy.heartbeat_s,
        upload=uploads,
        epoch=epoch,
        threshold=masks.terms.threshold if masks else 0,
        clip_range=masks.terms.clip_range if masks else 1.0,
        status_ms=round(1000 * policy.status_s),
        ranges=terms.stretch.count,
        first=terms.stretch.first,
        end=terms.stretch.end,
    )


class Starting:
    """Begin at once with `Policy.members` or, once `Policy.min_members` have been here for
    `Policy.start_after_s`, without the others, which join when they come."""

    def __init__(self) -> None:
        self._enough_since: float | None = None

    def is_due(self, policy: Policy, here: int, now: float) -> bool:
        """Whether to begin with this many members. Call it when one comes or goes, and with each
        tick: it notes since when enough are here."""
        if here < (policy.min_members or policy.members):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return here >= policy.members or now - self._enough_since >= policy.start_after_s


def begun(policy: Policy, here: int) -> Note:
    """The event: with this many members."""
    most = policy.members
    return Note("started", "hub", f"{'' if here >= most else f'{here} of '}{most} members")


class Membership:
    """The members of one job, from the first join to the last leave. Owns the model's description,
    the base that members upload and the fixed tensors that come with it; `members` and `rounds` are
    the hub's."""

    def __init__(self, terms: Terms, policy: Policy, members: Members, rounds: Rounds) -> None:
        self.policy = policy
        self.model = AgreedModel()
        self.epoch = 0
        """How often the hub was restored; every beat says it."""
        self.first_base = FirstBase()
        self.fixed = FixedValues()
        self.unrequited = Unrequited()
        """Bases and replies that were sent over connections that have given nothing since."""
        self.evaluators = Evaluators(members)
        self.is_ready: Callable[[], bool] = lambda: True
        self.draws = False
        """Whether each round has a sample of the members."""
        self.draw: Callable[[MemberRecord], bool] = lambda member: True
        """Asked for a member that could begin: whether it has a part in the open round."""
        self.are_to_come: Callable[[], bool] = lambda: False
        """Whether members are to come where none is here."""
        self._terms = terms
        self._members = members
        self._rounds = rounds
        self._starting = Starting()
        self.base_sent: Sequence[Base] = ()
        """The base as it is now, for several members that come at once; (): each has its copy."""
        self._deserted = False
        """The last member was lost, and may come back."""
        self._deserted_since: float | None = None
        self._alone_until = float("-inf")
        """When no member was here last, since the hub was restored."""
        # Replies do not stand for beats: without beats a connection is idle between two rounds for
        # so long that TCP shrinks its window, and a round of 200 ms takes twice as long.
        self._last_beat = float("-inf")

    # -- looking ------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all members have left, or too few are left and have not come back in time."""
        is_empty = not self._deserted and not self._members and not self.are_to_come()
        over = self._rounds.started and is_empty
        masks = self._rounds.masks
        return over or (masks is not None and masks.is_over)

    def may_start(self, now: float) -> bool:
        """Whether to begin now: enough members (see Starting) and the whole base are here."""
        is_due = self._starting.is_due(self.policy, self._members.places, now)
        ready = self.first_base.is_whole(self.model) and self.is_ready()
        return is_due and ready and not self._rounds.started

    def find_returning(
        self, sender: bytes, message: Resume, tail: int | None
    ) -> tuple[MemberRecord | None, WhyNot]:
        """The member that comes back with this message, and why it may not; see `Hub.tail`."""
        away = self._members.away.get(message.name)
        member = self._members.in_session(message.session) or away
        if member is not None and not member.may_be_at(sender):
            member = None
        return member, self._admission(tail).why_not_back(sender, member, message)

    def find_given_up(self, now: float) -> list[tuple[MemberRecord, float]]:
        """The members that have been unreachable for too long, and how long that is."""
        found = []
        alone = all(member.returning for member in self._members)
        for member in self._members:
            since, patience_s = member.unreachable_since, self.policy.lost_after_s
            if since is None:
                continue
            if member.returning and member.name != self.policy.stand_in:  # that ended with the hub
                patience_s = self.policy.alone_s if alone else self.policy.rejoin_s
                since = since if alone else max(since, self._alone_until)
            if now - since >= patience_s:
                found.append((member, patience_s))
        return found

    def _admission(self, tail: int | None = None) -> Admission:
        return Admission(
            self._terms, self.policy, self.model, self._members, self._rounds, self.finished, tail
        )

    def _next_round_for(self, member: MemberRecord) -> int:
        """The first round of a member that comes: none that others have contributed to."""
        rounds = self._rounds
        if rounds.arrivals is not None:
            return rounds.arrivals.first_number(member) if rounds.started else 0
        # Before the start nobody has contributed to anything.
        ahead = max((m.next_round for m in (self._members if rounds.started else ())), default=0)
        if rounds.started and rounds.masks is not None:
            # Behind the run's last round nobody contributes: it would wait for that in vain.
            end = rounds.delay.end_after(rounds.round)
            ahead = max(ahead, min(rounds.masks.aggregator.next_first, end))
        away = self._members.away.get(member.name)
        return max(rounds.oldest_number, ahead, (away or member).next_round)

    # -- joining ------------------------------------------------------------------------------

    def join(self, sender: bytes, join: Join) -> list[Effect]:
        """Let a newcomer in, or turn it away. After the start it trains at once."""
        known = self._members.in_session(join.session)
        again = known is not None and known.merged == 0 and known.may_be_at(sender)
        if known is not None and again and join.protocol == PROTOCOL:
            return _join_again(self, known, sender, join)
        admission = self._admission()
        why_not = admission.why_not(sender, join)
        if why_not is not None:
            return turn_away(sender, join.name, *why_not)
        effects: list[Effect] = []
        for old in admission.replaced_by(sender, join):
            effects += self.remove(old, "gone", "started anew")
        if self._rounds.masks is not None:
            self._rounds.masks.aggregator.drop_secrets(join.name)
        if not self.model.elements and (problem := _accept_model(self, join)) is not None:
            return [*effects, *turn_away(sender, join.name, "layout", problem)]
        return effects + self._add(sender, join)

    def _add(self, sender: bytes, join: Join) -> list[Effect]:
        name = join.name or self._members.free_name()
        weight = join.weight if self._terms.strategy.weighted else 1.0
        member = MemberRecord(
            name, sender, self._members.free_index(join.behind or 1), weight, join.checksum,
            join.session, fixed=join.fixed, address=join.address, behind=join.behind,
            merged_by_range=[*range(self._terms.strategy.ranges)], optimizer=join.optimizer,
        )  # fmt: skip
        self._members.add(member)
        self._rounds.delay.set_steps(join.steps)
        if self.first_base.uploader is None and not self._rounds.started:
            self.first_base.expect_from(member)
        most = most_places(self.policy, self._members)
        joined = Note("joined", name, f"{self._members.places} of {most}")
        return [Send(sender, self._welcome(member)), joined, *self._admit_late(member)]

    def _admit_late(self, member: MemberRecord) -> list[Effect]:
        """After the start, a member begins as soon as it has joined, if the hub `is_ready`."""
        may = self.is_ready() or member.trains
        return self.admit(member) if self._rounds.started and may else []

    def _welcome(self, member: MemberRecord) -> Welcome:
        uploads = member is self.first_base.uploader and not self._rounds.started
        found = _welcome(self._terms, self.policy, self._rounds, member, uploads, self.epoch)
        return replace(found, drawn=self.draws)

    # -- beginning to train -------------------------------------------------------------------

    def accept_base(self, member: MemberRecord, message: Base | Fixed) -> tuple[str, str] | None:
        """A part of the base that all start from; returns what is wrong with it: (code, reason)."""
        return self.first_base.accept_from(member, message, self.model, self._rounds.started)

    def admit_all(self) -> list[Effect]:
        """All members that are here begin, with the base that was uploaded."""
        self._rounds.set_base(self.first_base.vector(self.model.base_elements))
        self.fixed = self.first_base.fixed_values(self.model.base_elements)
        if self._members.places < self.policy.members:  # the others may be who is to evaluate
            self.evaluators.note_wanted()
        effects: list[Effect] = [begun(self.policy, self._members.places)]
        for member in self._members:
            effects += self.admit(member)
        self.first_base.drop_parts()
        return effects

    def admit(self, member: MemberRecord) -> list[Effect]:
        """Send a member what it lacks of the base, and let it train from the next round on."""
        rounds, first = self._rounds, None
        if not self.draw(member):
            return []
        if member.state == "waiting" or member.first_round < rounds.oldest_number:
            first = self._next_round_for(member) if member.drawn is None else rounds.round
            self._members.away.pop(member.name)
        member.start(first, applied=rounds.round)
        checksum = rounds.checksums[rounds.round]
        keep = member.checksum == checksum
        effects: list[Effect] = []
        if rounds.started:
            effects.append(Write(Entered(member.seat())))
        if lacking := self._send_lacking(member.sender, keep, member.fixed):
            self.unrequited.count_sent(member.sender)
            effects += lacking
        pace, first = rounds.delay, member.first_round
        start = Start(
            rounds.round, first, pace.first, checksum, keep, local_steps=pace.local_steps,
            steps=rounds.steps_before(first), fixed=self.fixed.digest,
        )  # fmt: skip
        return [*effects, Send(member.sender, _with_merged(rounds, start, member))]

    def _send_lacking(self, sender: bytes, keep: bool, fixed: str) -> list[Effect]:
        """Send the base unless the member may `keep` its own, and the fixed tensors unless its own
        have the right digest, which it says is `fixed`."""
        messages: Sequence[Base | Fixed] = self.fixed.messages_to(fixed)
        if not keep and not self._rounds.started:
            messages = [*self.first_base.messages(self.model), *messages]
        elif not keep:
            assert self._rounds.base is not None
            # What is sent must not change, and on a slow link that may take longer than a round.
            messages = [*(self.base_sent or base_messages(self._rounds.base.copy())), *messages]
        return [Send(sender, message) for message in messages]

    # -- coming back --------------------------------------------------------------------------

    def resume(
        self, member: MemberRecord, sender: bytes, message: Resume, tail: int | None
    ) -> list[Effect]:
        """A member that `find_returning` found goes on where it was, or from the base now."""
        rounds = self._rounds
        if member.returning:  # what else it gave is lost with the hub that had it
            member.forget_unmerged()
        self._members.move(member, sender)
        member.resume(message.oldest, message.address)
        rounds.delay.set_steps(message.steps)
        begin, skips = message.submitted, message.skips or message.submitted
        keep = not message.lacks_base and self._admission(tail).has_replies_from(message.applied)
        newest = max(rounds.oldest_number, member.next_round)
        if member.drawn is not None:  # it gets the base of its round, or goes on with another one
            keep = not self.draw(member) or message.applied == rounds.round
            begin = begin if keep else rounds.round
        elif self._terms.strategy.allows_late_join and begin < newest:
            begin = self._next_round_for(member)
        if begin > skips:
            member.begin_at(begin, skips)
        member.mark_applied(message.applied if keep else rounds.round)
        effects: list[Effect] = [Write(Entered(member.seat())), Send(sender, self._welcome(member))]
        lacking = self._send_lacking(sender, keep, message.fixed)
        effects += lacking
        start = Start(
            member.applied, begin, rounds.delay.delay, rounds.checksums.get(member.applied), keep,
            member.next_round, message.attempt, rounds.delay.local_steps,
            rounds.steps_before(begin), fixed=self.fixed.digest,
        )  # fmt: skip
        effects.append(Send(sender, _with_merged(rounds, start, member)))
        missed = rounds.messages_missed(member.name)
        if member.applied < rounds.round and member.drawn is None:
            missed.insert(0, Replay(sender, member.applied, rounds.round))
        if missed or lacking:
            self.unrequited.count_sent(sender)
        effects += missed
        count = rounds.round - message.applied
        effects.append(Note("back", member.name, f"it missed {count} replies" if count else ""))
        return effects

    # -- going --------------------------------------------------------------------------------

    def remove(self, member: MemberRecord, event: Event, reason: str) -> list[Effect]:
        """A member left ("left"), broke a rule ("refused") or is given up ("gone"). What it gave to
        open rounds counts. One that is given up may come back, once training has begun."""
        started, gone = self._rounds.started, event == "gone"
        member.depart(left=event == "left")
        effects: list[Effect] = [Note(event, member.name, reason)]
        self._members.remove(member, may_return=gone and started)
        self.evaluators.note_gone(member, event, reason)
        # One that has not come back after a restart has had its time. One that leaves one hub of
        # several early takes nothing from those that this hub alone has lost.
        early = reason != DONE and self._terms.stretch.is_part and bool(self._members.away)
        self._deserted = (early or (gone and not member.returning)) and not self._members
        if not started:
            return effects + self._replace_uploader(member)
        return [Write(Departed(member.name, final=not gone)), *effects, *self.evaluators.ask()]

    def revoke_all_but(self, keys: Container[bytes]) -> list[Effect]:
        """Remove for good all members whose key is not one of these, in or away. They are told
        nothing. Members that came without a key stay. If nobody is left, the job stays open for
        `Policy.empty_after_s`: the other members, or devices in place of these, may come."""
        effects: list[Effect] = []
        for member in [*self._members, *self._members.away]:
            key = owner_of(member.sender)
            if not key or key in keys:
                continue
            was_in = member.is_in
            effects += self.remove(member, "gone", REVOKED) if was_in else []
            if self._rounds.started:
                self._deserted = self._deserted or (was_in and not self._members)
                self._members.forget(member)
                effects.append(Write(Departed(member.name, final=True)))
        return effects

    def _replace_uploader(self, member: MemberRecord) -> list[Effect]:
        """If everyone was to start from this member's parameters, ask the next one for its own."""
        if member is not self.first_base.uploader:
            return []
        uploader = next(iter(self._members), None)
        self.first_base.expect_from(uploader)
        if uploader is None:
            self.model = AgreedModel()
            return []
        return [Send(uploader.sender, self._welcome(uploader))]

    def give_up_behind(self) -> list[Effect]:
        """Give up members that do not take their replies: no more is kept for them."""
        most, behind = self._rounds.find_behind()
        effects: list[Effect] = []
        for member in behind:
            reason = f"the member is more than {most} rounds behind"
            effects += self.remove(member, "gone", reason)
        return effects

    def beats(self, now: float) -> list[Effect]:
        """A beat to every member, if it is time; to those that are returning in any case, so that
        they learn at once that the hub was restored."""
        due = now - self._last_beat >= self.policy.heartbeat_s
        if due:
            self._last_beat = now
        # Equal beats follow each other, because each is packed once.
        told = sorted((m for m in self._members if due or m.returning), key=lambda m: m.merged)
        here = 0 if self._rounds.started else self._members.places
        arrivals = self._rounds.arrivals
        last = arrivals.last_reply(self._rounds.round) if arrivals else 0
        beats = {n: Beat(self.epoch, n, here, last) for n in {m.merged for m in told}}
        asked = self.evaluators.ask() if due else []
        return [*asked, *(Send(member.sender, beats[member.merged]) for member in told)]

    def check_desertion(self, now: float) -> None:
        """A deserted job ends once its members have not come back for `Policy.empty_after_s`."""
        if all(member.returning for member in self._members):
            self._alone_until = now
        if not self._deserted or self._members:
            self._deserted, self._deserted_since = False, None
        elif self._deserted_since is None:
            self._deserted_since = now
        elif now - self._deserted_since >= self.policy.alone_s:
            self._deserted = False

    # -- what survives a restart --------------------------------------------------------------

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """Go on with the members of a journal. They keep their places; the first has
        `Policy.empty_after_s` to come back, also where all had been lost, the others then have
        `Policy.rejoin_s`. Replays the rounds. Raises Diverged if the journal contradicts itself."""
        self.fixed = FixedValues.restored(b"".join(state.fixed))
        from edgetrain.exchange.hub.replay import replay  # of a hub that was there before

        told = state.model, state.elements, state.layout, self.fixed.size
        self.model = AgreedModel(*told, self._terms.stretch)
        away = self._members.away
        for seat in state.away:
            departed = MemberRecord.of_seat(seat)
            departed.depart(left=False)
            away.remember(departed)
        present = {seat.name: MemberRecord.of_seat(seat) for seat in state.seats}
        found = replay(records, state.epoch, present, away, self._rounds)
        self.epoch, self._deserted = found.epoch + 1, found.deserted
        for member in present.values():
            self._members.add(member)
            member.mark_unreachable(now)


def _join_again(
    membership: Membership, member: MemberRecord, sender: bytes, join: Join
) -> list[Effect]:
    """It was let in and does not know: a connection or the hub was lost meanwhile."""
    rounds, first = membership._rounds, membership.first_base
    if (other := membership._admission().other_at(sender, member)) is not None:
        return turn_away(sender, join.name, *other)
    if rounds.started and rounds.base is None:
        return [refusal(sender, "started", "the parameters to start from are gone: start anew")]
    membership._members.move(member, sender)
    rounds.delay.set_steps(join.steps)
    member.offer(join.checksum, join.fixed, join.address)
    if member is first.uploader and not rounds.started:
        first.expect_again()
    return [Send(sender, membership._welcome(member)), *membership._admit_late(member)]


def _with_merged(rounds: Rounds, start: Start, member: MemberRecord) -> Start:
    """What a member is told as it begins, with the contributions that are merged by then, where
    members are out of step: else rounds say it."""
    if rounds.arrivals is None:
        return start
    return replace(start, merged=member.merged, complete=rounds.arrivals.complete)


def _accept_model(membership: Membership, join: Join) -> str | None:
    """Make this member's model the job's. Returns what is wrong; then nothing has changed."""
    told, terms = (join.model, join.elements, bytes(join.payload)), membership._terms
    model = AgreedModel(*told, join.fixed_bytes, terms.stretch)
    try:
        membership._rounds.merger.bind_model(model.layout(), model.elements)
    except (BadMessage, ConfigError) as error:
        return str(error)
    membership.model = model
    return None
