"""A hub that asks other hubs of its job, and itself, one question after the other.

What is asked is a script: a generator that yields (hub, question) and is sent the answer. A
question is asked again until it is answered: the other hub answers it again. No socket here:
`connect` makes the ways to others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from edgetrain.errors import BadMessage, EdgetrainError
from edgetrain.exchange.hub.effects import Effect, Note, Send
from edgetrain.exchange.hub.shared import SharedHub
from edgetrain.exchange.messages import Handover, Message, Refuse, pack, unpack
from edgetrain.exchange.transport import MemberTransport

Script = Generator[tuple[str, Handover], Handover, None]
"""See the module. "" is this hub."""

Connect = Callable[[str], tuple[MemberTransport, str]]
"""A way to the hub at an address, and its public key as text. Raises EdgetrainError."""

PATIENT_BEATS = 8
"""Beats that a hub has to answer the first question, and one that is removed the last."""

AGAIN_BEATS = 4
"""Beats until a question is asked again: the connection, or the hub, may have been lost."""

OWN = b""
"""In place of a connection: this hub asks itself."""


class AskingHub(SharedHub):
    """A SharedHub with a script. Owns its ways to others."""

    def __init__(self, *args: Any, connect: Connect, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connect = connect
        self._ends: dict[str, MemberTransport] = {}
        self._script: Script | None = None
        self._question: tuple[str, Handover] | None = None
        self._asked = self._until = 0.0
        self._asks = 0
        """How often it has asked others."""
        self._said: list[Effect] = []
        """What is to be done next."""
        self._outgoing: list[tuple[str, Handover]] = []
        """Leaves with the next `hear`: what the journal has to have before is there then."""

    def handle(self, sender: bytes, message: Message, now: float) -> list[Effect]:
        return self._listened(super().handle(sender, message, now), now) + self._drain(now)

    def tick(self, now: float) -> list[Effect]:
        effects = self._listened(super().tick(now), now)
        if self._question is None:
            return effects + self._drain(now)
        hub, asked = self._question
        if asked.stage == 0 and now >= self._until:
            self._hear(hub, replace(asked, stage=1, why="it does not answer"), now)
        elif asked.stage == 8 and now >= self._until and not asked.end - asked.first:
            self._hear(hub, replace(asked, stage=9), now)  # a hub that is removed may be gone
        elif now - self._asked >= AGAIN_BEATS * self.policy.beat_s:
            self._ask(now)
        return effects + self._drain(now)

    def hear(self, now: float) -> list[Effect]:
        """Ask other hubs what is to be asked, and take in what they have answered."""
        outgoing, self._outgoing = self._outgoing, []
        for hub, asked in outgoing:
            self._ends[hub].send(pack(asked))
        for hub, end in [*self._ends.items()]:
            while self._ends.get(hub) is end and (frames := end.receive(0.0)) is not None:
                try:
                    message = unpack(frames)
                except BadMessage:
                    continue
                if isinstance(message, Handover):
                    self._hear(hub, message, now)
                elif isinstance(message, Refuse) and self._question is not None:
                    _, asked = self._question
                    if asked.stage == 0:
                        why = f"it refused: {message.reason}"[:200]
                        self._hear(hub, replace(asked, stage=1, why=why), now)
        return self._drain(now)

    def _way_to(self, hub: str) -> str:
        """Connect to a hub. Returns its public key. Raises EdgetrainError."""
        if hub in self._ends:
            self._ends.pop(hub).close()
        self._ends[hub], key = self._connect(hub)
        return key

    def _begin(self, script: Script, now: float) -> None:
        self._script = script
        self._go_on(None, now)

    def _go_on(self, answer: Handover | None, now: float) -> None:
        assert self._script is not None
        try:
            self._question = next(self._script) if answer is None else self._script.send(answer)
        except StopIteration:
            self._script = self._question = None
            return
        self._until = now + PATIENT_BEATS * self.policy.beat_s
        self._ask(now)

    def _ask(self, now: float) -> None:
        assert self._question is not None
        hub, asked = self._question
        self._asked = now
        if not hub:
            self._said += self._answer(OWN, asked, now)
            return
        if hub not in self._ends:
            try:
                self._way_to(hub)
            except EdgetrainError as error:
                self._said.append(Note("map", "hub", f"{hub}: {error.message}"))
                return
        self._asks += 1  # one of them may be so new that the other hub does not know it
        sessions = [member.session for member in self.members if member.session] or [0]
        asked = replace(asked, session=sessions[self._asks % len(sessions)] if asked.stage else 0)
        self._outgoing.append((hub, asked))

    def _hear(self, hub: str, told: Handover, now: float) -> None:
        if self._question is None:
            return
        whom, asked = self._question
        about = whom, asked.stage | 1, asked.number, asked.round, asked.part
        if about == (hub, told.stage, told.number, told.round, told.part):
            self._question = None
            self._go_on(told, now)

    def _listened(self, effects: list[Effect], now: float) -> list[Effect]:
        """What is to be done, without answers of this hub to itself: these are heard."""
        found = []
        for effect in effects:
            told = effect.message if isinstance(effect, Send) and effect.to == OWN else None
            if isinstance(told, Handover):
                self._hear("", told, now)
            else:
                found.append(effect)
        return found

    def _drain(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._said:
            said, self._said = self._said, []
            effects += self._listened(said, now)
        return effects
