"""A hub that a member hosts: it has no journal, so what another one needs to go on in its place is
with the members.

They have its base, bit for bit, and keep each contribution until the reply to it is applied. Every
reply and every base say whose contributions are in it, so that they also know which are not. With a
reducer is lost what its lossy replies have left out so far, and what an outer rule remembers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from edgetrain.exchange.hub.cutting import from_elsewhere
from edgetrain.exchange.hub.effects import Effect, Send, Write
from edgetrain.exchange.hub.protocol import GoOn, Hub, HubPart, IsLost, nobody
from edgetrain.exchange.hub.records import Round, Seat, State
from edgetrain.exchange.messages import Message, Reply, Start
from edgetrain.vectors.vector import Vector, checksum


class HostedPart(HubPart):
    """The part of a hub that a member hosts."""

    def handle(self, sender: bytes, message: Message, now: float, go_on: GoOn) -> list[Effect]:
        return self._with_names(go_on())

    def tick(self, now: float, go_on: GoOn) -> list[Effect]:
        return self._with_names(go_on())

    def lose(self, effects: list[Effect], is_lost: IsLost = nobody) -> list[Effect]:
        return self._with_names(effects)

    def _with_names(self, effects: list[Effect]) -> list[Effect]:
        """The same; the first part of each reply says whose contributions are in it, and where a
        member begins, whose are in its base."""
        records = [effect.record for effect in effects if isinstance(effect, Write)]
        rounds = {record.round: record for record in records if isinstance(record, Round)}
        named: dict[int, Reply] = {}
        """By round: one reply goes to all, and is packed once."""
        found: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(message=Reply(part=0) as reply) if reply.round in rounds:
                    record = rounds[reply.round]
                    first = named.setdefault(reply.round, replace(reply, merged=_merged_of(record)))
                    found.append(Send(effect.to, first))
                case Send(message=Start() as start):
                    known = (*self.hub.members, *self.hub.members.away)
                    each = tuple((m.name, m.merged) for m in known if m.merged)
                    found.append(Send(effect.to, replace(start, each=each)))
                case _:
                    found.append(effect)
        return found


def _merged_of(record: Round) -> tuple[tuple[str, int], ...]:
    return tuple({each.member: each.meant_for + 1 for each in record.counted}.items())


def take_over(
    hub: Hub, state: State, base: Vector | None, applied: int, merged: Mapping[str, int], now: float
) -> None:
    """Let a fresh `hub` go on in place of a reducer that is lost. `state` has the members, `base`
    is that after `applied` replies, and of each member contributions with numbers below `merged`
    are in it, none of one that is not there. Raises Diverged, ConfigError."""

    def seats(known: Iterable[Seat]) -> tuple[Seat, ...]:
        found = from_elsewhere(known)
        return tuple(replace(seat, next_round=merged.get(seat.name, 0)) for seat in found)

    first = hub.terms.stretch.of(state.elements).start
    known = () if base is None else ((applied, checksum(base, first)),)
    state = replace(
        state, agreed=hub.agreed(), round=applied, seats=seats(state.seats),
        away=seats(state.away), checksums=known, base=base,
    )  # fmt: skip
    hub.restore(state, (), now)
