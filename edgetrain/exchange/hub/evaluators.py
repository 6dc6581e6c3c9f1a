"""Who evaluates the model: a member that says so. If it goes, the hub asks another one."""

from __future__ import annotations

from edgetrain.exchange.hub.effects import Effect, Event, Send
from edgetrain.exchange.hub.members import MemberRecord, Members
from edgetrain.exchange.messages import Evaluate

DONE = "done"
"""The reason of a member that leaves behind its last step."""


class Evaluators:
    """Which of the hub's `members` evaluate, and which one is to.

    The hub does not know whom a job chooses: it asks only after a member has gone that said it
    evaluates. Once a member has taken its last step the others are about to: nobody is asked.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._one_is_lost = False
        self._is_ending = False

    def note_gone(self, member: MemberRecord, event: Event, reason: str) -> None:
        self._is_ending = self._is_ending or (event == "left" and reason == DONE)
        self._one_is_lost = self._one_is_lost or member.evaluates

    def note_wanted(self) -> None:
        """The hub above a gateway says that nobody evaluates any more."""
        self._one_is_lost = True

    def ask(self) -> list[Effect]:
        """If nobody evaluates any more, ask the first member to. Called with each beat: the
        question may be lost, or the member that was asked."""
        if not self._one_is_lost or self._is_ending:
            return []
        others = [member for member in self._members if member.trains]
        if not others or any(member.evaluates for member in others):
            return []
        return [Send(min(others, key=lambda member: member.index).sender, Evaluate())]
