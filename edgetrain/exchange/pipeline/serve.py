"""Drivers of a pipeline's two halves: a relay on a hub's end, a stage on a member's.

They read the clock and move messages; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from edgetrain.errors import BadMessage, HubUnreachable, Refused, Stopped
from edgetrain.exchange.hub.effects import Answered, Note, Observed, Save, Send
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.limits import SenderRate
from edgetrain.exchange.messages import Join, Leave, Message, pack, unpack
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.relay import Effect, Relay
from edgetrain.exchange.transport import HubTransport, MemberTransport, Reconnecting


def relay_messages(
    relay: Relay,
    transport: HubTransport,
    clock: Callable[[], float],
    observe: Callable[[Observed], None],
    stop: Callable[[], bool] = lambda: False,
    journal: Journal | None = None,
    orders: Callable[[], Iterable[Order]] = lambda: (),
) -> None:
    """Serve a pipeline until its job is over or `stop` answers true, asked once a beat. States are
    in the `journal` before anyone hears of them. `orders`: what people have told since."""
    rate, garbled = SenderRate(), 0

    def carry_out(effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Save):
                if journal is not None:
                    journal.save(effect.state)
            elif isinstance(effect, Answered):
                effect.answer(effect.told)
            elif not isinstance(effect, Send):
                observe(effect)
            elif not transport.send(effect.to, pack(effect.message)):
                carry_out(relay.unreachable(effect.to))

    while not relay.is_over and not stop():
        for sender, frames in transport.poll(relay.heartbeat_s / 4):
            if not rate.count_message(sender, clock()):
                continue
            try:
                message = unpack(frames)
            except BadMessage as error:
                garbled += 1
                if garbled == 10 ** (len(str(garbled)) - 1):
                    observe(Note("refused", "?", f"{error} ({garbled} so far)"))
                continue
            carry_out(relay.handle(sender, message))
        for order in orders():
            carry_out(relay.obey(order))
        carry_out(relay.tick(clock()))


AGAIN_S = 2.0
"""Seconds after which a member that is not let in yet, or hears nothing, asks again."""


class StageLink:
    def __init__(
        self,
        desk: StageDesk,
        join: Join,
        transport: MemberTransport,
        clock: Callable[[], float],
        hub_timeout_s: float,
        patience_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """A hub that is silent for `hub_timeout_s` seconds is given up; before it has let this
        member in, for `patience_s` (0: the same). `check` is called all the time, and may raise
        what ends it."""
        self._desk, self._join, self._transport = desk, join, transport
        self._clock, self._hub_timeout_s = clock, hub_timeout_s
        self._silence_s, self._check = patience_s or hub_timeout_s, check
        self._connections, self._is_refused = 1, False
        self._heard = self._asked = clock()
        self.is_in = False
        """Whether the hub has let this member in."""
        self.wait_s = 0.0
        """Seconds that all waiting for messages took."""

    @property
    def silent_s(self) -> float:
        """Seconds for which nothing has come from the hub."""
        return self._clock() - self._heard

    def run(self) -> None:
        """Join, and work to the end of the job. Raises HubUnreachable, Refused, BadMessage, and
        what the stage's computing raises."""
        self._ask_again()
        try:
            while not self._desk.is_over:
                self._check()
                self._take_in(0.0)
                sent = self._desk.work()
                if sent is None:
                    began = self._clock()
                    self._take_in(0.2)
                    self.wait_s += self._clock() - began
                else:
                    self._send(sent)
            self._send([*([] if (f := self._desk.figure) is None else [f]), Leave("done")])
        except (Exception, Stopped) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._send([Leave("".join(filter(str.isprintable, reason)))])
            raise

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._transport.send(pack(message))

    def _take_in(self, timeout_s: float) -> None:
        """Handle all that has come, after waiting for the first at most so long."""
        while (frames := self._transport.receive(timeout_s)) is not None and not self._desk.is_over:
            timeout_s = 0.0
            self._heard = self._clock()
            try:
                self._desk.handle(unpack(frames))
                self.is_in, self._is_refused, self._silence_s = True, False, self._hub_timeout_s
            except Refused as refused:
                # The hub has not noticed yet that this member's last process, or connection, died.
                if refused.code not in ("name", "unknown"):
                    raise
                self._is_refused = True
        now, transport = self._clock(), self._transport
        if now - self._heard > self._silence_s:
            raise HubUnreachable(f"nothing from the hub for {self._silence_s:g} s")
        if not isinstance(transport, Reconnecting):
            return
        count = transport.connections
        if count > self._connections or count < 0:  # what was on the old one may be lost
            self._connections = max(1, count)
            self._ask_again()
        elif now - max(self._heard, self._asked) > 5 * AGAIN_S:
            transport.reconnect()
            self._connections = 1
            self._ask_again()
        elif self._is_refused and now - self._asked > AGAIN_S:
            self._ask_again()

    def _ask_again(self) -> None:
        self._asked, self._is_refused = self._clock(), False
        self._send([replace(self._join, session=self._desk.generation)])
