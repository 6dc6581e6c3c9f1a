"""How many rounds a job's members may be ahead of their replies: the delay in force, and what
follows from it.

Numbers of rounds and steps only. No member, no message, no time: how long links take is known as
the local steps that members ask for.
"""

from __future__ import annotations

from collections.abc import Iterable

AUTO_ROUNDS = 3
"""With an automatic delay the fleet agrees on one after this many synchronous rounds, and again
after two, four, eight … times as many, when slow start is over and the link may have changed."""

MAX_AHEAD = 1024
"""Rounds that a member may be ahead of the oldest open one, whatever the delay."""

MAX_IN_FLIGHT = 128
"""Rounds that an automatic delay may hide, whatever members ask for."""


class AgreedDelay:
    """The delay of one job, in local steps, of which a round has `every`. None: measured."""

    def __init__(self, every: int, delay: int | None) -> None:
        self.delay = delay or 0
        """In force now."""
        self._every = every
        self._is_measured = delay is None
        self._longest = 0
        """The longest delay so far: members still act on it for a while."""

    def agree(self, round: int, wanted: Iterable[int]) -> None:
        """This round closes, and its members ask for these delays. If it is time to agree on one,
        take the longest, which is what the slowest member needs."""
        turns, odd = divmod(round + 1, AUTO_ROUNDS)
        if self._is_measured and not odd and turns.bit_count() == 1:
            self.delay = min(max(wanted, default=self.delay), MAX_IN_FLIGHT * self._every)
            self._longest = max(self._longest, self.delay)

    def restore(self, delay: int) -> None:
        """A journal says that this delay is in force."""
        self.delay = delay

    @property
    def in_flight(self) -> int:
        """Rounds that a member may be ahead of its replies."""
        return self.delay // self._every + 1

    @property
    def slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind: four times what its delay needs,
        because delays change and newcomers begin ahead. The hub keeps what it sends until then."""
        return min(MAX_AHEAD, 4 * (max(self._longest, self.delay) // self._every + 2))
