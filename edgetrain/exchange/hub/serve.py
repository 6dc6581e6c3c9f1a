"""The hub's driver: carries out what the pure protocol says, over any transport.

It reads the clock, moves messages and keeps the journal; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from edgetrain.errors import BadMessage, EdgetrainError
from edgetrain.exchange.hub.effects import (
    Answered,
    Effect,
    Feed,
    Note,
    Observed,
    Replay,
    Save,
    Send,
    Write,
    replies_of,
)
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import ENTERS, Hub
from edgetrain.exchange.hub.records import Record, State
from edgetrain.exchange.hub.standstill import Standstill
from edgetrain.exchange.keys.pairs import short
from edgetrain.exchange.limits import ENTRIES_A_MINUTE, Refusals, SenderRate
from edgetrain.exchange.messages import (
    PROTOCOL,
    Message,
    Refuse,
    Start,
    other_protocol,
    pack,
    unpack,
)
from edgetrain.exchange.transport import HubTransport, owner_of
from edgetrain.vectors.vector import Buffer

Clock = Callable[[], float]

Keys = Callable[[], Container[bytes]]
"""The keys whose owners may take part now: another object whenever they have changed."""


class Observer(Protocol):
    """An observer of the hub: metrics, or a person."""

    def __call__(self, effect: Observed) -> None: ...


def serve(
    hub: Hub,
    transport: HubTransport,
    clock: Clock,
    observe: Observer,
    stop: Callable[[], bool] = lambda: False,
    journal: Journal | None = None,
    keys: Keys | None = None,
    earlier_s: float = 0.0,
    orders: Callable[[], Iterable[Order]] = tuple,
    look: Callable[[Hub], None] | None = None,
) -> None:
    """Run the hub until its job is over or `stop` answers true (asked at least once a second, like
    `keys`; None: no member has a key that could be revoked).

    What the hub says has to be in the `journal` is there before anyone is told. `earlier_s`:
    seconds of training before the hub was restored. `orders`: those that have come. `look` is
    called with each tick. Raises EdgetrainError when the journal's disk is full and the job says to
    stop, and when the job ends because too few members are left.
    """
    driver = _Driver(hub, transport, clock, observe, journal, earlier_s)
    pause = hub.policy.heartbeat_s / 4
    next_tick = clock()
    allowed: Container[bytes] | None = None
    while not hub.finished and not stop():
        if keys is not None and (found := keys()) is not allowed:
            allowed = found
            driver.carry_out(hub.revoke_all_but(allowed, clock()))
        for sender, frames in transport.poll(min(1.0, max(0.0, next_tick - clock()))):
            if driver.too_many(sender):
                continue
            try:
                message = unpack(frames)
            except BadMessage as error:
                driver.garbled(sender, frames, error)
                continue
            if isinstance(message, ENTERS) and driver.enters_too_often(sender):
                continue
            driver.carry_out(hub.handle(sender, message, clock()))
            driver.note_received(sender, message)
        if clock() >= next_tick:
            next_tick = clock() + pause
            driver.carry_out(hub.tick(clock()))
            driver.watch()
            if look is not None:
                look(hub)
        for order in orders():
            driver.carry_out(hub.obey(order, clock()))
        while effects := hub.part.hear(clock()):
            driver.carry_out(effects)
    if hub.rounds.ended_short:
        raise EdgetrainError(hub.rounds.ended_short)


class _Driver:
    """Carries out effects, in order."""

    def __init__(
        self,
        hub: Hub,
        transport: HubTransport,
        clock: Clock,
        observe: Observer,
        journal: Journal | None,
        earlier_s: float,
    ) -> None:
        self._began: float | None = None
        self._earlier_s = earlier_s
        self._hub, self._transport, self._clock = hub, transport, clock
        self._observe, self._journal = observe, journal
        self._copy: Iterator[State | Record] = iter(())
        self._garbled = 0
        # Simulated members send no reports, so that nothing would say that they take steps.
        self._standstill = Standstill(hub, clock()) if hub.policy.status_s else None
        self._rate = SenderRate()
        self._entries = SenderRate(ENTRIES_A_MINUTE, 60.0)  # owners are on a list, so there are few
        self._floods = Refusals()
        self._floods.report = lambda line: observe(Note("refused", "?", line))
        if journal is not None:
            hub.tail = journal.tail

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """What one message or one tick led to; afterwards a snapshot, if one is due and the job is
        not over: of a snapshot without members a restored hub believes that all were lost."""
        self._each(effects)
        journal = self._journal
        if journal is not None and journal.due and not self._hub.finished:
            journal.save(self._hub.state(), self._hub.needed)
            self._hub.tail = journal.tail

    def _each(self, effects: Iterable[Effect]) -> None:
        # One reply goes to everyone: it is packed once, and the transport sees the same frames.
        packed: tuple[Message, list[Buffer]] | None = None
        journal = self._journal
        for effect in effects:
            match effect:
                case Send(message=Start() as start):
                    self._send(effect.to, pack(self._stamped(start)))
                    self._note_sent(effect)
                case Send():
                    self._note_sent(effect)
                    if packed is None or packed[0] is not effect.message:
                        packed = effect.message, pack(effect.message)
                    self._send(effect.to, packed[1])
                case Write():
                    if journal is not None:
                        journal.append(effect.record)
                        self._hub.tail = journal.tail
                case Save():
                    if journal is not None:
                        journal.save(effect.state)
                        self._hub.tail = journal.tail
                case Replay():
                    self._replay(effect)
                case Feed():
                    self._feed(effect)
                case Answered():
                    effect.answer(effect.told)
                case Note(event="started", member="hub"):
                    self._began = self._clock() - self._earlier_s
                    self._observe(effect)
                case _:
                    self._observe(effect)

    def _note_sent(self, effect: Send) -> None:
        if self._standstill is not None:
            self._standstill.note_sent(effect.to, effect.message, self._clock())

    def note_received(self, sender: bytes, message: Message) -> None:
        if self._standstill is not None:
            self._standstill.note_received(sender, message, self._clock())

    def watch(self) -> None:
        if self._standstill is not None and (note := self._standstill.check(self._clock())):
            self._observe(note)

    def _send(self, to: bytes, frames: list[Buffer]) -> None:
        if not self._transport.send(to, frames):
            self._each(self._hub.unreachable(to, self._clock()))

    def _stamped(self, start: Start) -> Start:
        """The same, with the time since training began: only here it is known when it is sent."""
        began = self._clock() if self._began is None else self._began
        return replace(start, t_ms=max(0, round(1000 * (self._clock() - began))))

    def _replay(self, asked: Replay) -> None:
        sent = asked.first
        for record in self._journal.replies(asked.first) if self._journal else ():
            if record.round >= asked.end:
                break
            for reply in replies_of(record):
                self._send(asked.to, pack(reply))
            sent = record.round + 1
        if sent < asked.end:
            self._each(self._hub.unreadable(asked.to, self._clock()))

    def _feed(self, asked: Feed) -> None:
        """Give the hub's replica the next record of the journal, or else the hub's state."""
        hub = self._hub
        if asked.begins:
            self._copy = self._journal.copy(hub.needed) if self._journal else iter(())
        try:
            item = next(self._copy, hub.state() if asked.begins else None)
        except OSError:
            item, self._copy = hub.state(), iter(())
        self._each(asked.take(item, self._clock()))

    def too_many(self, sender: bytes) -> bool:
        """Whether a sender keeps the hub from the others; what is over the limit is dropped."""
        if self._rate.count_message(sender, self._clock()):
            return False
        if self._rate.is_first_beyond(sender):
            most = self._rate.most
            self._floods.add("flood", f"more than {most:,} messages a second: the rest is dropped")
        return True

    def enters_too_often(self, sender: bytes) -> bool:
        """Whether a member joins, or comes back, more often than any has a reason to: each time is
        written to the journal. It is not answered; one that waits for an answer asks again. Members
        without a key have no limit: they have any number of names."""
        owner = owner_of(sender)
        if not owner or self._entries.count_message(owner, self._clock()):
            return False
        most = self._entries.most
        self._floods.add(
            "entries", f"key {short(owner)}… came {most} times within a minute: it has to wait"
        )
        return True

    def garbled(self, sender: bytes, frames: list[Buffer], error: BadMessage) -> None:
        """Bytes that are no message. Anyone can send any number of them: noted one in ten times
        as many as before. Who speaks another version is told so."""
        self._garbled += 1
        count = self._garbled
        if count == 10 ** (len(str(count)) - 1):
            so_far = f" ({count} so far)" if count > 1 else ""
            self._observe(Note("refused", "?", f"{error}{so_far}"))
        version = other_protocol(frames)
        self._each(self._hub.garbled(sender, self._clock()))
        if version is not None:
            reason = f"the hub speaks version {PROTOCOL}, the member {version}"
            self._transport.send(sender, pack(Refuse("protocol", reason)))
