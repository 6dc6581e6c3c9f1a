"""When training begins: with all members, or with enough of them. Pure: the time is an argument.

Who may join, and whether the base is here, is decided in `admission` and `base_transfer`.
"""

from __future__ import annotations

from edgetrain.exchange.hub.effects import Note
from edgetrain.exchange.hub.terms import Policy


class Starting:
    """Begin at once with `Policy.members` or, once `Policy.start_with` have been here for
    `Policy.start_after_s`, without the others, which join when they come."""

    def __init__(self) -> None:
        self._enough_since: float | None = None

    def is_due(self, policy: Policy, here: int, now: float) -> bool:
        """Whether to begin with this many members. Call it when one comes or goes, and with each
        tick: it notes since when enough are here."""
        if here < (policy.start_with or policy.members):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return here >= policy.members or now - self._enough_since >= policy.start_after_s


def begun(policy: Policy, here: int) -> Note:
    """The event: with this many members."""
    most = policy.members
    return Note("started", "hub", f"{'' if here >= most else f'{here} of '}{most} members")
