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
    evaluates. Once a member has taken its last step the others are about to, and nobody is asked,
    unless they go on behind its last round: then what it has evaluated and kept is not the last.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._one_is_lost = False
        self._ended = -1
        """The newest `next_round` of members that have taken their last step; -1: none has."""

    def note_gone(self, member: MemberRecord, event: Event, reason: str) -> None:
        if event == "left" and reason == DONE:
            self._ended = max(self._ended, member.next_round)
        self._one_is_lost = self._one_is_lost or member.evaluates

    def note_wanted(self) -> None:
        """The hub above a gateway says that nobody evaluates any more."""
        self._one_is_lost = True

    def ask(self) -> list[Effect]:
        """If nobody evaluates any more, ask the first member to. Called with each beat: the
        question may be lost, or the member that was asked."""
        others = [member for member in self._members if member.trains]
        is_ending = self._ended >= max((member.next_round for member in others), default=0)
        is_wanted = self._one_is_lost and not any(member.evaluates for member in others)
        if not is_wanted or not others or is_ending:
            return []
        return [Send(min(others, key=lambda member: member.index).sender, Evaluate())]
