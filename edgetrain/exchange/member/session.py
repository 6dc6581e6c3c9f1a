"""A member's session with its hub, as a state machine: joining, training, coming back.

A session is a member's place in a job. It outlives connections, hubs and the member's own process:
the hub knows the member by a number that is drawn when it first joins (`Session.number`).

Connections break and hubs restart without notice, and messages on their way are lost then. No
message is tracked. Instead, a member that has a reason to believe that something was lost sends
one question that says where it stands: Join (a newcomer) or Resume (replies applied, the next
round, the oldest contribution that it can send again). The answer is Welcome, the base in parts
where the member needs it, and Start, which says where the fleet stands and which contributions to
send again. Everything that a broken connection can have spoilt follows from this question and its
answer.

Reasons to ask: a Beat of another epoch (the hub was restored from its journal); Refuse "unknown"
(the hub does not know this connection); a reply that does not follow the one before it (the inbox
notices); another connection than before, or silence (`Silence` notices). A question may be asked
again before it is answered, so answers come late, or twice. Each Resume has a number, `attempt`,
that its Start repeats: only the answer to the last one counts. Replies that come before that Start
are ignored: the hub sends them again behind it. While a Resume is on its way, a Beat is a reason to
ask again only if its epoch is not the one that was asked, and the connection has changed since.

=========  ===================  =========  =======================================================
state      message              next       what happens
=========  ===================  =========  =======================================================
joining    Welcome              welcomed   the link takes the terms, and sends parameters if asked
joining    Refuse "unknown"     joining    ignored if Join was sent twice, otherwise Refused
welcomed   Start                training   training begins
welcomed   Beat, other epoch    joining    ask again: the hub restarted without this member
welcomed   Refuse "unknown"     joining    ask again
(both)     Base, Fixed          the same   the link takes in what the member begins with
(both)     Start, old attempt   the same   ignored, as are replies to a member that comes back,
           or asks again (Rekey and Assign, too): a Start was lost, and another one follows
training   Reply                training   to the inbox
training   Beat, other epoch    returning  ask
training   Refuse "unknown"     returning  ask
training   Base, and Start      training   it is drawn for a round: the link catches up
           without an attempt
training   Welcome, Base,       training   ignored, if a question was asked twice
           Fixed, Start
returning  Start, last attempt  training   the link sends what the hub lacks, or catches up
returning  Start, old attempt   returning  the parts of a base before it are dropped
returning  Welcome              returning  its epoch is the hub's; an answer begins
returning  Base                 returning  collected until Start
returning  Fixed                returning  ignored: the member has them
returning  Reply                returning  ignored
(both)     Rekey, Shares, ...   the same   to the masks, where contributions are masked
(any)      Beat, same epoch     the same   a sign of life
(any)      Map                  the same   to `Link.on_map`: which hub has which ranges
(any)      Refuse, other codes             Refused or Diverged is raised
(any)      anything else                   BadMessage is raised
=========  ===================  =========  =======================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, cast

from edgetrain.errors import BadMessage, Diverged, HubUnreachable, Refused
from edgetrain.exchange.messages import (
    PROTOCOL,
    Base,
    Beat,
    Evaluate,
    Fixed,
    Join,
    Map,
    Message,
    Refuse,
    Reply,
    Resume,
    Start,
    Welcome,
)
from edgetrain.exchange.seam import Past, Request
from edgetrain.exchange.transport import MemberTransport, Reconnecting
from edgetrain.vectors.vector import Buffer

if TYPE_CHECKING:
    from edgetrain.exchange.further_messages import Masking

SILENT_BEATS = 20
"""Missed beats after which a silent hub counts as lost (at least 20 s), over a transport that
cannot reconnect."""

QUIET_BEATS = 4
"""Beats of silence, plus this many round trips, before the connection is made again. The wait
doubles with each attempt."""

LONGEST_PAUSE_S = 60.0
"""Longest pause between attempts to reconnect; all of a hub's addresses are tried in it."""

State = Literal["joining", "welcomed", "training", "returning"]


@dataclass(frozen=True)
class Ask:
    """Something may be lost: ask the hub where the fleet stands."""

    epoch: int
    """The hub's, as far as the member knows."""


@dataclass(frozen=True)
class Back:
    """The hub knows this member again."""

    start: Start
    missed: bool
    """Whether rounds went on without this member, or it has to go on from another base."""
    base: Sequence[Buffer]
    """The payloads of the base's parts; empty: the member's own base is right."""


class Session:
    """One member's session: decides what a message means. It sends nothing; the link does.

    `state` is one of the states in this module's table; `next_round`, `applied` and `checksum` are
    where the member stands: the next round to contribute to, the replies applied, and the checksum
    of the base after them. `epoch` counts the restarts of the hub that it last heard of.
    """

    def __init__(
        self,
        request: Request,
        elements: int,
        checksum: int,
        past: Past | None = None,
        number: int = 0,
    ) -> None:
        """`checksum` is that of the parameters, for a newcomer; `past`: where a member stood that
        was started again. `number`: the newcomer's, where it has a session with another hub of the
        job already; 0: it is drawn."""
        self.state: State = "joining"
        self.elements = elements
        self.epoch = 0
        self.is_masked = False
        self.members_here = 0
        """Members that had joined at the last beat, while the job waits for more; 0: not known."""
        self.resend = 0
        """The hub has the contributions to rounds before this one, from an earlier process."""
        self._request, self._past, self._checksum = request, past, checksum
        # The highest bit gives all numbers the same length on the wire, and rules out 0.
        drawn = number or int.from_bytes(os.urandom(8), "little") | 1 << 63
        self.number = past.session if past else drawn
        self.name = past.name if past else request.name
        self.next_round = past.round if past else 0
        self.given = self.next_round
        """It contributes to no round from this one to the one before `next_round`."""
        self.wants_base = False
        """Whether the hub's base is to take the place of replies."""
        self.map = 0
        """One more than the number of the map that the link was made by, where several hubs share
        the vector; 0: there is none."""
        self.ends = 0
        """The member contributes nothing from this number on; 0: it may."""
        self.applied = past.applied if past else 0
        self.checksum = past.checksum if past else 0
        fixed = request.fixed_tensors
        self.fixed = fixed.digest if fixed is not None else ""
        """Digest of the member's fixed tensors; "": their values are not handed out."""
        self._questions = self._attempt = 0
        self._asked_epoch = self._asked_on = 0
        self._base_parts: list[Buffer] = []

    @property
    def has_begun(self) -> bool:
        return self.state in ("training", "returning")

    def ask(self, epoch: int, connections: int, oldest: int | None = None) -> Join | Resume:
        """The question to send now, to a hub of this `epoch`, over a transport that has had this
        many `connections`. A session that has begun is returning until the answer is here.

        `oldest` is the oldest round whose contribution can still be sent; None: there is none.
        """
        self._questions += 1
        self._asked_epoch, self._asked_on = epoch, connections
        self._base_parts = []
        if self.has_begun:
            self.state = "returning"
        elif self._past is None:
            return self._join()
        else:
            oldest = self._past.oldest
        has_begun, past = self.has_begun, self._past
        self._attempt += 1
        return Resume(
            protocol=PROTOCOL,
            model=self._request.model,
            elements=self.elements,
            name=self.name,
            session=self.number,
            applied=self.applied,
            checksum=self.checksum if self.applied else 0,
            submitted=self.next_round,
            oldest=self.next_round if oldest is None else oldest,
            attempt=self._attempt,
            lacks_base=self.wants_base
            or (not has_begun and past is not None and not past.has_base),
            fixed=self.fixed,
            steps=self._request.steps,
            address=self._request.address,
            map=self.map if has_begun else 0,
            skips=self.given if has_begun and self.given < self.next_round else 0,
        )

    def _join(self) -> Join:
        return Join(
            protocol=PROTOCOL,
            job=self._request.job,
            model=self._request.model,
            elements=self.elements,
            name=self._request.name,
            weight=float(self._request.weight),
            checksum=self._checksum,
            session=self.number,
            fixed_bytes=fixed.size if (fixed := self._request.fixed_tensors) is not None else 0,
            fixed=self.fixed,
            steps=self._request.steps,
            behind=self._request.behind,
            payload=self._request.layout,
            address=self._request.address,
            optimizer=self._request.optimizer,
        )

    def accept_before_start(self, message: Message) -> Welcome | Base | Fixed | Start | Ask | None:
        """What the link has to act on: the message or a question. Refused, Diverged, BadMessage."""
        if isinstance(message, Beat):
            self.members_here = message.here
        match message:
            case Refuse() if message.code != "unknown":
                _raise(message)
            case Welcome():
                self.state = "welcomed"
                self.name, self.epoch = message.name, message.epoch
                self.is_masked = message.threshold > 0
                return message
            case Base() | Fixed():
                return message
            case Start() if self._past is not None and message.attempt != self._attempt:
                return None
            case Start() if self.state == "welcomed":
                self.state = "training"
                self.applied, self.checksum = message.applied, message.checksum
                self.next_round = self.given = message.round
                self.resend = message.resend
                return message
            case Message(kind=b"R" | b"K" | b"w") if self._past is not None or self._questions > 1:
                return None  # Reply, Rekey, Assign: a `Start` was lost, the hub goes on
            case Beat() if self.state == "joining" or message.epoch == self.epoch:
                return None
            case Evaluate() | Map():
                return None
            case Beat() | Refuse() if self.state == "welcomed":
                self.state = "joining"
                return Ask(self.epoch)
            case Refuse() if self._questions > 1:
                return None
            case Refuse():
                _raise(message)
        raise BadMessage(f"the hub sent {type(message).__name__} before the start")

    def accept_in_training(
        self, message: Message, connections: int
    ) -> Reply | Welcome | Masking | Ask | Back | None:
        """The same once training has begun, over a transport with these `connections`."""
        returning = self.state == "returning"
        match message:
            case Beat():
                asked = returning and (
                    message.epoch == self._asked_epoch or 0 < self._asked_on == connections
                )
                return None if asked or message.epoch == self.epoch else Ask(message.epoch)
            case Evaluate() | Map():
                return None
            case Refuse(code="unknown"):
                return None if returning else Ask(self.epoch)
            case Refuse():
                _raise(message)
            case Reply():
                return None if returning else message
            case Base() if not returning:
                return self._accept_answer(message)
            case Start(attempt=0, applied=newer) if not returning and newer > self.applied:
                return self._accept_answer(message)
            case Welcome() | Base() | Fixed() | Start() if self._attempt:
                return self._accept_answer(message)
            case Welcome() | Base() | Fixed() | Start() if self._questions > 1:
                return None
        if self.is_masked:
            from edgetrain.exchange.further_messages import Masking

            if isinstance(message, Masking):
                return message
        raise BadMessage(f"the hub sent {type(message).__name__} during training")

    def _accept_answer(self, message: Welcome | Base | Fixed | Start) -> Welcome | Back | None:
        """A part of an answer to this or an earlier Resume, or of what draws it for a round."""
        match message:
            case Welcome():
                self._base_parts = []  # of an answer that a dying hub began
                if self.state == "returning":
                    self.epoch = message.epoch
                return message
            case Base():
                self._base_parts.append(message.payload)
                return None
            case Fixed():  # the rest of an answer to a question before training
                return None
            case Start():
                parts, self._base_parts = self._base_parts, []
                wanted = self._attempt if self.state == "returning" else 0
                if message.attempt != wanted or (not wanted and message.applied <= self.applied):
                    return None
                self.state, self.wants_base = "training", False
                if not message.keep:
                    self.applied, self.checksum = message.applied, message.checksum
                missed = not message.keep or message.round > self.next_round
                self.next_round = max(self.next_round, message.round)
                return Back(message, missed, () if message.keep else parts)


def _raise(refuse: Refuse) -> NoReturn:
    if refuse.code == "diverged":
        raise Diverged(refuse.reason, _NOT_EQUAL)
    # A job that people ended, or that is over, has not failed.
    said = f"the hub refused: {refuse.code}: " if refuse.code != "ended" else ""
    raise Refused(refuse.code, said + refuse.reason, _HINTS.get(refuse.code, ""))


_NOT_EQUAL = (
    "stop this run: its replicas are not equal. With sync-sgd all members need the same rates, the "
    "same optimizer with the same state, and weights that only its steps change: no forward pass, "
    "no max_norm of an embedding. Otherwise: edgetrain doctor"
)
_HINTS = {
    "fixed": "give all members equal models before they join (the same seed or the same file), or "
    "say frozen='first' on all of them if all are to take the first member's values, frozen='own' "
    "if each is to have its own",
    "name": "give each a name of its own (edgetrain gateway --name, edgetrain member --index, "
    "name= in edgetrain.join); one that has died is given up after a while",
    "peers": "join with the job's file: edgetrain member; or, where members reduce, "
    "edgetrain.join(…, job_file=…)",
}
"""Ways out of refusals, for people, by code."""


FIRST_PATIENCE_S = 30.0
"""A member that is very patient with a hub that does not answer asks as often as one that waits
this long."""


class Silence:
    """Watches a transport for signs of life, and for connections that replace each other.

    Bytes of a message that is not whole yet are a sign of life, too: on a slow link one frame can
    take minutes. A transport that can reconnect is reconnected after a while of silence, with
    growing pauses; a hub that stays silent for too long is given up.
    """

    def __init__(
        self,
        transport: MemberTransport,
        clock: Callable[[], float],
        patience_s: float,
        hub_timeout_s: float,
    ) -> None:
        """`patience_s`: for a hub that has never answered; `hub_timeout_s`: for one that was there,
        over a transport that can reconnect."""
        self.connections = 0
        """The transport's, when last checked; 0: not checked since it was made."""
        self.heard = clock()
        """When the last sign of life came."""
        self._transport, self._clock, self._hub_timeout_s = transport, clock, hub_timeout_s
        # isinstance of a Protocol is slow, and simulated members come in each round.
        can = hasattr(transport, "reconnect")
        self._reconnecting = cast(Reconnecting, transport) if can else None
        self._asked = self.heard
        self._most_s = patience_s
        self._heartbeat_s = min(patience_s, FIRST_PATIENCE_S) / (2 * QUIET_BEATS)
        self._pauses = self._received = 0

    @property
    def can_reconnect(self) -> bool:
        return self._reconnecting is not None

    @property
    def pause_s(self) -> float:
        """How long to wait for a message before checking again."""
        return min(1.0, 2 * self._heartbeat_s)

    def set_beat(self, heartbeat_s: float) -> None:
        """The hub sends at least one message in this time."""
        self._heartbeat_s = heartbeat_s
        self._most_s = max(20.0, SILENT_BEATS * heartbeat_s)
        if self.can_reconnect:
            self._most_s = max(self._most_s, self._hub_timeout_s)

    def note_message(self) -> None:
        self.heard, self._pauses = self._clock(), 0

    def note_question(self) -> None:
        """A question was sent; its answer takes a while."""
        self._asked = self._clock()

    def note_connections(self) -> bool:
        """Check the number of connections; whether one has been replaced since the last check.

        The first of all took nothing with it. But if two have stood since the last check, the
        earlier one may have lost a message; below 0 the transport went to another machine.
        """
        if self._reconnecting is None or self._reconnecting.connections == self.connections:
            return False
        before, self.connections = self.connections, self._reconnecting.connections
        return before > 0 or not 0 <= self.connections <= 1

    def reconnect_if_silent(self) -> bool:
        """Reconnect if nothing has come for too long; whether that was so."""
        received, now = self._transport.received_bytes(), self._clock()
        if received != self._received:
            self._received, self.heard, self._pauses = received, now, 0
        if self._reconnecting is None:
            return False
        silent_s, least_s = now - max(self.heard, self._asked), QUIET_BEATS * self._heartbeat_s
        if not self._pauses and silent_s <= min(least_s, LONGEST_PAUSE_S):
            return False  # without a look at the trip: this is asked at each step
        trips_s = QUIET_BEATS * self._reconnecting.traffic().round_trip_s
        patience_s = min(least_s + trips_s, LONGEST_PAUSE_S)
        if self._pauses:
            longest_s = max(LONGEST_PAUSE_S / max(1, len(self._reconnecting.addresses)), trips_s)
            patience_s = min(patience_s * 2**self._pauses, longest_s)
        if silent_s <= patience_s:
            return False
        self._pauses += 1
        self._reconnecting.reconnect()
        self.connections = 0
        return True

    def check(self) -> None:
        """Raise HubUnreachable if the hub has been silent for too long."""
        silent_s = self._clock() - self.heard
        if silent_s > self._most_s:
            said = {} if self._reconnecting is None else self._reconnecting.addresses
            each = [f"; {at}: {why or 'no answer'}" for at, why in said.items() if len(said) > 1]
            raise HubUnreachable(
                f"the hub has been silent for {silent_s:.0f} s{''.join(each)}",
                "is it running, and does it run the same edgetrain?",
            )
