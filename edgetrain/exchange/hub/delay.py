"""How far ahead of their replies a job's members may be: the delay in force, and what follows.

Numbers of rounds and steps. No member, no message; the time that links take comes as the steps that
members say they need.
"""

from __future__ import annotations

from collections.abc import Iterable

AUTO_ROUNDS = 3
"""With an automatic delay: after so many synchronous rounds the fleet agrees on one, and again
after two, four, eight … times as many, when slow start is over and the link may have changed."""

MAX_AHEAD = 1024
"""Rounds a member may be ahead of the oldest open one, whatever the delay."""

MAX_IN_FLIGHT = 128
"""Rounds that an automatic delay may hide, whatever members say they need."""


class AgreedDelay:
    """Of one job. `delay`: in local steps, of which a round has `every`; None: measured."""

    def __init__(self, every: int, delay: int | None) -> None:
        self.delay = delay or 0
        """In force now; journals bring it back."""
        self._every = every
        self._is_measured = delay is None
        self._longest = 0
        """The longest delay so far: members still act on it for a while."""

    def measure(self, round: int, wanted: Iterable[int]) -> None:
        """This round closes, and those who are in it want these delays: where it is time to agree
        on one, take what the slowest would have needed."""
        turns, odd = divmod(round + 1, AUTO_ROUNDS)
        if self._is_measured and not odd and turns.bit_count() == 1:
            self.delay = min(max(wanted, default=self.delay), MAX_IN_FLIGHT * self._every)
            self._longest = max(self._longest, self.delay)

    @property
    def in_flight(self) -> int:
        """Rounds that a member may be ahead of its replies."""
        return self.delay // self._every + 1

    @property
    def slack(self) -> int:
        """Rounds that a member may be ahead of the hub, or behind: four times what its delay asks
        for, because delays change and newcomers begin ahead. What it sends is kept until then."""
        return min(MAX_AHEAD, 4 * (max(self._longest, self.delay) // self._every + 2))
