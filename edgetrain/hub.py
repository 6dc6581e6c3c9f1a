"""The hub's protocol: who is in, when a round closes, what is sent to whom.

Pure: no socket and no clock. `handle`, `unreachable` and `tick` take the time as an argument and
return what has to happen, in order, as a list of effects; a driver (ZeroMQ, simulator, test)
carries them out. Torch is not needed to run a hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgetrain import layout as layouts
from edgetrain.agreement import Agreement
from edgetrain.checksum import Vector
from edgetrain.codecs import Codec
from edgetrain.contributions import Contribution, Spoilt
from edgetrain.effects import Closed, Effect, Event, Note, Replay, Save, Send, Write, refusal
from edgetrain.errors import BadMessage, ConfigError, Diverged
from edgetrain.merge import RoundRule, SliceRule
from edgetrain.merger import Merged, Merger
from edgetrain.messages import (
    PROTOCOL,
    Advertise,
    Base,
    Beat,
    Contribute,
    Join,
    Leave,
    Masking,
    Message,
    Reply,
    Resume,
    Reveal,
    Shares,
    Start,
    Welcome,
)
from edgetrain.pace import Pace
from edgetrain.parts import base_parts
from edgetrain.records import (
    Departed,
    Entered,
    Record,
    Restarted,
    Round,
    State,
)
from edgetrain.roster import Peer, Roster
from edgetrain.rounds import OpenRound, OpenRounds
from edgetrain.secure.rounds import MaskedRounds, Situation
from edgetrain.terms import Policy, Terms
from edgetrain.upload import Upload

if TYPE_CHECKING:
    from edgetrain.secure.hub import Aggregator, Outgoing, Sum

BEHIND_BYTES = 1 << 28
"""Replies that may wait for a member that does not take them."""

REMEMBERED = 4096
"""Checksums of base that are kept to compare members against."""

MOST_STRAYS = 16
"""Times in a row that what a member sends may have gaps. More is no accident."""

AWAY = 4
"""Members that were given up and may come back are remembered: so many times those that may be
in."""


class Hub:
    """One job's hub. Owns the base (displacement strategies) and all contributions until merged.

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
        self.round = 0
        """The oldest open round, which is also the number of rounds merged."""
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
            keeps_base=terms.contributes != "gradient", masked=masks is not None,
        )  # fmt: skip
        self._pace = Pace(terms.every, terms.delay)
        self._model = ""
        self._elements = 0
        self._peers = Roster()
        self._rounds = OpenRounds(self._peers, policy.quorum, policy.deadline_s)
        self._checksums = Agreement()
        self._layout = b""
        self._upload = Upload()
        self._away: dict[str, Peer] = {}
        self._deserted = False
        """The last one was lost, and may come back."""
        self._deserted_since: float | None = None
        self._last_beat = float("-inf")
        # Replies do not stand for beats: without them a connection is idle between two rounds for
        # longer than TCP leaves its window alone, and a 200 ms round takes twice as long.
        self._first: list[Effect] = []

    # -- what a driver calls ------------------------------------------------------------------

    @property
    def base(self) -> Vector | None:
        """The parameters that all replies so far lead to, [elements]; None where nobody needs them
        here. The hub's own: to be looked at, and gone with the next message."""
        return self._merger.base

    @property
    def delay(self) -> int:
        """In force now, in local steps."""
        return self._pace.delay

    @property
    def finished(self) -> bool:
        """Everyone who trained has left, or is gone and has not come back in time."""
        return self.started and not self._deserted and not self._peers

    @property
    def present(self) -> list[str]:
        """The names of the members that are in, sorted."""
        return self._peers.names

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """One message from a peer; `sender` is how the transport knows it."""
        first, self._first = self._first, []
        return first + self._handle(sender, message, now)

    def _handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Join):
            return self._join(sender, message, now)
        if isinstance(message, Resume):
            return self._resume(sender, message, now)
        peer = self._peers.get(sender)
        if peer is None:
            return [refusal(sender, "unknown", "the hub does not know this member: join again")]
        if peer.returning and not isinstance(message, Leave):
            # Meant for the hub that died, and perhaps only the rest of it.
            return [Send(sender, Beat(self.epoch))]
        if peer.astray and not isinstance(message, Leave):
            return [refusal(sender, "unknown", _ASTRAY)]
        effects = self._heard(peer)
        match message:
            case Base():
                effects += self._take_base(peer, message, now)
            case Contribute():
                effects += self._take_part(peer, message, now)
            case Leave():
                effects += self._leave(peer, message.reason, now)
            case Beat():
                pass
            case Advertise() | Shares() | Reveal() if self._masks is not None:
                effects += self._take_masking(self._masks, peer, message, now)
            case _:
                effects += self._expel(
                    peer, "order", f"{type(message).__name__} is for members", now
                )
        return effects

    def unreachable(self, sender: bytes, now: float) -> list[Effect]:
        """The transport could not deliver to this peer: its connection is gone, for now."""
        peer = self._peers.get(sender)
        if peer is None or peer.unreachable_since is not None:
            return []
        peer.unreachable_since = now
        return [Note("late", peer.name, "its connection is gone")]

    def garbled(self, sender: bytes, now: float) -> list[Effect]:
        """What came from this peer is no message: it was damaged on the way, and the rest with
        it."""
        peer = self._peers.get(sender)
        if peer is None or not peer.present or peer.returning or not self.started:
            return []
        return self._lost(peer, "what it sends is no message", now)

    def tick(self, now: float) -> list[Effect]:
        """To be called a few times per beat: beats, members that stay away, deadlines."""
        effects, self._first = self._first, []
        for peer in list(self._peers):
            since = peer.unreachable_since
            patience_s = self.policy.return_s if peer.returning else self.policy.gone_s
            if since is not None and now - since >= patience_s:
                effects += self._remove(peer, "gone", f"unreachable for {patience_s:g} s", now)
        effects += self._close_rounds(now)
        self._mind_desertion(now)
        due = now - self._last_beat >= self.policy.beat_s
        if due:
            self._last_beat = now
        told = [peer for peer in self._peers if due or peer.returning]
        beats = {merged: Beat(self.epoch, merged) for merged in {peer.merged for peer in told}}
        # Equal ones after each other, for they are packed once.
        told.sort(key=lambda peer: peer.merged)
        return [*effects, *(Send(peer.sender, beats[peer.merged]) for peer in told)]

    def _mind_desertion(self, now: float) -> None:
        """When nobody can be reached it is the hub's own link, as likely as not."""
        if not self._deserted or self._peers:
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
            self._model,
            self._layout,
            self._elements,
            self.epoch,
            self.round,
            self.delay,
            tuple(peer.seat() for peer in self._peers),
            tuple(peer.seat() for peer in self._away.values()),
            tuple(self._checksums.items()),
            self.base,
            self._merger.unsent(),
        )

    @property
    def needed(self) -> int:
        """The oldest round whose reply a member may still ask the journal for."""
        peers = [*self._peers, *self._away.values()]
        return min((peer.applied for peer in peers), default=self.round)

    def restore(self, state: State, records: Iterable[Record], now: float) -> None:
        """Become, before anything else happens, the hub that wrote this: the same bits.

        Members keep their places and have `policy.return_s` to come back. Raises ConfigError where
        it is another job's, Diverged where the journal contradicts itself.
        """
        self._check_agreed(state)
        self._model, self._layout = state.model, state.layout
        self._elements = state.elements
        self._merger.restore(state)
        self.round, self._pace.delay, self.epoch = state.round, state.delay, state.epoch
        self._checksums = Agreement(dict(state.checksums))
        self._away = {seat.name: Peer.of(seat) for seat in state.away}
        seats = {seat.name: Peer.of(seat) for seat in state.seats}
        for record in records:
            self._relive(record, seats)
        for peer in seats.values():
            self._peers.add(peer)
            peer.unreachable_since = now
        self.epoch += 1
        self.started = True
        if self._masks is not None:
            self._masks.settle(self._elements, self.epoch)
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

    def _relive(self, record: Record, seats: dict[str, Peer]) -> None:
        match record:
            case Round() if record.round >= self.round:
                self._relive_round(record, {**self._away, **seats})
            case Entered():
                peer = Peer.of(record.seat)
                seats[peer.name] = peer
                self._away.pop(peer.name, None)
            case Departed():
                gone = seats.pop(record.name, None)
                if gone is not None and not record.final:
                    self._remember(gone)
            case Restarted():
                self.epoch = record.epoch

    def _relive_round(self, record: Round, peers: dict[str, Peer]) -> None:
        for counted in record.counted:
            if (peer := peers.get(counted.member)) is not None:
                peer.merged = counted.meant_for + 1
                peer.next_round = max(peer.next_round, peer.merged)
        checksum = self._merger.relive(record)
        if checksum != record.checksum:
            raise Diverged(
                f"after round {record.round} of the journal the base has checksum {checksum:016x}, "
                f"its record says {record.checksum:016x}"
            )
        if record.before:
            self._checksums.know(record.round, record.before)
        self._settle_round(record.round, checksum)
        self._pace.delay = record.delay

    def _settle_round(self, round: int, checksum: int) -> None:
        self.round = round + 1
        if checksum:
            self._checksums.know(self.round, checksum)
        self._checksums.forget(self.round - REMEMBERED)

    # -- joining ------------------------------------------------------------------------------

    def _join(self, sender: bytes, join: Join, now: float) -> list[Effect]:
        mine = self._peers.in_session(join.session)
        if mine is not None and mine.merged == 0 and join.protocol == PROTOCOL:
            return self._join_again(mine, sender, join, now)
        why_not = self._why_not(sender, join)
        if why_not is not None:
            return self._turned_away(sender, join, *why_not)
        effects: list[Effect] = []
        old = self._peers.named(join.name)
        if old is not None:
            effects += self._forget(old, "gone", "started anew")
        if self._masks is not None:
            self._masks.forget(join.name)
        if not self._elements:
            problem = self._take_model(join)
            if problem is not None:
                return [*effects, *self._turned_away(sender, join, "layout", problem)]
        name = join.name or self._peers.free_name()
        weight = join.weight if self.terms.weighted else 1.0
        index = self._peers.free_index()
        peer = Peer(name, sender, index, weight, join.checksum, join.session)
        self._peers.add(peer)
        if self._upload.uploader is None and not self.started:
            self._upload.expect(peer)
        effects.append(Send(sender, self._welcome(peer)))
        effects.append(Note("joined", name, f"{len(self._peers)} of {self.policy.members}"))
        if self.started:
            return effects + self._admit(peer)
        return effects + self._start_if_ready(now)

    def _join_again(self, peer: Peer, sender: bytes, join: Join, now: float) -> list[Effect]:
        """It was let in, and has not heard so: a connection or the hub was lost meanwhile."""
        if (other := self._other_at(sender, peer)) is not None:
            return self._turned_away(sender, join, *other)
        if self.started and self.base is None:
            return [refusal(sender, "started", "the parameters to start from are gone: start anew")]
        self._move(peer, sender)
        peer.checksum = join.checksum
        if peer is self._upload.uploader:
            self._upload.forget()
        effects: list[Effect] = [Send(sender, self._welcome(peer))]
        return effects + (self._admit(peer) if self.started else self._start_if_ready(now))

    def _other_at(self, sender: bytes, peer: Peer) -> tuple[str, str] | None:
        """Why a member cannot go on over this connection: it is another one's, who is there."""
        there = self._peers.get(sender)
        if there is None or there is peer:
            return None
        return "name", f"this connection is that of '{there.name}'"

    def _move(self, peer: Peer, sender: bytes) -> None:
        """The member has another connection; what it had begun to send it sends again."""
        if self._peers.get(peer.sender) is peer:
            self._peers.remove(peer)
        peer.sender, peer.incoming, peer.unreachable_since = sender, [], None
        peer.returning = peer.astray = False
        self._peers.add(peer)

    def _turned_away(self, sender: bytes, join: Join, code: str, reason: str) -> list[Effect]:
        return [
            refusal(sender, code, reason),
            Note("refused", join.name or "?", f"{code}: {reason}"),
        ]

    def _take_model(self, join: Join) -> str | None:
        """The job's model is this member's: bind the codecs to it. What is wrong with it, if
        anything is; then nothing has changed."""
        description = join.payload
        try:
            layout = layouts.read(description, join.elements) if len(description) else ()
            told = layouts.digest(description) if layout else join.model
            if told != join.model:
                said = join.model[:12]
                return f"the tensors it tells have the digest {told[:12]}, it says {said}"
            self._merger.bind(layout, join.elements)
        except (BadMessage, ConfigError) as error:
            return str(error)
        self._model, self._elements = join.model, join.elements
        self._layout = bytes(description)
        return None

    def _why_not(self, sender: bytes, join: Join) -> tuple[str, str] | None:
        """The first rule that keeps this member out, with both values."""
        if join.protocol != PROTOCOL:
            return "protocol", f"the hub speaks version {PROTOCOL}, the member {join.protocol}"
        if self.terms.job and join.job and join.job != self.terms.job:
            return "job", (
                f"the hub runs job {self.terms.job[:12]}, the member {join.job[:12]}: "
                "task, data, seed, [train] and [strategy] must be equal"
            )
        if self._model and (join.model, join.elements) != (self._model, self._elements):
            return "model", (
                f"the job's model is {self._model[:12]} with {self._elements:,} parameters, "
                f"the member's {join.model[:12]} with {join.elements:,}"
            )
        if self.finished:
            return "ended", f"the job is over after {self.round} rounds"
        if self.started and self.terms.contributes == "gradient":
            return "started", (
                f"{self.terms.strategy} is at round {self.round}, and the optimizer's state is "
                "only in the members: use a displacement strategy (dga, fedavg) to join late"
            )
        namesake = self._peers.named(join.name)
        there = self._peers.get(sender)
        if there is None and namesake is not None and namesake.unreachable_since is None:
            there = namesake
        if there is not None:
            return "name", f"a member named '{there.name}' is there already"
        others = len(self._peers) - (namesake is not None)
        if others >= self.policy.members:
            return "full", f"all {self.policy.members} places are taken"
        return None

    def _welcome(self, peer: Peer) -> Welcome:
        terms = self.terms
        return Welcome(
            name=peer.name,
            index=peer.index,
            members=self.policy.members,
            strategy=terms.strategy,
            every=terms.every,
            delay=-1 if terms.delay is None else terms.delay,
            codec=self._merger.codec.name,
            reply_codec=self._merger.reply_codec.name,
            beat_s=self.policy.beat_s,
            upload=peer is self._upload.uploader and not self.started,
            epoch=self.epoch,
            threshold=self._masks.agreement.threshold if self._masks else 0,
            span=self._masks.agreement.span if self._masks else 1.0,
        )

    def _take_base(self, peer: Peer, message: Base, now: float) -> list[Effect]:
        if peer is not self._upload.uploader or self.started:
            return self._expel(peer, "order", f"base part {message.part} was not asked for", now)
        problem = self._upload.take(message, self._elements)
        if problem is not None:
            return self._expel(peer, *problem, now)
        return self._start_if_ready(now)

    def _start_if_ready(self, now: float) -> list[Effect]:
        if len(self._peers) < self.policy.members or not self._upload.is_whole(self._elements):
            return []
        self._checksums.know(0, self._merger.begin(self._upload.vector(self._elements)))
        self._upload.forget()
        effects: list[Effect] = [Note("started", "hub", f"{self.policy.members} members")]
        for peer in self._peers:
            effects += self._admit(peer)
        self.started = True
        effects.insert(0, Save(self.state()))
        if self.terms.contributes == "gradient":
            self._merger.forget_base()
        if self._masks is not None:
            self._masks.settle(self._elements, self.epoch)
            effects += self._close_masked(self._masks, now)
        return effects

    def _admit(self, peer: Peer) -> list[Effect]:
        """Send a waiting member the base it lacks, and let it train from the next round on."""
        assert self.base is not None
        if peer.state == "waiting" or peer.first_round < self.round:
            peer.first_round = peer.next_round = self._next_for(peer)
        peer.state = "training"
        peer.applied = self.round
        checksum = self._checksums[self.round]
        keep = peer.checksum == checksum
        effects: list[Effect] = []
        if self.started:
            effects.append(Write(Entered(peer.seat())))
        if not keep:
            effects += self._send_base(peer)
        start = Start(self.round, peer.first_round, self.delay, checksum, keep)
        return [*effects, Send(peer.sender, start)]

    def _next_for(self, peer: Peer) -> int:
        """The round from which on a member that is not in step takes part: no round that others
        have given to waits for it, and no name gives to a round twice."""
        ahead = 0
        if self.started:  # before that nobody has given to anything
            ahead = max((p.next_round for p in self._peers), default=0)
        if self.started and self._masks is not None:
            ahead = max(ahead, self._masks.next_first)
        away = self._away.pop(peer.name, peer)
        return max(self.round, ahead, away.next_round)

    def _send_base(self, peer: Peer) -> list[Effect]:
        assert self.base is not None
        snapshot = self.base if self.round == 0 else self.base.copy()
        parts = list(base_parts(self._elements))
        return [
            Send(peer.sender, Base(i, len(parts), snapshot[here].data.cast("B")))
            for i, here in enumerate(parts)
        ]

    # -- coming back --------------------------------------------------------------------------

    def _resume(self, sender: bytes, message: Resume, now: float) -> list[Effect]:
        """A member that trained before goes on where it was, or from the base as it is now."""
        peer = self._peers.in_session(message.session) or self._away.get(message.name)
        why_not = self._why_not_back(peer, message)
        if why_not is None and peer is not None:
            why_not = self._other_at(sender, peer)
        if why_not is not None or peer is None:
            code, reason = why_not or ("session", "no such session")
            effects: list[Effect] = [refusal(sender, code, reason)]
            if peer is not None and peer.present:
                return effects + self._remove(peer, "refused", f"{code}: {reason}", now)
            return [*effects, Note("refused", message.name or "?", f"{code}: {reason}")]
        self._away.pop(peer.name, None)
        if peer.returning:  # what it gave besides died with the hub before
            peer.next_round = peer.merged
        self._move(peer, sender)
        peer.state, peer.resumed = "training", True
        peer.next_round = max(peer.next_round, message.oldest)
        begin = message.submitted
        keep = not message.lacks_base and self._replies_from(message.applied)
        if self.terms.contributes != "gradient" and begin < max(self.round, peer.next_round):
            begin = peer.first_round = self._next_for(peer)
        peer.applied = message.applied if keep else self.round
        effects = [Write(Entered(peer.seat())), Send(sender, self._welcome(peer))]
        if not keep:
            effects += self._send_base(peer)
        start = Start(
            peer.applied, begin, self.delay, self._checksums.get(peer.applied), keep,
            peer.next_round, message.attempt,
        )  # fmt: skip
        effects.append(Send(sender, start))
        if peer.applied < self.round:
            effects.append(Replay(sender, peer.applied, self.round))
        if self._masks is not None:
            effects += self._to_members(self._masks.again(peer.name))
        missed = self.round - message.applied
        effects.append(Note("back", peer.name, f"it missed {missed} replies" if missed else ""))
        return effects + self._close_rounds(now)

    def _replies_from(self, applied: int) -> bool:
        """Whether the replies after so many can still be sent."""
        return applied == self.round or (self.tail is not None and self.tail <= applied)

    def _why_not_back(self, peer: Peer | None, message: Resume) -> tuple[str, str] | None:
        """The first rule that keeps a member from going on where it was."""
        if message.protocol != PROTOCOL:
            return "protocol", f"the hub speaks version {PROTOCOL}, the member {message.protocol}"
        if self.finished:
            return "ended", f"the job is over after {self.round} rounds"
        if not self.started or peer is None or peer.session != message.session:
            return "session", f"the hub does not know the session of '{message.name}' (any more)"
        if (message.model, message.elements) != (self._model, self._elements):
            return "model", (
                f"the job's model is {self._model[:12]} with {self._elements:,} parameters, "
                f"the member's {message.model[:12]} with {message.elements:,}"
            )
        if not peer.present and len(self._peers) >= self.policy.members:
            return "full", f"all {self.policy.members} places are taken"
        if message.applied > self.round:
            return "ahead", (
                f"the member has applied {message.applied} replies, the hub's journal ends after "
                f"{self.round}"
            )
        first, most = max(message.oldest, message.submitted), self._slack() + 1
        if first - max(self.round, peer.first_round) > most:
            return "order", f"round {first} is more than {most} ahead of {self.round}"
        known = self._checksums.get(message.applied)
        if known and message.checksum and known != message.checksum:
            return "diverged", (
                f"after {message.applied} replies the base has checksum {known:016x}, "
                f"the member's {message.checksum:016x}"
            )
        if self.base is None and (message.lacks_base or not self._replies_from(message.applied)):
            return "started", (
                f"{self.terms.strategy} is at round {self.round}, the replies after "
                f"{message.applied} are gone, and the optimizer's state is only in the members"
            )
        return None

    def unreadable(self, sender: bytes, now: float) -> list[Effect]:
        """The journal could not send this peer what `Replay` asked for."""
        self.tail = None
        peer = self._peers.get(sender)
        if peer is None:
            return []
        return self._expel(peer, "session", "the replies it missed cannot be read any more", now)

    # -- rounds -------------------------------------------------------------------------------

    def _take_part(self, peer: Peer, message: Contribute, now: float) -> list[Effect]:
        if peer.resumed and message.round < peer.next_round:
            return []  # it is here already, and counts once
        if peer.next_round < message.round == peer.first_round:  # it was told to skip to it
            peer.next_round = message.round
        if self._masks is not None and self._masks.skips(peer, message.round, self.round):
            peer.next_round = message.round
        gap = self._gap(peer, message)
        if gap is not None:
            return self._lost(peer, gap, now)
        problem = self._what_is_wrong(peer, message)
        if problem is not None:
            return self._expel(peer, *problem, now)
        outvoted = self._hear_checksum(peer, message, now)
        if self._peers.get(peer.sender) is not peer:
            return outvoted
        return outvoted + self._take_whole(peer, message, now)

    def _take_whole(self, peer: Peer, message: Contribute, now: float) -> list[Effect]:
        """A part that is as it should be; with the last one the contribution is there."""
        peer.applied = message.applied
        peer.incoming.append(message.payload)
        if len(peer.incoming) < message.parts:
            if message.round == self.round and self._masks is None:
                self._merge_early(message.part)
            return []
        payloads, peer.incoming = tuple(peer.incoming), []
        contribution = Contribution(
            peer.name, peer.weight, message.wanted_delay, payloads if self._masks is None else ()
        )
        peer.next_round += 1
        peer.strays = 0
        effects: list[Effect] = []
        meant_for = message.round
        if self._is_dropped(meant_for):
            peer.merged = peer.next_round
            return [Note("late", peer.name, f"round {meant_for} had closed; its part is dropped")]
        if meant_for < self.round:
            effects.append(
                Note("late", peer.name, f"round {meant_for} had closed; counts in {self.round}")
            )
        if self._masks is not None:
            self._masks.add(peer.name, meant_for, payloads)
        open_round = max(meant_for, self.round)
        if not self._rounds.give(open_round, peer, meant_for, contribution, now):
            return effects
        return effects + self._close_rounds(now)

    def _is_dropped(self, round: int) -> bool:
        """Whether a contribution to this round has come too late for any."""
        if self._masks is not None:
            return self._masks.is_too_late(round, self.round)
        return round < self.round and not self._merger.keeps_late

    def _gap(self, peer: Peer, message: Contribute) -> str | None:
        """What shows that something this member sent before has not come."""
        if not self.started:
            return None
        if message.round != peer.next_round:
            return f"round {message.round} came when {peer.next_round} was due"
        if message.part != len(peer.incoming):
            return f"part {message.part} of a contribution came when {len(peer.incoming)} was due"
        return None

    def _lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """A connection that broke took messages along, and a new one carries what came after them.
        The member is to come back; who never gets on so is expelled."""
        peer.strays += 1
        if peer.strays > MOST_STRAYS:
            return self._expel(peer, "order", reason, now)
        peer.astray, peer.incoming = True, []
        return [refusal(peer.sender, "unknown", _ASTRAY), Note("late", peer.name, reason)]

    def _what_is_wrong(self, peer: Peer, message: Contribute) -> tuple[str, str] | None:
        parts = self._merger.parts
        if not self.started:
            return "order", f"round {message.round} came before the start"
        most = max(self._slack(), peer.first_round - self.round)  # it begins where it was told to
        if message.round - self.round > most:
            return "order", f"round {message.round} is more than {most} ahead of {self.round}"
        if message.applied > self.round:
            return "order", f"{message.applied} replies applied, {self.round} were sent"
        if message.parts != parts:
            return "order", f"{message.parts} parts came where a contribution has {parts}"
        elements, most = self._merger.expected(message.part)
        size = memoryview(message.payload).nbytes
        if self._masks is not None and message.round >= self.round:
            problem = self._masks.why_not(peer, message.round, size, most)
            if problem is not None:
                return problem
        if size > most:
            needs = f"{self._merger.codec.name} needs {most}"
            return "size", f"{size} bytes for {elements} elements, {needs}"
        return None

    def _hear_checksum(self, peer: Peer, message: Contribute, now: float) -> list[Effect]:
        """Compare the base that a member has with the others'; who has another is expelled, and
        what it gave to open rounds, made from that, does not count."""
        applied = message.applied
        if applied <= self.round - REMEMBERED:
            return []  # too long ago to compare, and to be remembered again
        wrong = self._checksums.hear(peer.name, applied, message.checksum, len(self._peers))
        effects: list[Effect] = []
        for name in wrong:
            other = self._peers.named(name)
            if other is None:
                continue
            if self._masks is None:
                self._rounds.take_back(name)
            theirs = f"{message.checksum:016x}" if other is peer else "another"
            reason = (
                f"after {applied} replies the base has checksum {self._checksums[applied]:016x}, "
                f"the member's {theirs}"
            )
            effects += self._expel(other, "diverged", reason, now)
        return effects

    def _close_rounds(self, now: float) -> list[Effect]:
        """Close the oldest open rounds as long as they are whole, or overdue with a quorum."""
        if self._masks is not None:
            return self._close_masked(self._masks, now)
        effects: list[Effect] = []
        while self.started and (due := self._rounds.due(self.round, now)) is not None:
            effects += self._close(*due, now)
        return effects

    def _close(
        self, entry: OpenRound, missing: tuple[str, ...], now: float, end: Sum | None = None
    ) -> list[Effect]:
        """Merge a round and answer it. `end`: what became of one whose contributions are masked."""
        try:
            merged = self._merger.close(entry.in_order, end)
        except Spoilt as spoilt:
            return self._leave_out(spoilt)
        self._rounds.done(self.round)
        effects = self._miss(missing)
        self._pace.measure(self.round, (c.wanted_delay for c in merged.counted))
        round, before = self.round, self._checksums.get(self.round)
        self._settle_round(round, merged.checksum)
        if self._masks is not None:
            self._masks.done(round)
        entry.settle()
        # A masked round that is given up has contributions of which none is counted.
        counted, names = (entry.counted(), entry.members) if merged.counted else ((), ())
        payloads = merged.payloads
        effects.append(
            Write(
                Round(
                    round,
                    counted,
                    self.delay,
                    before,
                    merged.checksum,
                    tuple(payloads),
                    merged.inputs,
                )
            )
        )
        effects += self._answer(round, merged)
        weight = sum(c.weight for c in merged.counted)
        open_s = now - entry.opened
        effects.append(Closed(round, names, missing, weight, open_s, self.delay, merged.cuts))
        return effects + self._give_up_behind(sum(memoryview(p).nbytes for p in payloads))

    def _miss(self, missing: tuple[str, ...]) -> list[Effect]:
        """The oldest open round closes without these."""
        effects: list[Effect] = []
        for peer in self._peers:
            if peer.name in missing and peer.state == "training":
                peer.state = "late"
                effects.append(
                    Note("late", peer.name, f"round {self.round} closed at its deadline without it")
                )
        return effects

    def _answer(self, round: int, merged: Merged) -> list[Effect]:
        """The reply to a round, to all who train: equal messages after each other, for each is
        packed once."""
        told = [peer for peer in self._peers if peer.state in ("training", "late")]
        settled = all(max(peer.merged, peer.first_round) > round for peer in told)
        members, parts = len(merged.counted), len(merged.payloads)
        replies = [
            Reply(round, part, parts, members, self.delay, merged.checksum, settled, payload)
            for part, payload in enumerate(merged.payloads)
        ]
        return [Send(peer.sender, reply) for reply in replies for peer in told]

    def _leave_out(self, spoilt: Spoilt) -> list[Effect]:
        """Drop a spoilt contribution and expel its sender; the round, which may now lack a quorum,
        stays open for the caller to look at again."""
        peer = self._rounds.leave_out(self.round, spoilt.contribution)
        if not peer.present:  # its connection may be another member's by now
            return [Note("refused", peer.name, f"payload: {spoilt}")]
        effects: list[Effect] = [refusal(peer.sender, "payload", str(spoilt))]
        return effects + self._forget(peer, "refused", f"payload: {spoilt}")

    def _merge_early(self, part: int) -> None:
        """Merge a part of the oldest open round once it is here from everyone, while the others are
        still on their way. A part that is never seen whole here is merged at the close.
        """
        if not self._merger.hears(part, len(self._peers)):
            return
        entry = self._rounds.get(self.round)
        chosen = []
        for peer in sorted(self._peers, key=lambda peer: peer.name):
            whole = entry and entry.contributions.get((peer.name, self.round))
            payloads = whole.payloads if whole else tuple(peer.incoming)
            if len(payloads) <= part or (whole is None and peer.next_round != self.round):
                return
            chosen.append(Contribution(peer.name, peer.weight, 0, payloads))
        self._merger.merge_early(part, chosen)

    def _slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind."""
        most = self._pace.slack
        return most if self._masks is None else most + self._masks.reach(self.round)

    def _give_up_behind(self, reply_bytes: int) -> list[Effect]:
        """Members that take no replies: nothing more is kept for them. They may come back."""
        most = max(self._slack(), BEHIND_BYTES // max(reply_bytes, 1))
        effects: list[Effect] = []
        for peer in list(self._peers):
            if peer.state in ("training", "late") and self.round - peer.applied > most:
                reason = f"it has not taken the replies of the last {most} rounds"
                effects += self._forget(peer, "gone", reason)
        return effects

    # -- masked contributions: what `secure.rounds` says is done ------------------------------

    def _situation(self) -> Situation:
        given = {
            round: (entry.opened, {name for name, _ in entry.contributions})
            for round, entry in self._rounds
        }
        return Situation(
            self.round, self._pace.in_flight, self._peers, given, self._rounds.expected
        )

    def _to_members(self, outgoing: Outgoing) -> list[Effect]:
        """Messages to members by name; those that are not there are sent it when they are back."""
        found = [(self._peers.named(name), said) for name, said in outgoing]
        return [Send(peer.sender, said) for peer, said in found if peer is not None]

    def _take_masking(
        self, masked: MaskedRounds, peer: Peer, message: Masking, now: float
    ) -> list[Effect]:
        try:
            masked.take(peer.name, message)
        except BadMessage as error:
            return self._expel(peer, "masks", str(error), now)
        return self._close_rounds(now)

    def _close_masked(self, masked: MaskedRounds, now: float) -> list[Effect]:
        """Answer rounds in their order, as their sums become known."""
        effects: list[Effect] = []
        while self.started:
            situation = self._situation()
            outgoing, remarks = masked.advance(situation, now)
            effects += self._to_members(outgoing)
            effects += [Note("late", "hub", remark) for remark in remarks]
            end = masked.end_of(self.round, now)
            if end is None:
                break
            if end.reason:
                effects.append(Note("late", "hub", f"round {self.round} is given up: {end.reason}"))
            missing = tuple(sorted(masked.lacking(situation, self.round)))
            entry = self._rounds.get(self.round) or OpenRound(now)
            effects += self._close(entry, missing, now, end)
        return effects

    # -- going --------------------------------------------------------------------------------

    def _heard(self, peer: Peer) -> list[Effect]:
        peer.unreachable_since = None
        if peer.state == "late":
            peer.state = "training"
        return []

    def _leave(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        return self._remove(peer, "left", reason, now)

    def _expel(self, peer: Peer, code: str, reason: str, now: float) -> list[Effect]:
        """Refuse a member that broke a rule; what it gave to open rounds so far still counts."""
        effects: list[Effect] = [refusal(peer.sender, code, reason)]
        return effects + self._remove(peer, "refused", f"{code}: {reason}", now)

    def _remove(self, peer: Peer, event: Event, reason: str, now: float) -> list[Effect]:
        return self._forget(peer, event, reason) + self._close_rounds(now)

    def _forget(self, peer: Peer, event: Event, reason: str) -> list[Effect]:
        peer.state = "left" if event == "left" else "gone"
        peer.incoming = []
        effects: list[Effect] = [Note(event, peer.name, reason)]
        self._peers.remove(peer)
        # One that has not come back after a restart has had its time.
        self._deserted = event == "gone" and not peer.returning and not self._peers
        if not self.started:
            return effects + self._replace_uploader(peer)
        if event == "gone":
            self._remember(peer)
        return [Write(Departed(peer.name, event != "gone")), *effects]

    def _remember(self, peer: Peer) -> None:
        """Of a member that may come back: its place in the rounds, and no payloads."""
        self._away.pop(peer.name, None)
        self._away[peer.name] = peer
        while len(self._away) > AWAY * self.policy.members:
            del self._away[next(iter(self._away))]

    def _replace_uploader(self, peer: Peer) -> list[Effect]:
        """The member whose parameters everyone was to start from is gone: ask the next one."""
        if peer is not self._upload.uploader:
            return []
        uploader = next(iter(self._peers), None)
        self._upload.expect(uploader)
        if uploader is None:
            self._model, self._elements = "", 0
            return []
        return [Send(uploader.sender, self._welcome(uploader))]


_ASTRAY = "something was lost on the way: say where you are"
