"""A member's link to its hub: it joins, hands contributions over and waits for replies, and comes
back when the connection or the hub was lost.

The link combines three parts: the session decides what a message means, the outbox holds
contributions, the inbox holds replies. It speaks messages over a transport; it knows no model and
no strategy. The clock is passed in. One thread uses it; only `join` and `wait` wait.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgetrain import codecs, strategies
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.member.beginning import Beginning
from edgetrain.exchange.member.inbox import Inbox, joined_base
from edgetrain.exchange.member.outbox import Outbox, masker_of
from edgetrain.exchange.member.session import Ask, Back, Session, Silence
from edgetrain.exchange.messages import (
    Base,
    Beat,
    Contribute,
    Evaluate,
    Figure,
    Fixed,
    Leave,
    Map,
    Message,
    Refuse,
    Reply,
    Start,
    Telemetry,
    Welcome,
    pack,
    unpack,
)
from edgetrain.exchange.seam import CatchUp, Entry, Idle, Past, Request, RoundReply, Submission
from edgetrain.exchange.transport import MemberTransport, Traffic
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.ranges import WHOLE, Ranges, Stretch
from edgetrain.vectors.vector import Buffer, Layout, Vector

if TYPE_CHECKING:
    from edgetrain.codecs.lowrank import PowerSGD
    from edgetrain.exchange.further_messages import Masking

log = logging.getLogger("edgetrain")

PATIENCE_S = 30.0
"""How long members try a hub that has not answered yet."""

OUTAGE_S = 600.0
"""How long members wait for a hub that they have trained with, and that is away."""


@dataclass
class Newcomer:
    """A member that asks to be let in, until training starts."""

    request: Request
    params: Vector
    """The whole model's."""
    beginning: Beginning | None = None
    """Beginning of the hub's stretch of them."""
    welcome: Welcome | None = None
    """The hub's last one."""


class Entrance:
    """A link until training starts: it asks to be let in, takes the terms, and gives or takes the
    base. `Link` goes on from there. `interrupt` is called between two messages; `on_welcome`, with
    the number of members, when the hub has let this one in, which may be long before training
    starts."""

    memory: VectorPool
    outbox: Outbox
    inbox: Inbox
    stretch: Stretch
    """Since the hub has let this member in: the ranges of the vector that it adds up. All vectors
    of the exchange but `params` are of these."""
    own: slice
    """Their places in the model's vector."""
    _joining: Newcomer
    _session: Session
    _silence: Silence

    def __init__(
        self,
        transport: MemberTransport,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
        hub_timeout_s: float = OUTAGE_S,
    ) -> None:
        """`patience_s`: how long a hub that does not answer is tried. `hub_timeout_s`: how long one
        that has answered is waited for, over a transport that can reconnect."""
        self._transport, self._clock = transport, clock
        self._patience_s, self._hub_timeout_s = patience_s, hub_timeout_s
        self.interrupt: Callable[[], None] = lambda: None
        self.while_idle: Callable[[], None] = lambda: None
        """Called when nothing has come for a while, of `first_pause_s` at most, then twice that, up
        to `longest_pause_s`."""
        self.first_pause_s = self.longest_pause_s = math.inf
        self.on_welcome: Callable[[int], None] = lambda members: None
        self.is_to_evaluate = False
        """Whether the hub has said that the member that evaluated is gone."""
        self.before_upload: Callable[[str], None] = lambda name: None
        """Called when the hub has asked for this member's parameters, before they are sent."""
        self.on_map: Callable[[Map], None] = lambda map: None
        """Called with each map of who has which ranges, before it is a sign of life."""
        self.number = 0
        """Number of the session, to be set before `enter`; 0: drawn."""
        self._early: deque[Sequence[Buffer]] = deque()
        """Messages taken from the transport by `watch`, and given first by `_next`."""

    def join(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> Entry:
        """See Exchange. A hub that does not answer is tried for `patience_s`."""
        self.enter(request, params, checksum, past)
        return self.begin()

    def enter(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> None:
        """The first half of `join`: until the hub has let this member in, and has the parameters
        that it may have asked for. `begin` is the other one."""
        self.ask_in(request, params, checksum, past)
        self.await_welcome()

    def await_welcome(self) -> None:
        """The rest of `enter`, after `ask_in`."""
        while self._joining.welcome is None:
            self._accept_before_start(self._next())

    def ask_in(
        self, request: Request, params: Vector, checksum: int, past: Past | None = None
    ) -> None:
        """The beginning of `enter`, which does not wait: ask to be let in."""
        self._session = Session(request, params.size, checksum, past, self.number)
        self._silence = Silence(self._transport, self._clock, self._patience_s, self._hub_timeout_s)
        self._joining = Newcomer(request, params)
        self._ask(0)

    def begin(self) -> Entry:
        """The second half of `join`: until training starts."""
        entry = None
        while entry is None:
            entry = self._accept_before_start(self._next())
        return entry

    def watch(self) -> None:
        """While entering at another hub: raise what a refusal of this one means."""
        frames = self._transport.receive(0.0)
        if frames is not None and frames[0] == Refuse.kind:
            self._accept_before_start(self._read(frames))
        elif frames is not None:
            self._early.append(frames)

    def _accept_before_start(self, message: Message) -> Entry | None:
        joining = self._joining
        self.is_to_evaluate |= isinstance(message, Evaluate)
        match self._session.accept_before_start(message):
            case Welcome() as welcome:
                self._take_terms(welcome, joining)
                if welcome.upload:
                    self.before_upload(welcome.name)
                    for message in joining.beginning.messages() if joining.beginning else ():
                        self._send(message)
                joining.welcome = welcome
            case Base() | Fixed() as part if joining.beginning is not None:
                joining.beginning.accept_part(part)
            case Start() as start:
                assert joining.welcome is not None
                assert joining.beginning is not None
                self._session.fixed = joining.beginning.finish(start.fixed)
                sent = self._silence.heard - self.traffic().round_trip_s / 2
                return entry_of(joining.welcome, start, sent)
            case Ask():
                self._ask(0)
        return None

    def _take_terms(self, welcome: Welcome, joining: Newcomer) -> None:
        request, elements = joining.request, self._session.elements
        layout = layouts.read(request.layout, elements) if request.layout else ()
        self.stretch = stretch = Stretch(welcome.ranges, welcome.first, welcome.end)
        own = stretch.of(elements)
        if joining.beginning is None:
            digest = self._session.fixed
            joining.beginning = Beginning(joining.params[own], request.fixed_tensors, digest)
        joining.beginning.restart()
        self.own = own
        ranges = Ranges(own.stop - own.start, strategies.find(welcome.strategy).ranges)
        codec, reply_codec = _codecs(welcome, layout, max(ranges.count, stretch.count), elements)
        masker = masker_of(welcome, request, elements)
        self.memory = VectorPool(ranges.largest)
        self.outbox = Outbox(welcome.name, codec, ranges, welcome.members, self.memory, masker)
        name = "" if strategies.find(welcome.strategy).is_synchronous else welcome.name
        self.inbox = Inbox(reply_codec, ranges, self.memory, self._clock, name)
        self._silence.set_beat(welcome.heartbeat_s)
        self.on_welcome(welcome.members)
        log.info("joined as %s; %s, every %d", welcome.name, welcome.strategy, welcome.local_steps)

    def ask_again(self, *, base: bool = False, round: int = 0) -> None:
        """Say to the hub where this member is, as after a lost connection. `base`: it wants the
        hub's in place of replies, and `wait` gives a CatchUp. It gives nothing before `round`."""
        session = self._session
        session.wants_base |= base
        session.next_round = max(session.next_round, round)
        self._ask(session.epoch)

    def _ask(self, epoch: int) -> None:
        """Ask a hub of this epoch to let this member in; until it answers, nothing else counts."""
        self._ask_from(epoch, None)

    def _ask_from(self, epoch: int, oldest: int | None) -> None:
        """`oldest`: as Session.ask has it."""
        self._silence.note_question()
        self._send(self._session.ask(epoch, self._silence.connections, oldest))

    def traffic(self) -> Traffic:
        return self._transport.traffic()

    # -- messages ------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        self._transport.send(pack(message))

    def _next(self) -> Message:
        """The next message. After a while of silence the connection is made again, and the hub is
        asked again. Raises HubUnreachable after a long one."""
        self.interrupt()
        if self._early:
            return self._read(self._early.popleft())
        pause_s = min(self._silence.pause_s, self.first_pause_s)
        while (frames := self._transport.receive(pause_s)) is None:
            self.interrupt()
            self.while_idle()
            self._check_connection(silence=True)
            self._silence.check()
            pause_s = min(2 * pause_s, self._silence.pause_s, self.longest_pause_s)
        self._check_connection()
        return self._read(frames)

    def _check_connection(self, silence: bool = False) -> None:
        """If the connection was replaced, or with `silence` nothing comes, ask what was lost."""
        if self._silence.note_connections() or (silence and self._silence.reconnect_if_silent()):
            self.ask_again()

    def _read(self, frames: Sequence[Buffer]) -> Message:
        self._silence.note_message()
        message = unpack(frames)
        if isinstance(message, Map):
            self.on_map(message)
        return message


class Link(Entrance):
    """The link of one member to its hub: an `Exchange`, whose docstrings say who owns what.

    Replies are put into vectors
    of `memory`, so that contributions made in it take no more of it than that: a contribution that
    has been sent is free when its reply comes.
    """

    def __init__(
        self,
        transport: MemberTransport,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
        hub_timeout_s: float = OUTAGE_S,
    ) -> None:
        super().__init__(transport, clock, patience_s, hub_timeout_s)
        self._submitted = -1
        self._last = 0
        """As the newest beat says it."""
        self._sent_bytes: dict[int, int] = {}
        self._catch_up: CatchUp | None = None
        self._is_closed = False
        self.goes_idle = False
        """Whether `wait` raises Idle for a member that is in no round. False: it waits on."""

    @property
    def session(self) -> int:
        return self._session.number

    @property
    def applied(self) -> int:
        """Replies that were given out, or that the base has which `wait` gives next."""
        return self._session.applied

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def next_round(self) -> int:
        return self._session.next_round

    @property
    def is_away(self) -> bool:
        """Whether the hub was asked where the fleet stands, and has not answered."""
        return self._session.has_begun and self._session.state != "training"

    def go_by_map(self, number: int) -> None:
        """From now on the link is one by the map with this number: see Resume."""
        self._session.map = number + 1

    def successor(self) -> Link:
        """A fresh link to the same hub and transport, which takes the place of this one."""
        link = Link(self._transport, self._clock, self._patience_s, self._hub_timeout_s)
        link.on_map, link.is_to_evaluate = self.on_map, self.is_to_evaluate
        return link

    @property
    def members_here(self) -> int:
        """Members that had joined at the last beat, while the job waits for more; 0: not known."""
        return self._session.members_here

    @property
    def away_s(self) -> float:
        """Seconds of silence of a hub that was asked where the fleet stands; 0.0: none."""
        if self._session.state == "training":
            return 0.0
        return self._clock() - self._silence.heard

    @property
    def epoch(self) -> int:
        """Restarts of the hub, as far as the link knows."""
        return self._session.epoch

    # -- contributions -------------------------------------------------------------------------

    def factors(self) -> PowerSGD | None:
        return self.outbox.factors()

    def unsent(self) -> dict[str, Vector]:
        return self.outbox.unsent()

    def restore_unsent(self, unsent: Mapping[str, Vector]) -> None:
        self.outbox.restore_unsent(unsent)

    def submit(self, submission: Submission) -> Vector | None:
        """Encode, or mask, and send a contribution: see Exchange."""
        given, session, self._submitted = submission, self._session, submission.round
        session.next_round = session.given = given.round + 1
        session.applied, session.checksum = given.applied, given.checksum
        if self.outbox.is_masked:
            self.outbox.add_unmasked(given.head, given.vector)
            self._send_masked()
            return None
        read = self.outbox.add(given.head, given.vector, given.rest_later)
        # A member that is coming back sends everything that is kept once the hub has answered.
        if session.state == "training" and given.round >= session.resend:
            self._send_kept(given.round)
        return read

    @property
    def sent_nearly_all(self) -> bool:
        return self.outbox.sent_nearly_all

    def _send_kept(self, round: int) -> None:
        self._sent_bytes[round] = 0
        for message in self.outbox.messages(round):
            self._sent_bytes[round] += memoryview(message.payload).nbytes
            self._send(message)

    def adopt(self, head: Contribute, payloads: Sequence[Buffer]) -> None:
        """Keep a contribution that was made over other links, and send it if the hub lacks it."""
        if head.round >= self._session.resend:
            self.outbox.keep(head, payloads)
            self._send_kept(head.round)

    def _send_masked(self) -> None:
        if self._session.state == "training":
            for round in self.outbox.mask_ready():
                self._send_kept(round)

    # -- replies -------------------------------------------------------------------------------

    def wait(self, round: int) -> RoundReply | CatchUp:
        """See Exchange. A hub that is away is waited for, for `hub_timeout_s` or a few beats."""
        decoded, idle_since = self.inbox.decode_s, math.inf
        while not self.inbox.is_whole(round):
            if self._catch_up is not None:
                found, self._catch_up = self._catch_up, None
                self._sent_bytes = {n: b for n, b in self._sent_bytes.items() if n >= found.applied}
                return replace(found, idle_s=max(0.0, self._clock() - idle_since))
            self._act(message := self._next())
            if isinstance(message, Beat) and message.merged > round:  # over, and no reply comes
                idle_since = min(idle_since, self._silence.heard)
                if self.goes_idle:
                    raise Idle
        reply = self.inbox.pop_reply(round)
        self.outbox.follow(self.inbox.rung)
        self._session.applied, self._session.checksum = round + 1, reply.checksum
        sent = sum(self._sent_bytes.pop(n) for n in [*self._sent_bytes] if n < reply.merged)
        return replace(reply, wait_decode_s=self.inbox.decode_s - decoded, sent_bytes=sent)

    @property
    def ready(self) -> int:
        return self.inbox.ready_after(self._session.applied) + (self._catch_up is not None)

    def end(self, round: int) -> None:
        self._session.ends, self._last = round, 0
        if round and self._session.state == "training":
            self._send(Beat(merged=round))

    def watch(self) -> None:
        """See Entrance; once training has started here, as `poll`."""
        if self._session.has_begun:
            self.poll()
        else:
            super().watch()

    def poll(self) -> None:
        """See Exchange; silence raises nothing."""
        while (frames := self._transport.receive(0.0)) is not None:
            self._check_connection()
            self._act(self._read(frames))
        if self._silence.can_reconnect:
            self._check_connection(silence=True)

    def await_reply(self) -> bool:
        applied = self._session.applied
        while not self.ready > applied:
            if 0 < self._last <= applied:
                return False
            self._act(self._next())
        return True

    def settle(self) -> bool:
        """See Exchange. Masked contributions count in their own round or not at all."""
        while self.outbox.kept and not self.outbox.is_masked:
            self._act(message := self._next())
            if isinstance(message, Beat) and self._session.state == "training":
                return not self.outbox.kept
        return True

    def take_next(self) -> None:
        """Wait for the next message, and do what it means. Raises what `wait` does."""
        self._act(self._next())

    def _act(self, message: Message) -> None:
        """Do what a message means while training, or on the way back."""
        self.is_to_evaluate |= isinstance(message, Evaluate)
        if isinstance(message, Beat):
            self.outbox.drop_merged(message.merged)
            self._last = message.last
        match self._session.accept_in_training(message, self._silence.connections):
            case Ask() as ask:
                self._ask(ask.epoch)
            case Back() as back:
                self._return(back)
            case Reply() as reply:
                self._add_reply(reply)
            case Welcome() as welcome:
                if self.outbox.restart_masks(welcome.epoch):
                    self._ask(welcome.epoch)
            case masking if masking is not None:
                self._answer_masking(masking)

    def _add_reply(self, reply: Reply) -> None:
        if self._silence.can_reconnect and self.inbox.is_gap(reply, self._session.applied):
            self._ask(self._session.epoch)
            return
        self.outbox.drop_answered(reply)
        self.inbox.add_part(reply, self._silence.heard, reply.round == self._submitted)

    def _answer_masking(self, message: Masking) -> None:
        answer = self.outbox.accept_masking(message)
        if answer is not None and self._session.state == "training":
            self._send(answer)
        self._send_masked()

    # -- coming back ---------------------------------------------------------------------------

    def _ask(self, epoch: int) -> None:
        """Ask a hub of this epoch to let this member in; until it answers, nothing else counts."""
        session, oldest = self._session, None
        if session.has_begun:
            self.outbox.restart_masks(epoch)
            self.inbox.clear()
            oldest = self.outbox.oldest
            log.info("%s comes back after %d replies", session.name, session.applied)
        self._ask_from(epoch, oldest)

    def _return(self, back: Back) -> None:
        """The hub knows this member again: send what it lacks, and note what has changed."""
        start = back.start
        for round in [kept for kept in self.outbox.kept if kept >= start.resend]:
            self._send_kept(round)
        base = None
        if not start.keep:
            elements = self.own.stop - self.own.start
            base = joined_base(back.base, elements, np.empty(elements, np.float32))
            self.outbox.drop_missed(start.applied)
        if back.missed:
            self._catch_up = CatchUp.of(start, base)
        self._send_masked()
        self.end(self._session.ends)

    # -- leaving -------------------------------------------------------------------------------

    def report(self, telemetry: Telemetry | Figure) -> None:
        """See Exchange. A member that is coming back has other things to say."""
        if self._session.state == "training":
            self._send(telemetry)

    def leave(self, reason: str) -> None:
        if not self._is_closed:
            self._send(Leave(reason))
        self.vanish()

    def vanish(self) -> None:
        self._is_closed = True
        self._transport.close()


def _codecs(
    welcome: Welcome, layout: Layout, cuts: int, elements: int
) -> tuple[codecs.Codec, codecs.Codec]:
    """Those of contributions and of replies, for the hub's stretch of a vector of [elements]."""
    both = [
        codecs.bound(codecs.parse(n), layout, cuts) for n in (welcome.codec, welcome.reply_codec)
    ]
    stretch = Stretch(welcome.ranges, welcome.first, welcome.end)
    if stretch != WHOLE:
        from edgetrain.codecs.pieces import in_pieces  # where hubs share the vector

        pieces = stretch.pieces(elements)
        both = [in_pieces(codec, pieces) for codec in both]
    return both[0], both[1]


def entry_of(welcome: Welcome, start: Start, sent: float) -> Entry:
    """What a member learns as it begins; `sent`: when the hub sent the start, by its clock."""
    return Entry(
        name=welcome.name,
        index=welcome.index,
        members=welcome.members,
        strategy=welcome.strategy,
        local_steps=welcome.local_steps,
        delay=Delay.decoded(welcome.delay, start.delay),
        codec=welcome.codec,
        is_masked=welcome.threshold > 0,
        round=start.round,
        applied=start.applied,
        checksum=start.checksum,
        resend=start.resend,
        is_exact=not welcome.threshold
        and all(codecs.parse(name).lossless for name in (welcome.codec, welcome.reply_codec)),
        steps=start.steps,
        steps_now=start.local_steps,
        status_s=welcome.status_ms / 1000,
        complete=start.complete,
        is_drawn=welcome.drawn,
        began=sent - start.t_ms / 1000,
    )
