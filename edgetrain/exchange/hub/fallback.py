"""When a group of servers steps in for devices that are gone, and when it steps out.

A pure function of what the hub sees and the time, which is an argument. Nothing is started here:
`training/fallback.py` does what this decides.

    state    what the hub sees                                            next state
    out      fewer than `quorum` members, for `after_s`                   in
    out      a member left for want of memory                             in
    out      a pace below SLOW of the servers' rate                       in
    in       at least `quorum`, for `back_s`, all of these are back, and  out
             the pace is at least LEVEL of that rate

The pace is measured over `after_s`, or LEAST rounds if these take longer. No two changes are less
than `back_s` apart. Members that have finished count as here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgetrain.errors import lacks_memory
from edgetrain.exchange.hub.evaluators import DONE

SLOW, LEVEL = 0.8, 0.9
"""Shares of the servers' rate: a fleet is slow below the first, and no more from the second on."""
LEAST = 10
"""Rounds, at the servers' rate, that a pace is measured over: it grows by a round at a time."""


@dataclass(frozen=True)
class FleetPace:
    """The pace of a job, and its expected pace on servers."""

    steps: int
    """In the rounds merged so far."""
    local_steps: int
    """Steps in a round."""
    rate: float
    """Steps a second that servers would take."""


@dataclass(frozen=True)
class StepIn:
    """A group is to be started, with the data of these members."""

    missing: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class StepOut:
    """The group is to finish its step and leave."""

    reason: str


class Fallback:
    """The rule. The job's members are m0, m1, …"""

    def __init__(self, members: int, quorum: int, after_s: float, back_s: float) -> None:
        self._names = [f"m{index}" for index in range(members)]
        self._quorum, self._after_s, self._back_s = quorum, after_s, back_s
        self.is_in = False
        """Whether a group is to be there."""
        self._done: set[str] = set()
        self._lacking: dict[str, str] = {}
        """Members that left for want of memory and are not back, with what they said."""
        self._changed = float("-inf")
        self._since: float | None = None
        """When what would change the state began; None: it is not so."""
        self._is_slow = False
        self._took = ""
        """The pace beside the servers', in words; "": it is not measured."""
        self._measured: tuple[float, int] | None = None
        """When the pace began to be measured, and the steps by then."""

    def note_left(self, name: str, reason: str) -> None:
        if name in self._names and reason == DONE:
            self._done.add(name)
        elif name in self._names and lacks_memory(reason):
            self._lacking[name] = reason

    def look(
        self, here: Iterable[str], now: float, pace: FleetPace | None = None
    ) -> StepIn | StepOut | None:
        """Decide. `here`: the members that can be reached; without a `pace` none is asked for. Call
        it with each tick, once training has begun: it notes since when what it sees is so."""
        present = {*here, *self._done}
        for name in present & self._lacking.keys():
            del self._lacking[name]
        missing = tuple(i for i, name in enumerate(self._names) if name not in present)
        count = len(self._names) - len(missing)
        self._measure(None if self._done else pace, now)
        may_do_without = count >= self._quorum and not self._lacking and not self._is_slow
        if may_do_without is not self.is_in:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        so_s = now - self._since
        is_known = bool(self._lacking or self._is_slow)
        patience_s = self._back_s if self.is_in else 0.0 if is_known else self._after_s
        if so_s < patience_s or now - self._changed < self._back_s:
            return None
        self.is_in, self._changed, self._since = not self.is_in, now, None
        reason = f"{count} of {len(self._names)} members are here for {so_s:.0f} s"
        if not self.is_in:
            took = f", and {self._took}" if self._took else ""
            return StepOut(f"{reason}, hub.quorum is {self._quorum}{took}")
        if self._lacking:
            name, why = next(iter(self._lacking.items()))
            return StepIn(missing, f"{name} left: {why}")
        if self._is_slow:
            everybody = tuple(range(len(self._names)))
            return StepIn(
                missing or everybody, f"{count} of {len(self._names)} members {self._took}"
            )
        return StepIn(missing, f"{reason}, fewer than hub.quorum = {self._quorum}")

    def _measure(self, pace: FleetPace | None, now: float) -> None:
        """Compare the pace with the servers', each time that enough time has passed for that."""
        if pace is None:
            self._measured, self._is_slow, self._took = None, False, ""
            return
        since, before = self._measured = self._measured or (now, pace.steps)
        took_s = now - since
        if took_s < max(self._after_s, LEAST * pace.local_steps / pace.rate):
            return
        self._measured = now, pace.steps
        found = (pace.steps - before) / took_s
        self._is_slow = found < (LEVEL if self._is_slow else SLOW) * pace.rate
        self._took = (
            f"took {found:.3g} steps a second for {took_s:.0f} s, servers would take "
            f"{pace.rate:.3g}"
        )
