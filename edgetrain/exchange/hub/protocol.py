"""The hub's protocol: members come, take part, are lost, come back and go, and hear what is due.

Pure: no socket and no clock. `handle`, `unreachable` and `tick` take the time as an argument and
return what has to happen, in order, as a list of effects; a driver (ZeroMQ, simulator, test)
carries them out. Here is who is in and what becomes of whom. The rules of coming in are in
`admission`, contributions and rounds in `exchange`, vectors, codecs and merge rules behind that in
`merger`: none of them knows the hub. Torch is not needed to run one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgetrain.codecs import Codec
from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.hub.admission import Admission, Model
from edgetrain.exchange.hub.base_transfer import FirstBase, base_messages
from edgetrain.exchange.hub.checksums import BaseChecksums
from edgetrain.exchange.hub.contributions import Spoilt
from edgetrain.exchange.hub.delay import AgreedDelay
from edgetrain.exchange.hub.effects import Effect, Event, Note, Replay, Save, Send, Write, refusal
from edgetrain.exchange.hub.masked_rounds import MaskedRounds
from edgetrain.exchange.hub.members import AWAY, Away, MemberRecord, Members
from edgetrain.exchange.hub.merger import Merger
from edgetrain.exchange.hub.open_rounds import OpenRounds
from edgetrain.exchange.hub.records import Departed, Entered, Record, Restarted, State
from edgetrain.exchange.hub.replay import replay
from edgetrain.exchange.hub.rounds import Rounds
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.limits import Unrequited
from edgetrain.exchange.messages import (
    PROTOCOL,
    Advertise,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Masking,
    Message,
    Resume,
    Reveal,
    Shares,
    Start,
    Welcome,
)
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.vector import Vector

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Aggregator

MOST_STRAYS = 16
"""Times in a row that what a member sends may have gaps. More is no accident."""


class Hub:
    """One job's hub. Owns its parts, and through them the base (displacement strategies) and all
    contributions until merged.

    `merge` closes the slices, `codec` reads contributions, `reply_codec` writes replies. Codecs
    that look at tensors are bound to the layout that the first member tells. What a lossy reply
    leaves out is kept here, and goes into later ones. With `masks` contributions cannot be read,
    and only their sums are ever known.
    """

    def __init__(
        self,
        terms: Terms,
        policy: Policy,
        merge: SliceRule | RoundRule,
        codec: Codec,
        reply_codec: Codec,
        masks: Aggregator | None = None,
    ) -> None:
        self.terms = terms
        self.policy = policy
        self.started = False
        self.epoch = 0
        """How often it was restored; every beat says it."""
        self.tail: int | None = None
        """The first round from which on the journal has every reply; the driver keeps it."""
        self._masks: MaskedRounds | None = None
        if masks is not None:
            self._masks = MaskedRounds(masks, policy.quorum, policy.deadline_s)
        self._merger = Merger(
            merge, codec, reply_codec,
            keeps_base=terms.keeps_base, masked=masks is not None,
        )  # fmt: skip
        self._model = Model()
        self._first_base = FirstBase()
        self._members = Members()
        self._away = Away(AWAY * policy.members)
        self._checksums = BaseChecksums()
        self._delay = AgreedDelay(terms.every, terms.delay)
        self._open_rounds = OpenRounds(self._members, policy.quorum, policy.deadline_s)
        self._rounds = Rounds(
            self._members,
            self._checksums,
            self._merger,
            self._delay,
            self._open_rounds,
            self._masks,
        )
        self._unrequited = Unrequited()
        self._deserted = False
        """The last one was lost, and may come back."""
        self._deserted_since: float | None = None
        # Replies do not stand for beats: without them a connection is idle between two rounds for
        # longer than TCP leaves its window alone, and a 200 ms round takes twice as long.
        self._last_beat = float("-inf")
        self._first: list[Effect] = []
        """What comes before all else: it has been restored."""

    # -- what a driver calls ------------------------------------------------------------------

    @property
    def base(self) -> Vector | None:
        """The parameters that all replies so far lead to, [elements]; None where nobody needs them
        here. The hub's own: to be looked at, and gone with the next message."""
        return self._merger.base

    @property
    def round(self) -> int:
        """The oldest open round, which is also the number of rounds merged."""
        return self._rounds.round

    @property
    def delay(self) -> int:
        """In force now, in local steps."""
        return self._delay.delay

    @property
    def finished(self) -> bool:
        """Everyone who trained has left, or is gone and has not come back in time."""
        return self.started and not self._deserted and not self._members

    @property
    def present(self) -> list[str]:
        """The names of the members that are in, sorted."""
        return self._members.names

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """One message from a peer; `sender` is how the transport knows it."""
        first, self._first = self._first, []
        return first + self._handle(sender, message, now)

    def _handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Join | Resume) and self._unrequited.is_enough(sender):
            return self._refuse_again(sender, message.name, now)
        if isinstance(message, Join):
            return self._join(sender, message, now)
        if isinstance(message, Resume):
            return self._resume(sender, message, now)
        member = self._members.get(sender)
        if member is None:
            return [refusal(sender, "unknown", "the hub does not know this member: join again")]
        if member.returning and not isinstance(message, Leave):
            # Meant for the hub that died, and perhaps only the rest of it.
            return [Send(sender, Beat(self.epoch))]
        if member.astray and not isinstance(message, Leave):
            return [refusal(sender, "unknown", _ASTRAY)]
        member.unreachable_since = None
        if member.state == "late":
            member.state = "training"
        match message:
            case Base():
                return self._take_base(member, message, now)
            case Contribute():
                return self._take_part(member, message, now)
            case Leave():
                return self._remove(member, "left", message.reason, now)
            case Beat():
                return []
            case Advertise() | Shares() | Reveal() if self._masks is not None:
                return self._take_masking(self._masks, member, message, now)
        return self._expel(member, "order", f"{type(message).__name__} is for members", now)

    def unreachable(self, sender: bytes, now: float) -> list[Effect]:
        """The transport could not deliver to this member: its connection is gone, for now."""
        self._unrequited.forget_sender(sender)
        member = self._members.get(sender)
        if member is None or member.unreachable_since is not None:
            return []
        member.unreachable_since = now
        return [Note("late", member.name, "its connection is gone")]

    def garbled(self, sender: bytes, now: float) -> list[Effect]:
        """What came from this member is no message: it was damaged on the way, and the rest with
        it."""
        member = self._members.get(sender)
        if member is None or not member.present or member.returning or not self.started:
            return []
        return self._lost(member, "what it sends is no message", now)

    def tick(self, now: float) -> list[Effect]:
        """To be called a few times per beat: beats, members that stay away, deadlines."""
        effects, self._first = self._first, []
        for member in list(self._members):
            since = member.unreachable_since
            patience_s = self.policy.return_s if member.returning else self.policy.gone_s
            if since is not None and now - since >= patience_s:
                effects += self._remove(member, "gone", f"unreachable for {patience_s:g} s", now)
        effects += self._close_rounds(now)
        self._mind_desertion(now)
        due = now - self._last_beat >= self.policy.beat_s
        if due:
            self._last_beat = now
        told = [member for member in self._members if due or member.returning]
        beats = {merged: Beat(self.epoch, merged) for merged in {member.merged for member in told}}
        # Equal ones after each other, for they are packed once.
        told.sort(key=lambda member: member.merged)
        return [*effects, *(Send(member.sender, beats[member.merged]) for member in told)]

    def _mind_desertion(self, now: float) -> None:
        """When nobody can be reached it is the hub's own link, as likely as not."""
        if not self._deserted or self._members:
            self._deserted, self._deserted_since = False, None
        elif self._deserted_since is None:
            self._deserted_since = now
        elif now - self._deserted_since >= self.policy.return_s:
            self._deserted = False

    # -- what survives it ---------------------------------------------------------------------

    def state(self) -> State:
        """All it has to know to go on, but for contributions to open rounds: members keep those
        until they are answered. For the journal; the vectors in it are the hub's own."""
        return State(
            self._agreed(),
            self._model.digest,
            self._model.description,
            self._model.elements,
            self.epoch,
            self.round,
            self.delay,
            tuple(member.seat() for member in self._members),
            tuple(member.seat() for member in self._away),
            tuple(self._checksums.items()),
            self.base,
            self._merger.unsent(),
        )

    @property
    def needed(self) -> int:
        """The oldest round whose reply a member may still ask the journal for."""
        members = [*self._members, *self._away]
        return min((member.applied for member in members), default=self.round)

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """Become, before anything else happens, the hub that wrote this: the same bits.

        Members keep their places and have `policy.return_s` to come back. Raises ConfigError where
        it is another job's, Diverged where the journal contradicts itself.
        """
        self._check_agreed(state)
        self._model = Model(state.model, state.elements, state.layout)
        self._merger.restore(state)
        self._rounds.round, self._delay.delay = state.round, state.delay
        for applied, checksum in state.checksums:
            self._checksums.know(applied, checksum)
        for seat in state.away:
            self._away.remember(MemberRecord.of(seat))
        seats = {seat.name: MemberRecord.of(seat) for seat in state.seats}
        self.epoch = replay(records, state.epoch, seats, self._away, self._rounds)
        for member in seats.values():
            self._members.add(member)
            member.unreachable_since = now
        self.epoch += 1
        self.started = True
        if self._masks is not None:
            self._masks.settle(self._model.elements, self.epoch)
        self._first = [
            Write(Restarted(self.epoch)),
            Note("started", "hub", f"goes on after {self.round} rounds"),
        ]

    def _agreed(self) -> str:
        codec, reply_codec = self._merger.codecs
        return self.terms.agreed(codec.name, reply_codec.name, self._masks is not None)

    def _check_agreed(self, state: State) -> None:
        if state.agreed != self._agreed():
            raise ConfigError(
                f"the journal is of another job: {state.agreed}; this one is {self._agreed()}",
                "resume with the job file that lies beside the journal",
            )

    # -- joining ------------------------------------------------------------------------------

    def _join(self, sender: bytes, join: Join, now: float) -> list[Effect]:
        mine = self._members.in_session(join.session)
        again = mine is not None and mine.merged == 0 and mine.may_be_at(sender)
        if mine is not None and again and join.protocol == PROTOCOL:
            return self._join_again(mine, sender, join, now)
        why_not = self._admission().why_not(sender, join)
        if why_not is not None:
            return self._turned_away(sender, join.name, *why_not)
        effects: list[Effect] = []
        old = self._members.named(join.name)
        if old is not None:
            effects += self._forget(old, "gone", "started anew")
        if self._masks is not None:
            self._masks.forget(join.name)
        if not self._model.elements:
            problem = self._take_model(join)
            if problem is not None:
                return [*effects, *self._turned_away(sender, join.name, "layout", problem)]
        name = join.name or self._members.free_name()
        weight = join.weight if self.terms.weighted else 1.0
        index = self._members.free_index()
        member = MemberRecord(name, sender, index, weight, join.checksum, join.session)
        self._members.add(member)
        if self._first_base.uploader is None and not self.started:
            self._first_base.expect(member)
        effects.append(Send(sender, self._welcome(member)))
        effects.append(Note("joined", name, f"{len(self._members)} of {self.policy.members}"))
        if self.started:
            return effects + self._admit(member)
        return effects + self._start_if_ready(now)

    def _join_again(
        self, member: MemberRecord, sender: bytes, join: Join, now: float
    ) -> list[Effect]:
        """It was let in, and has not heard so: a connection or the hub was lost meanwhile."""
        if (other := self._admission().other_at(sender, member)) is not None:
            return self._turned_away(sender, join.name, *other)
        if self.started and self.base is None:
            return [refusal(sender, "started", "the parameters to start from are gone: start anew")]
        self._move(member, sender)
        member.checksum = join.checksum
        if member is self._first_base.uploader:
            self._first_base.forget()
        effects: list[Effect] = [Send(sender, self._welcome(member))]
        return effects + (self._admit(member) if self.started else self._start_if_ready(now))

    def _move(self, member: MemberRecord, sender: bytes) -> None:
        """The member has another connection; what it had begun to send it sends again."""
        if self._members.get(member.sender) is member:
            self._members.remove(member)
        member.sender, member.incoming, member.unreachable_since = sender, [], None
        member.returning = member.astray = False
        self._members.add(member)

    def _turned_away(self, sender: bytes, name: str, code: str, reason: str) -> list[Effect]:
        return [refusal(sender, code, reason), Note("refused", name or "?", f"{code}: {reason}")]

    def _take_model(self, join: Join) -> str | None:
        """The job's model is this member's: bind the codecs to it. What is wrong with it, if
        anything is; then nothing has changed."""
        model = Model(join.model, join.elements, bytes(join.payload))
        try:
            self._merger.bind(model.layout(), model.elements)
        except (BadMessage, ConfigError) as error:
            return str(error)
        self._model = model
        return None

    def _admission(self) -> Admission:
        """The rules of who may come in, as things are now."""
        return Admission(
            self.terms, self.policy, self._model, self._members, self._away, self._checksums,
            self.round, self.started, self.finished, self.base is not None, self.tail,
            self._rounds.slack,
        )  # fmt: skip

    def _welcome(self, member: MemberRecord) -> Welcome:
        terms = self.terms
        return Welcome(
            name=member.name,
            index=member.index,
            members=self.policy.members,
            strategy=terms.strategy,
            every=terms.every,
            delay=-1 if terms.delay is None else terms.delay,
            codec=self._merger.codec.name,
            reply_codec=self._merger.reply_codec.name,
            beat_s=self.policy.beat_s,
            upload=member is self._first_base.uploader and not self.started,
            epoch=self.epoch,
            threshold=self._masks.terms.threshold if self._masks else 0,
            span=self._masks.terms.span if self._masks else 1.0,
        )

    def _take_base(self, member: MemberRecord, message: Base, now: float) -> list[Effect]:
        if member is not self._first_base.uploader or self.started:
            return self._expel(member, "order", f"base part {message.part} was not asked for", now)
        problem = self._first_base.take(message, self._model.elements)
        if problem is not None:
            return self._expel(member, *problem, now)
        return self._start_if_ready(now)

    def _start_if_ready(self, now: float) -> list[Effect]:
        elements = self._model.elements
        if len(self._members) < self.policy.members or not self._first_base.is_whole(elements):
            return []
        self._checksums.know(0, self._merger.begin(self._first_base.vector(elements)))
        effects: list[Effect] = [Note("started", "hub", f"{self.policy.members} members")]
        for member in self._members:
            effects += self._admit(member)
        self.started = True
        self._first_base.forget()
        effects.insert(0, Save(self.state()))
        if not self.terms.keeps_base:
            self._merger.forget_base()
        if self._masks is not None:
            self._masks.settle(self._model.elements, self.epoch)
            effects += self._close_rounds(now)
        return effects

    def _admit(self, member: MemberRecord) -> list[Effect]:
        """Send a waiting member the base it lacks, and let it train from the next round on."""
        assert self.base is not None
        if member.state == "waiting" or member.first_round < self.round:
            member.first_round = member.next_round = self._next_for(member)
        member.state = "training"
        member.applied = self.round
        checksum = self._checksums[self.round]
        keep = member.checksum == checksum
        effects: list[Effect] = []
        if self.started:
            effects.append(Write(Entered(member.seat())))
        if not keep:
            self._unrequited.count_sent(member.sender)
            effects += self._send_base(member)
        start = Start(self.round, member.first_round, self.delay, checksum, keep)
        return [*effects, Send(member.sender, start)]

    def _next_for(self, member: MemberRecord) -> int:
        """The round from which on a member that is not in step takes part: no round that others
        have given to waits for it, and no name gives to a round twice."""
        ahead = 0
        if self.started:  # before that nobody has given to anything
            ahead = max((p.next_round for p in self._members), default=0)
        if self.started and self._masks is not None:
            ahead = max(ahead, self._masks.next_first)
        away = self._away.pop(member.name) or member
        return max(self.round, ahead, away.next_round)

    def _send_base(self, member: MemberRecord) -> list[Effect]:
        assert self.base is not None
        # What is sent must not change, and on a slow link that may take longer than a round.
        whole = base_messages(self.base.copy()) if self.started else self._first_base.messages()
        return [Send(member.sender, message) for message in whole]

    # -- coming back --------------------------------------------------------------------------

    def _resume(self, sender: bytes, message: Resume, now: float) -> list[Effect]:
        """A member that trained before goes on where it was, or from the base as it is now."""
        member = self._members.in_session(message.session) or self._away.get(message.name)
        if member is not None and not member.may_be_at(sender):
            member = None
        admission = self._admission()
        why_not = admission.why_not_back(sender, member, message)
        if why_not is not None or member is None:
            code, reason = why_not or ("session", "no such session")
            if member is None or not member.present:
                return self._turned_away(sender, message.name, code, reason)
            removed = self._remove(member, "refused", f"{code}: {reason}", now)
            return [refusal(sender, code, reason), *removed]
        self._away.pop(member.name)
        if member.returning:  # what it gave besides died with the hub before
            member.next_round = member.merged
        self._move(member, sender)
        member.state, member.resumed = "training", True
        member.next_round = max(member.next_round, message.oldest)
        begin = message.submitted
        keep = not message.lacks_base and admission.replies_from(message.applied)
        if self.terms.allows_late_join and begin < max(self.round, member.next_round):
            begin = member.first_round = self._next_for(member)
        member.applied = message.applied if keep else self.round
        effects: list[Effect] = [Write(Entered(member.seat())), Send(sender, self._welcome(member))]
        if not keep:
            effects += self._send_base(member)
        start = Start(
            member.applied, begin, self.delay, self._checksums.get(member.applied), keep,
            member.next_round, message.attempt,
        )  # fmt: skip
        effects.append(Send(sender, start))
        again = self._rounds.again(member.name)
        if member.applied < self.round:
            again.insert(0, Replay(sender, member.applied, self.round))
        if again or not keep:
            self._unrequited.count_sent(sender)
        effects += again
        missed = self.round - message.applied
        effects.append(Note("back", member.name, f"it missed {missed} replies" if missed else ""))
        return effects + self._close_rounds(now)

    def _refuse_again(self, sender: bytes, name: str, now: float) -> list[Effect]:
        """Whoever lets itself be sent bases and replies, and gives nothing, may not even read them:
        over this connection it gets no more. A member is given up, and may come back."""
        reason = (
            f"a base or replies were sent over this connection {self._unrequited.most} times, and "
            "nothing whole has come since: come back over another one"
        )
        member = self._members.get(sender)
        if member is None:
            return self._turned_away(sender, name, "again", reason)
        removed = self._remove(member, "gone", f"again: {reason}", now)
        return [refusal(sender, "again", reason), *removed]

    def unreadable(self, sender: bytes, now: float) -> list[Effect]:
        """The journal could not send this member what `Replay` asked for."""
        self.tail = None
        member = self._members.get(sender)
        if member is None:
            return []
        return self._expel(member, "session", "the replies it missed cannot be read any more", now)

    # -- rounds -------------------------------------------------------------------------------

    def _take_part(self, member: MemberRecord, message: Contribute, now: float) -> list[Effect]:
        rounds = self._rounds
        if not self.started:
            return self._expel(member, "order", f"round {message.round} came before the start", now)
        if rounds.has(member, message):
            return []
        gap = rounds.gap(member, message)
        if gap is not None:
            return self._lost(member, gap, now)
        problem = rounds.why_not(member, message)
        if problem is not None:
            return self._expel(member, *problem, now)
        outvoted = self._hear_checksum(member, message, now)
        if self._members.get(member.sender) is not member:
            return outvoted
        if message.part + 1 < message.parts:
            rounds.take_part(member, message)
            return outvoted
        member.strays = 0
        self._unrequited.forget_sender(member.sender)
        effects, may_close = rounds.take_last(member, message, now)
        return outvoted + effects + (self._close_rounds(now) if may_close else [])

    def _lost(self, member: MemberRecord, reason: str, now: float) -> list[Effect]:
        """A connection that broke took messages along, and a new one carries what came after them.
        The member is to come back; who never gets on so is expelled."""
        member.strays += 1
        if member.strays > MOST_STRAYS:
            return self._expel(member, "order", reason, now)
        member.astray, member.incoming = True, []
        return [refusal(member.sender, "unknown", _ASTRAY), Note("late", member.name, reason)]

    def _hear_checksum(self, member: MemberRecord, message: Contribute, now: float) -> list[Effect]:
        """Compare the base that a member has with the others'; who has another is expelled, and
        what it gave to open rounds, made from that, does not count."""
        applied = message.applied
        effects: list[Effect] = []
        for name in self._rounds.hear(member, message):
            other = self._members.named(name)
            if other is None:
                continue
            self._rounds.take_back(name)
            theirs = f"{message.checksum:016x}" if other is member else "another"
            reason = (
                f"after {applied} replies the base has checksum {self._checksums[applied]:016x}, "
                f"the member's {theirs}"
            )
            effects += self._expel(other, "diverged", reason, now)
        return effects

    def _close_rounds(self, now: float) -> list[Effect]:
        """Close the oldest open rounds as long as they are whole, or overdue with a quorum."""
        effects: list[Effect] = []
        while self.started:
            said, due = self._rounds.next(now)
            effects += said
            if due is None:
                break
            try:
                effects += self._rounds.close(due, now)
            except Spoilt as spoilt:
                effects += self._leave_out(spoilt)
            else:
                effects += self._give_up_behind()
        return effects

    def _leave_out(self, spoilt: Spoilt) -> list[Effect]:
        """Drop a spoilt contribution and expel its sender; the round, which may now lack a quorum,
        is to be looked at again."""
        member = self._rounds.leave_out(spoilt.contribution)
        if not member.present:  # its connection may be another member's by now
            return [Note("refused", member.name, f"payload: {spoilt}")]
        effects: list[Effect] = [refusal(member.sender, "payload", str(spoilt))]
        return effects + self._forget(member, "refused", f"payload: {spoilt}")

    def _give_up_behind(self) -> list[Effect]:
        """Members that take no replies: nothing more is kept for them. They may come back."""
        most, behind = self._rounds.behind()
        effects: list[Effect] = []
        for member in behind:
            reason = f"it has not taken the replies of the last {most} rounds"
            effects += self._forget(member, "gone", reason)
        return effects

    def _take_masking(
        self, masked: MaskedRounds, member: MemberRecord, message: Masking, now: float
    ) -> list[Effect]:
        try:
            masked.take(member.name, message)
        except BadMessage as error:
            return self._expel(member, "masks", str(error), now)
        return self._close_rounds(now)

    # -- going --------------------------------------------------------------------------------

    def _expel(self, member: MemberRecord, code: str, reason: str, now: float) -> list[Effect]:
        """Refuse a member that broke a rule; what it gave to open rounds so far still counts."""
        effects: list[Effect] = [refusal(member.sender, code, reason)]
        return effects + self._remove(member, "refused", f"{code}: {reason}", now)

    def _remove(self, member: MemberRecord, event: Event, reason: str, now: float) -> list[Effect]:
        return self._forget(member, event, reason) + self._close_rounds(now)

    def _forget(self, member: MemberRecord, event: Event, reason: str) -> list[Effect]:
        member.state = "left" if event == "left" else "gone"
        member.incoming = []
        effects: list[Effect] = [Note(event, member.name, reason)]
        self._members.remove(member)
        # One that has not come back after a restart has had its time.
        self._deserted = event == "gone" and not member.returning and not self._members
        if not self.started:
            return effects + self._replace_uploader(member)
        if event == "gone":
            self._away.remember(member)
        return [Write(Departed(member.name, event != "gone")), *effects]

    def _replace_uploader(self, member: MemberRecord) -> list[Effect]:
        """The member whose parameters everyone was to start from is gone: ask the next one."""
        if member is not self._first_base.uploader:
            return []
        uploader = next(iter(self._members), None)
        self._first_base.expect(uploader)
        if uploader is None:
            self._model = Model()
            return []
        return [Send(uploader.sender, self._welcome(uploader))]


_ASTRAY = "something was lost on the way: say where you are"
