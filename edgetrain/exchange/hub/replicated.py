"""A hub with a replica: nothing leaves before the replica holds what was journaled before it.

Theory. Every record of the journal goes to the replica with a position (`copies`). While the
replica is *in*, what the hub says behind a record waits until the replica holds that record. A
replica that does not answer must not stop training, and must not take over later with what it
held: the hub asks its members to agree that it is out at `link`, the newest position that it is
known to hold. Members that agreed refuse to let it take over (`member/standby.py`), and it needs
more than half of the members for that, as the hub does: docs/decisions/041 has the proof.

=========  ================================================  ==========  =======================
state      what happens                                      next        effects behind a record
=========  ================================================  ==========  =======================
absent     it holds all that was sent                        in          wait
in         more than half agree that it is out               out         wait; are released
out        it holds the copy that it was sent                entering    leave
entering   it holds what had been sent by then               in          wait
entering   it does not answer                                out         are released
=========  ================================================  ==========  =======================

A hub that was restored is absent: it does not know what its replica holds, and may have been
replaced by it, so it waits. Beats leave in any state, and say that nothing is merged while
anything waits: members would take the hub for dead, or drop contributions too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from edgetrain.errors import EdgetrainError
from edgetrain.exchange.further_messages import Follow, Stored
from edgetrain.exchange.hub.copies import CopyStream, Voter
from edgetrain.exchange.hub.effects import (
    Effect,
    Feed,
    Note,
    Observed,
    Save,
    Send,
    Write,
    refusal,
)
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import GoOn, HubPart, IsLost, Records, Restore, nobody
from edgetrain.exchange.hub.records import Record, State
from edgetrain.exchange.keys.pairs import spell
from edgetrain.exchange.messages import (
    MAX_COUNT,
    PROTOCOL,
    Agree,
    Beat,
    Join,
    Message,
    Resume,
    Standby,
)
from edgetrain.exchange.transport import owner_of

PATIENT_BEATS = 4
"""Beats without progress after which the hub asks its members whether the replica is out."""

_LATER = MAX_COUNT
"""In place of a position: behind the end of the copy of the journal."""


class ReplicatedPart(HubPart):
    """The part of a hub whose journal is copied to a replica. See the module."""

    def __init__(self, address: str, is_replica: Callable[[bytes], bool]) -> None:
        """`address`: where members find the replica. `is_replica`: whether the owner of a
        connection is enrolled as the replica."""
        self.replica: Literal["absent", "in", "out", "entering"] = "absent"
        self.link = 0
        """The newest position that counts as held by the replica; while it is out, the one since
        when it is; 0: none is known."""
        self.copies = CopyStream()
        self._address, self._is_replica = address, is_replica
        self._peer = b""
        """The replica's connection; b"": there is none."""
        self._key: str | None = None
        self._is_feeding = self._feeds_first = self._feed_asked = False
        self._whole_at = self._barrier = 0
        """Positions: the end of the last copy of the journal, and what effects wait for now."""
        self._waiting: deque[tuple[int, Effect]] = deque()
        self._asks = False
        self._votes: set[Voter] = set()
        self._moved = 0.0
        """When the replica was last known to make progress."""
        self._beaten = float("-inf")

    # -- what happens ---------------------------------------------------------------------------

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        match message:
            case Follow():
                return self._follow(sender, message, now)
            case Stored() if sender == self._peer:
                if self.copies.accept(message):
                    self._moved = now
                return self._note_held(now)
            case Agree():
                return self._accept_vote(sender, message)
        effects = self._gate(go_on())
        if isinstance(message, Join | Resume) and (member := self.hub.members.get(sender)):
            self._votes.discard((member.name, member.session))
            effects += self._standbys([member])
        return effects

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        effects = self._gate(go_on())
        if now - self._beaten < self.hub.policy.heartbeat_s:
            return effects
        self._beaten = now
        before = self._check_progress(now)
        if self._peer and self.hub.started and not self._is_feeding:
            self.copies.add(self.hub.epoch, None, self._voters())
        return [*before, *self._standbys(self.hub.members), *effects, *self._pump()]

    def lose(self, effects: list[Effect], is_lost: IsLost = nobody) -> list[Effect]:
        """A replica whose key is revoked is not heard any more."""
        if is_lost(self._peer):
            self._peer = b""
        return self._gate(effects)

    def obey(self, order: Order, now: float, go_on: GoOn) -> list[Effect]:
        """The order is answered once the replica knows, too."""
        return self._gate(go_on())

    def restore(self, state: State, now: float, go_on: Restore, records: Records) -> None:
        go_on(records)
        self._barrier = _LATER

    def copied(self, item: Record | State | None, now: float) -> list[Effect]:
        """The next record of the journal that `Feed` asked for; None: that was all."""
        self._feed_asked = False
        if not self._is_feeding:
            return []
        whole, begins = item is None, isinstance(item, State)
        self._feeds_first = False
        self.copies.add(self.hub.epoch, item, self._voters(), begins=begins, whole=whole)
        if whole:
            self._is_feeding, self._moved = False, now
            self._whole_at = self.copies.sent
            if self._barrier == _LATER:
                self._barrier = self._whole_at
            late = [(min(at, self._whole_at), effect) for at, effect in self._waiting]
            self._waiting = deque(late)
        return self._pump()

    # -- what waits ---------------------------------------------------------------------------

    def _gate(self, effects: Iterable[Effect]) -> list[Effect]:
        """What may leave now; the rest waits for the replica."""
        leaving: list[Effect] = []
        for effect in effects:
            match effect:
                case Write(record=item) | Save(state=item):
                    leaving.append(effect)
                    self._copy(item)
                case Send(message=Beat() as beat) if self._waiting and (beat.merged or beat.last):
                    leaving.append(Send(effect.to, replace(beat, merged=0, last=0)))
                case Send(message=Beat()):
                    leaving.append(effect)
                case _ if self._barrier > self.copies.held:
                    self._waiting.append((self._barrier, effect))
                case _:
                    leaving.append(effect)
        return leaving + self._release() + self._pump()

    def _copy(self, item: Record | State) -> None:
        """Send a record, unless the copy of the journal that is under way will have it."""
        if not self._peer or self._is_feeding:
            at = _LATER
            if self.replica == "in" and not self._is_feeding:
                self.copies.add(self.hub.epoch, item, self._voters())
                at = self.copies.sent
        else:
            begins = isinstance(item, State)
            self.copies.add(self.hub.epoch, item, self._voters(), begins=begins)
            at = self.copies.sent
            self._whole_at = at if begins else self._whole_at
        if self.replica != "out":
            self._barrier = at

    def _release(self) -> list[Effect]:
        """What waited for what the replica now holds, or for a replica that is out. Once the job is
        over and no member is left: what people are to know, as nothing will be released later."""
        if self.replica == "out":
            self._barrier = 0
            leaving = [effect for _, effect in self._waiting]
            self._waiting.clear()
            return leaving
        leaving = []
        if self.hub.membership.finished:
            leaving = [each for _, each in self._waiting if isinstance(each, Observed)]
            self._waiting.clear()
        while self._waiting and self._waiting[0][0] <= self.copies.held:
            leaving.append(self._waiting.popleft()[1])
        return leaving

    def _pump(self) -> list[Effect]:
        """Send what may be under way, and ask for more of the journal."""
        if not self._peer:
            return []
        effects: list[Effect] = [Send(self._peer, part) for part in self.copies.next_parts()]
        if self._is_feeding and not self._feed_asked and self.copies.is_idle:
            self._feed_asked = True
            effects.append(Feed(self._feeds_first, self.copied))
        return effects

    # -- the replica --------------------------------------------------------------------------

    def _follow(self, sender: bytes, message: Follow, now: float) -> list[Effect]:
        """The replica comes, or comes back; or somebody who is not it."""
        if not self._is_replica(sender):
            reason = "this machine is not enrolled as the hub's replica"
            return [refusal(sender, "name", reason), Note("refused", "?", f"replica: {reason}")]
        if message.protocol != PROTOCOL:
            reason = f"the hub speaks version {PROTOCOL}, the replica {message.protocol}"
            return [refusal(sender, "protocol", reason), Note("refused", "replica", reason)]
        if message.agreed != self.hub.agreed():
            reason = f"the hub runs {self.hub.agreed()}; the replica {message.agreed}"
            return [refusal(sender, "job", reason), Note("refused", "replica", f"job: {reason}")]
        if message.epoch > self.hub.epoch:
            raise EdgetrainError(
                f"the replica at {self._address} has taken over after {self.hub.round} rounds or "
                "more",
                "nothing is lost: members are there; this hub must not be resumed",
            )
        is_new, owner = sender != self._peer, owner_of(sender)
        self._peer, self._key, self._moved = sender, spell(owner) if owner else "", now
        if self._is_feeding or not self.copies.resume(message.position):
            self.copies.drop()
            self._is_feeding = self._feeds_first = self.hub.started
            self._feed_asked = False
            if self.hub.started:
                self._waiting = deque((_LATER, effect) for _, effect in self._waiting)
                self._barrier = _LATER if self._barrier > self.copies.held else self._barrier
        notes = [Note("replica", "replica", "it is here")] if is_new else []
        return [*notes, *self._note_held(now), *self._pump()]

    def _note_held(self, now: float) -> list[Effect]:
        """What follows from what the replica holds: see the module's table."""
        held, notes = self.copies.held, list[Effect]()
        is_whole = not self._is_feeding and self._whole_at and held >= self._whole_at
        if is_whole and self.replica in ("absent", "entering"):
            self.replica = "in"
            notes.append(Note("replica", "replica", "it holds all that is journaled: it is in"))
        elif is_whole and self.replica == "out":
            self.replica, self._whole_at = "entering", self.copies.sent
            if held >= self._whole_at:
                return self._note_held(now)
        if is_whole and self.replica == "in" and held > self.link:
            self.link, self._asks = held, False
            self._votes.clear()
            notes += self._standbys(self.hub.members) if notes else []
        return [*notes, *self._release(), *self._pump()]

    def _check_progress(self, now: float) -> list[Effect]:
        waits = self.copies.lacks or self._is_feeding or not self._peer
        late = waits and now - self._moved >= PATIENT_BEATS * self.hub.policy.heartbeat_s
        if self.replica == "in" and not self._asks and (late or self._is_feeding):
            self._asks = True
            reason = "it does not answer: members are asked to go on without it"
            return [Note("replica", "replica", reason)]
        if self.replica in ("out", "entering") and late and self._peer:
            self._peer, self._is_feeding = b"", False
            self.copies.drop()
            self.replica = "out"
            return self._release()
        return []

    # -- its members --------------------------------------------------------------------------

    def _standbys(self, members: Iterable[MemberRecord]) -> list[Effect]:
        """Tell members where the replica is, and ask them if it is out."""
        if self._key is None:
            return []
        out = self.replica in ("out", "entering")
        told = Standby(
            self._address, self._key, self.link, self.copies.sent, self.hub.policy.heartbeat_s,
            self._asks, out,
        )  # fmt: skip
        return [Send(member.sender, told) for member in members]

    def _voters(self) -> frozenset[Voter]:
        return frozenset((member.name, member.session) for member in self.hub.members)

    def _accept_vote(self, sender: bytes, message: Agree) -> list[Effect]:
        """A member agrees that the replica is out, for what it holds. More than half of those that
        were in at any time since have to: see docs/decisions/041."""
        member = self.hub.members.get(sender)
        if member is None or not member.trains or member.returning or message.takes_over:
            return []
        member.mark_heard()
        if not self._asks or message.position != self.link:
            return []
        self._votes.add((member.name, member.session))
        there, most = self.copies.since_held(self._voters())
        if 2 * len(self._votes & there) <= most:
            return []
        self.replica, self._asks = "out", False
        self._votes.clear()
        if not self._is_feeding:
            self.copies.drop()
            self._peer = b""
        reason = "dropped by majority vote of the members; the journal is no longer replicated"
        return [Note("replica", "replica", reason), *self._release()]
