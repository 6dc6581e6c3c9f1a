"""The replica of a hub: it holds what the hub journals, and takes over if the hub is silent.

Pure: messages of the hub and of members in, effects out; no socket, no clock, no disk. A driver
(training/replica.py, a test) carries out the effects in order: Save begins a copy of the journal,
Write adds to it, and Send(HUB, ...) goes to the hub. Then `Replica.taken` says whether to take
over: with the journal's copy, as `Hub.restore` does, in the epoch `next_epoch`.

=========  ==================================================  =====================================
hub        a member resumes                                    more than half agree, at `position`
=========  ==================================================  =====================================
heard      it is noted, and not answered: it goes back         (votes were dropped)
silent     it is asked to agree (`Offer`), every beat          the replica takes over
=========  ==================================================  =====================================

Whatever the hub sends moves `position`, and with it all votes are void. So the hub, or the replica,
goes on, and never both: docs/decisions/041.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.errors import BadMessage, Refused
from edgetrain.exchange.further_messages import Copy, Follow, Stored
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.effects import Effect, Note, Save, Send, Write
from edgetrain.exchange.hub.records import Departed, Entered, Record, Restarted, Round, Seat, State
from edgetrain.exchange.messages import PROTOCOL, Agree, Message, Offer, Refuse, Resume
from edgetrain.exchange.transport import owner_of
from edgetrain.vectors.vector import Buffer

HUB = b""
"""The hub's address, in place of a member's connection."""

SILENT_BEATS = 1.5
"""Beats without a byte from the hub after which it counts as silent: it sends one every beat."""

ASK_BEATS = 4
"""Beats without a byte from the hub after which the replica says again where it is."""

EPOCHS = 1 << 16
"""A replica that takes over begins at a multiple of this, so that its epoch is higher than that of
a hub that is resumed beside it, and no epoch occurs twice."""

MOST_WAITING = 1 << 16
"""Members' connections that are noted before the replica takes over."""


class Replica:
    """What a hub's replica holds, and who agrees that it takes over.

    `agreed` is the job in a journal's words; `most_bytes` of a record at most.
    """

    def __init__(self, agreed: str, heartbeat_s: float, most_bytes: int, now: float) -> None:
        self.position = 0
        """The newest that it holds, with all before it; 0: no whole copy."""
        self.is_whole = False
        """Whether the journal's copy is all that the hub had journaled at `position`."""
        self.seats: dict[str, Seat] = {}
        self.waiting: dict[bytes, Resume] = {}
        """The last question of each member that has come, by its connection."""
        self.taken = False
        """Whether to take over now."""
        self.is_over = False
        """Whether the last member has left, or was expelled: the job is over."""
        self.epoch = self.round = 0
        """Epoch at the journal's end."""
        self.heartbeat_s = heartbeat_s
        self._agreed, self._most_bytes = agreed, most_bytes
        self._heard = self._asked = now
        self._parts = self._received = 0
        self._pieces: list[Buffer] = []
        self.votes: set[str] = set()
        """The members that agree to a takeover from `position`."""
        self._offered = float("-inf")

    @property
    def next_epoch(self) -> int:
        return (self.epoch // EPOCHS + 1) * EPOCHS

    def hub_is_silent(self, now: float) -> bool:
        return now - self._heard >= SILENT_BEATS * self.heartbeat_s

    # -- the hub ------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """What is held may not be what the hub has: ask for a new copy."""
        self.is_whole = False

    def follow(self, now: float) -> list[Effect]:
        """Say to the hub where the replica is: over each new connection."""
        self._parts, self._pieces, self._asked = 0, [], now
        position = self.position if self.is_whole else 0
        return [Send(HUB, Follow(PROTOCOL, self._agreed, position))]

    def note_bytes(self, received: int, now: float) -> None:
        """So many bytes have come from the hub so far: more of them are a sign of life."""
        if received != self._received:
            self._received, self._heard = received, now

    def handle_hub(self, message: Message, now: float) -> list[Effect]:
        """A message of the hub. Raises BadMessage if it is not part of a record that may come now:
        then `follow` again; and Refused."""
        self._heard = now
        match message:
            case Copy():
                if message.part != len(self._pieces) or message.position <= self.position:
                    return self._skip(message)
                self._parts += 1
                self._pieces.append(message.payload)
                size = sum(memoryview(piece).nbytes for piece in self._pieces)
                if size > self._most_bytes:
                    raise BadMessage(f"a record of more than {self._most_bytes:,} bytes")
                if message.part + 1 < message.parts:
                    return [Send(HUB, Stored(self.position, self._parts))]
                pieces, self._pieces = self._pieces, []
                return [*self._add(message, pieces), Send(HUB, Stored(self.position, self._parts))]
            case Refuse(code="unknown"):  # it was restored, or had given the connection up
                return self.follow(now)
            case Refuse():
                raise Refused(message.code, f"the hub refused: {message.code}: {message.reason}")
        raise BadMessage(f"the hub sent {type(message).__name__} to its replica")

    def _skip(self, message: Copy) -> list[Effect]:
        """A part that the replica has, or that does not follow what it has: it counts as come."""
        if message.position > self.position:
            raise BadMessage(f"part {message.part} came when {len(self._pieces)} was due")
        self._parts += 1
        return [Send(HUB, Stored(self.position, self._parts))]

    def _add(self, message: Copy, pieces: Sequence[Buffer]) -> list[Effect]:
        if message.begins:
            self.seats, self.is_whole = {}, False
        elif not (self.position or self.seats or self.epoch):
            raise BadMessage("a copy of a journal that begins with no snapshot")
        effects: list[Effect] = []
        if message.header_bytes:
            data = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            record = records.decode(data[: message.header_bytes], data[message.header_bytes :])
            effects.append(self._note(record))
        if message.whole and not self.is_whole:
            effects.append(Note("replica", "replica", "it holds all that the hub has journaled"))
        self.position, self.is_whole = message.position, message.whole
        self.votes.clear()
        return effects

    def _note(self, record: Record | State) -> Effect:
        match record:
            case State():
                self.seats = {seat.name: seat for seat in record.seats}
                self.epoch, self.round = record.epoch, record.round
                return Save(record)
            case Round():
                if record.round != self.round:
                    raise BadMessage(f"round {record.round} came when {self.round} was due")
                self.round += 1
            case Entered():
                self.seats[record.seat.name] = record.seat
            case Departed():
                self.seats.pop(record.name, None)
                self.is_over = record.final and not self.seats
            case Restarted():
                self.epoch = record.epoch
        return Write(record)

    # -- members ------------------------------------------------------------------------------

    def handle_member(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        """A message of a member, or of somebody who is not one: only a member of the journal, in
        its own session and with its own key, is answered."""
        match message:
            case Resume() if self._seat_of(sender, message) is not None:
                self.waiting[sender] = message
                while len(self.waiting) > MOST_WAITING:
                    del self.waiting[next(iter(self.waiting))]
                return self._offers([sender], now)
            case Agree() if message.takes_over and sender in self.waiting:
                seat = self._seat_of(sender, self.waiting[sender])
                if seat is not None and message.position == self.position:
                    self._count(seat.name, now)
        return []

    def _seat_of(self, sender: bytes, message: Resume) -> Seat | None:
        seat = self.seats.get(message.name)
        if seat is None or seat.session != message.session:
            return None
        key = owner_of(seat.address)
        return seat if not key or key == owner_of(sender) else None

    def _count(self, name: str, now: float) -> None:
        if not self.hub_is_silent(now) or not self.is_whole:
            return
        self.votes.add(name)
        self.taken = 2 * len(self.votes & self.seats.keys()) > len(self.seats)

    def _offers(self, senders: Sequence[bytes], now: float) -> list[Effect]:
        if not self.is_whole or not self.hub_is_silent(now):
            return []
        return [Send(sender, Offer(self.position)) for sender in senders]

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: ask those again that wait here, and the hub. A few times per beat."""
        effects: list[Effect] = []
        silent_s = now - max(self._heard, self._asked)
        if silent_s >= ASK_BEATS * self.heartbeat_s:
            effects += self.follow(now)
        if not self.hub_is_silent(now):
            self.waiting.clear()
            self._offered = float("-inf")
        elif now - self._offered >= self.heartbeat_s:
            self._offered = now
            effects += self._offers([*self.waiting], now)
        return effects
