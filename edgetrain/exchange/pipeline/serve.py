"""Drivers of a pipeline's two halves: a relay on a hub's end, a stage on a member's.

They read the clock and move messages; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edgetrain.errors import BadMessage, HubUnreachable, Refused
from edgetrain.exchange.hub.effects import Note, Observed, Send
from edgetrain.exchange.limits import SenderRate
from edgetrain.exchange.messages import Join, Leave, Message, pack, unpack
from edgetrain.exchange.pipeline.desk import StageDesk
from edgetrain.exchange.pipeline.relay import Relay
from edgetrain.exchange.transport import HubTransport, MemberTransport, Reconnecting


def relay_messages(
    relay: Relay,
    transport: HubTransport,
    clock: Callable[[], float],
    observe: Callable[[Observed], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve a pipeline until its job is over or `stop` answers true, asked once a beat."""
    rate, garbled = SenderRate(), 0

    def carry_out(effects: Iterable[Send | Observed]) -> None:
        for effect in effects:
            if not isinstance(effect, Send):
                observe(effect)
            elif not transport.send(effect.to, pack(effect.message)):
                carry_out(relay.unreachable(effect.to))

    while not relay.finished and not stop():
        for sender, frames in transport.poll(relay.beat_s / 4):
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
        outage_s: float,
    ) -> None:
        """A hub that is silent for `outage_s` seconds is given up."""
        self._desk, self._join, self._transport = desk, join, transport
        self._clock, self._outage_s = clock, outage_s
        self._connections, self._is_refused = 1, False
        self.wait_s = 0.0
        """Seconds that all waiting for messages took."""

    def run(self) -> None:
        """Join, and work to the end of the job. Raises HubUnreachable, Refused, BadMessage, and
        what the stage's computing raises."""
        self._send([self._join])
        self._heard = self._asked = self._clock()
        try:
            while not self._desk.is_over:
                self._take_in(0.0)
                sent = self._desk.work()
                if sent is None:
                    began = self._clock()
                    self._take_in(0.2)
                    self.wait_s += self._clock() - began
                else:
                    self._send(sent)
        except Exception as error:
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
            except Refused as refused:
                # The hub has not noticed yet that this member's last process, or connection, died.
                if refused.code not in ("name", "unknown"):
                    raise
                self._is_refused = True
        self._check_connection()

    def _check_connection(self) -> None:
        now, transport = self._clock(), self._transport
        if now - self._heard > self._outage_s:
            raise HubUnreachable(f"nothing from the hub for {self._outage_s:g} s")
        if not isinstance(transport, Reconnecting):
            return
        if transport.connections > self._connections:  # what was on the old one may be lost
            self._connections = transport.connections
            self._ask_again()
        elif now - max(self._heard, self._asked) > 5 * AGAIN_S:
            transport.reconnect()
            self._connections = 1
            self._ask_again()
        elif self._is_refused and now - self._asked > AGAIN_S:
            self._ask_again()

    def _ask_again(self) -> None:
        self._asked, self._is_refused = self._clock(), False
        self._send([self._join])
