"""The delay of a job, as it is said: to members, to the hub, and by the job. How it is agreed on
while training goes on is the hub's business (`hub.delay`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MARGIN = 1.1
"""Members ask for a delay that is longer than their round trip by this factor."""

MAX_IN_FLIGHT = 128
"""Rounds that an automatic delay may hide, whatever members ask for."""

SHARE, APART_SHARE, SYNCED_SHARE = 8, 16, 7
"""See `Delay.together`: of members that stay together; of members that unequal data, or the noise
of small batches, lets diverge; and of those with unequal data and a final sync
(docs/decisions/004 has what that costs)."""

FIRST_WINDOW_BYTES = 14_480
"""TCP's default first window: ten segments (RFC 6928)."""

FINAL_SYNC_SHARE = 1 / 8
"""Of a run's steps, see `hub.final_sync.share_for`: of a tenth, a seventh and a fifth it had the
least to wait for where it gave back most (docs/decisions/032)."""

CHOSEN: Final = -FINAL_SYNC_SHARE
"""A negative share is one to take only if K and D ask for it: see `hub.final_sync.share_for`."""

CHOSEN_ALIKE: Final = -1 / 10
"""Share for similar data: there is less to give back (docs/decisions/032)."""


@dataclass(frozen=True)
class Delay:
    """D, the local steps that a reply may take: fixed, or measured while training goes on."""

    steps: int = 0
    """The delay in force; 0 for a measured one before training."""
    is_measured: bool = False
    """Whether replies say the next one. Only then `share` and `one_in_flight` count."""
    share: int = SHARE
    one_in_flight: bool = False
    """Whether rounds get as long as the delay, where the run can bear two of these."""
    final_sync: float = 0.0
    """The share of the run's steps, at its end, that are taken in short rounds without a delay
    (`hub.final_sync.FinalSync`); 0: none are; negative: as K and D ask for it (`share_for`)."""
    overlaps: bool = False
    """Whether trips longer than a sixteenth of the run are hidden in part, by long rounds."""
    quick_bytes: float = FIRST_WINDOW_BYTES
    """A message of at most this many bytes loses nothing to slow start after a long round; inf: TCP
    keeps its windows."""

    def together(self, local_steps: int, steps: int) -> int:
        """The most that K + D may be, the steps that a member may diverge from the fleet: one in
        `share` of the run's `steps` (0: not known), or two rounds of `local_steps` steps."""
        most = max(2 * local_steps, steps // self.share)
        return most if steps else (MAX_IN_FLIGHT + 1) * local_steps

    @property
    def code(self) -> int:
        """The delay as `Welcome` says it: the steps; -1: measured."""
        return -1 if self.is_measured else self.steps

    @classmethod
    def decoded(cls, code: int, steps: int) -> Delay:
        """The delay with this code, of which `steps` are in force."""
        return cls(steps, is_measured=code < 0)


AT_ONCE = Delay()
"""Every reply is waited for."""
