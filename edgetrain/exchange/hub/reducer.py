"""A hub that a member hosts: it has no journal, so what another one needs to go on in its place is
with the members.

They have its base, bit for bit, and keep each contribution until the reply to it is applied. Every
reply and every base say whose contributions are in it, so that they also know which are not. With a
reducer is lost what its lossy replies have left out so far, and what an outer rule remembers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgetrain.exchange.hub.effects import Effect, Send, Write
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.records import Round, Seat, State
from edgetrain.exchange.messages import Message, Reply, Start
from edgetrain.exchange.transport import owned, owner_of
from edgetrain.vectors.vector import Vector, checksum


class ReducerHub(Hub):
    """A Hub of a stretch, without a journal."""

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        return self._with_names(super().handle(sender, message, now))

    def tick(self, now: float) -> list[Effect]:
        return self._with_names(super().tick(now))

    def take_over(
        self,
        state: State,
        base: Vector | None,
        applied: int,
        merged: Mapping[str, int],
        now: float,
    ) -> None:
        """Go on in place of a reducer that is lost, before anything else happens. `state` has the
        members, `base` is that after `applied` replies, and of each member contributions with
        numbers below `merged` are in it, none of one that is not there. Raises Diverged,
        ConfigError."""

        def seat(known: Seat) -> Seat:
            # It is at no connection of this hub yet; of its key that much is known.
            key, name = owner_of(known.address), known.name.encode()
            nowhere = owned(key, name) if key else b"?" + name
            return replace(known, address=nowhere, next_round=merged.get(known.name, 0))

        first = self.terms.stretch.of(state.elements).start
        known = () if base is None else ((applied, checksum(base, first)),)
        state = replace(
            state,
            agreed=self.state().agreed,
            round=applied,
            seats=tuple(map(seat, state.seats)),
            away=tuple(map(seat, state.away)),
            checksums=known,
            base=base,
        )
        self.restore(state, (), now)

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
                    found.append(replace(effect, message=first))
                case Send(message=Start() as start):
                    known = (*self.members, *self.members.away)
                    each = tuple((m.name, m.merged) for m in known if m.merged)
                    found.append(replace(effect, message=replace(start, each=each)))
                case _:
                    found.append(effect)
        return found


def _merged_of(record: Round) -> tuple[tuple[str, int], ...]:
    return tuple({each.member: each.meant_for + 1 for each in record.counted}.items())
