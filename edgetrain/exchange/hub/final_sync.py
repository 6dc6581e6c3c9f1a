"""The final sync: the short rounds without a delay at the end of a run.

Numbers of steps. No message, no clock, no fleet.

A delay, or long rounds, leave members where unequal data led each of them. A few short rounds, each
answered before the next begins, bring them together again (docs/decisions/032). Replies say K and
D; members apply that of a round D steps after its end, so the last one that they apply before the
final sync has to say how long the round in progress is:

    a reply that members apply            says K               says D
    K steps or more before the final sync    as before            as before
    later                                 up to the final sync    0
    to a round that ends at the final sync   the final sync's        0

With the second row members wait for all rounds in flight at once: of the replies to these the last
one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EVERY = 7
"""Steps in a round of a final sync. Without a delay rounds of as many or fewer need none."""


def share_for(chosen: float, apart: int) -> float:
    """The share of a run's steps to take so, where members may be `apart` (K + D) steps from each
    other before; `chosen` is CHOSEN or CHOSEN_ALIKE. 0: they are never far apart, and would only
    wait more."""
    return -chosen if apart > CLOSE else 0.0


CLOSE = EVERY
"""Steps that members may be apart (K + D) and lose nothing that a final sync would give back."""


@dataclass(frozen=True)
class FinalSync:
    """The end of one run."""

    steps: int
    begins: int
    """Those before it."""

    @classmethod
    def of(cls, share: float, steps: int) -> FinalSync:
        """At least the last `share` of a run of `steps`, in whole rounds."""
        rounds = max(1, math.ceil(round(share * steps / EVERY, 6)))
        return cls(steps, max(0, steps - rounds * EVERY))

    def pace_after(self, merged: int, local_steps: int, delay: int) -> tuple[int, int]:
        """(K, D) as the reply says them to the round with which `merged` steps of the run are
        merged, where these are in force; as they are: the final sync is not near yet."""
        left = self.begins - merged
        if left <= 0:
            return EVERY, 0
        # In the middle of a round a step has to be left, at which that round can end.
        if delay and delay + local_steps + (delay % local_steps > 0) <= left:
            return local_steps, delay
        return min(local_steps, left), 0

    def rounds_after(self, merged: int, local_steps: int) -> int:
        """Rounds that are not merged yet, `merged` steps of the run being merged and rounds having
        `local_steps` until the final sync begins."""
        left = max(0, self.begins - merged)
        return math.ceil(left / local_steps) + math.ceil((self.steps - merged - left) / EVERY)

    def told(self, local_steps: int, delay: int, trip_s: float) -> str:
        """What people should know as it begins, K and D in force until then; `trip_s`: of a
        reply, 0 if it is not known."""
        steps = self.steps - self.begins
        rounds = math.ceil(steps / EVERY)
        seconds = f", about {rounds * trip_s:.3g} s" if trip_s else ""
        return (
            f"Final synchronisation: the last {steps} of {self.steps} steps run in {rounds} rounds "
            f"without delay{seconds}, because members had diverged for {local_steps} + {delay} "
            "steps (K + D). Disable with strategy.final_sync = 0"
        )
