"""The hub's driver: carries out what the pure protocol says, over any transport.

It reads the clock and moves messages; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from edgetrain.errors import BadMessage
from edgetrain.hub import Closed, Effect, Hub, Note, Send
from edgetrain.messages import Buffer, Message, pack, unpack
from edgetrain.transport import HubTransport

Clock = Callable[[], float]


class Observer(Protocol):
    """Who wants to know what the hub does (metrics, a person)."""

    def __call__(self, effect: Note | Closed) -> None: ...


def serve(
    hub: Hub,
    transport: HubTransport,
    clock: Clock,
    observe: Observer,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run the hub until its job is over or `stop` answers true (asked a few times a beat)."""
    pause = hub.policy.beat_s / 4
    next_tick = clock()
    while not hub.finished and not stop():
        for sender, frames in transport.poll(max(0.0, next_tick - clock())):
            try:
                message = unpack(frames)
            except BadMessage as error:
                observe(Note("refused", "?", str(error)))
                continue
            _carry_out(hub.handle(sender, message, clock()), hub, transport, clock, observe)
        if clock() >= next_tick:
            next_tick = clock() + pause
            _carry_out(hub.tick(clock()), hub, transport, clock, observe)


def _carry_out(
    effects: Iterable[Effect],
    hub: Hub,
    transport: HubTransport,
    clock: Clock,
    observe: Observer,
) -> None:
    # One reply goes to everyone: it is packed once, and the transport sees the same frames.
    packed: tuple[Message, list[Buffer]] | None = None
    for effect in effects:
        if not isinstance(effect, Send):
            observe(effect)
            continue
        if packed is None or packed[0] is not effect.message:
            packed = effect.message, pack(effect.message)
        if not transport.send(effect.to, packed[1]):
            _carry_out(hub.unreachable(effect.to, clock()), hub, transport, clock, observe)
