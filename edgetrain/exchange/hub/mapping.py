"""A hub whose members connect to each other, too: it hands out a map of them."""

from __future__ import annotations

from typing import Any

from edgetrain.exchange.hub.effects import Effect, Send
from edgetrain.exchange.hub.membership import turn_away
from edgetrain.exchange.hub.places import Assign, Places
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.messages import CODES, Join, Leave, Map, Message, Reached, Resume


class MappingHub(Hub):
    """A Hub with `places`: training begins once all members have tried to reach each other.

    A member that can neither be reached nor dial is refused. After the start a message or a tick
    that changes who is in is followed by a new map to all.
    """

    def __init__(self, *args: Any, assign: Assign, **kwargs: Any) -> None:
        """`assign` decides who reduces what; the rest is as for a Hub."""
        super().__init__(*args, **kwargs)
        self.places = Places(assign)
        self.membership.is_ready = lambda: self.places.is_settled

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Join | Resume) and not message.address:
            return turn_away(sender, message.name, "peers", CODES["peers"])
        if not isinstance(message, Join | Resume | Leave | Reached):
            return super().handle(sender, message, now)
        member = self.members.get(sender)
        if member is not None and isinstance(message, Reached):
            member.mark_heard()
            self.places.accept(member, message)
            return self._update_map(now)
        effects = super().handle(sender, message, now)
        if isinstance(message, Leave):  # the next tick tells the others
            return effects
        told = self._update_map(now)
        member = self.members.get(sender)
        knows = any(_is_map(effect) for effect in told) or self.places.state == "gathering"
        if member is not None and not knows:
            told = [self.places.map_to(member)]
        return told + effects  # so that who is told to start knows the others

    def tick(self, now: float) -> list[Effect]:
        return super().tick(now) + self._update_map(now)

    def _update_map(self, now: float) -> list[Effect]:
        """Tell all members where the others are, if that has changed; start if that was missing."""
        full, started = len(self.members) >= self.policy.members, self.started
        told = self.places.update(self.members, self.epoch, full=full, started=started, now=now)
        return told + self._start_if_ready(now)


def _is_map(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Map)
