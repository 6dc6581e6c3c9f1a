"""Which member had which slice when, at a hub that hands out work; and what has to hold. Pure.

Times are seconds since training began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from chaos.schedule import Happening, Kind
from edgetrain.exchange.further_messages import Assign, Computed
from edgetrain.exchange.transport import SILENCE_S

NOTICED_S: dict[Kind, float] = {"kill": 0.0, "power": SILENCE_S}
"""Seconds until a connection is known to be lost to which messages go, once such a thing happens: a
machine whose process is killed closes it."""

Slice = tuple[int, int]
"""(round, number)."""


class Dealings:
    """Records what the hub gives out, and what members answer."""

    def __init__(self) -> None:
        self.given: dict[Slice, list[tuple[float, str]]] = defaultdict(list)
        """When each slice went out, and to whom."""
        self.answered: dict[Slice, list[tuple[float, str]]] = defaultdict(list)
        """When a whole answer left, and whose it was."""
        self.closed: dict[int, float] = {}
        """When each round was written down first."""

    def saw_given(self, member: str, message: Assign, now: float) -> None:
        """The hub sends work."""
        for slice in message.slices:
            self.given[message.round, slice].append((now, member))

    def saw_answer(self, member: str, message: Computed, now: float) -> None:
        """A member sends a part of an answer."""
        if message.part + 1 == message.parts:
            self.answered[message.round, message.slice].append((now, member))

    def held_by(self, member: str, now: float) -> list[Slice]:
        """What only this member has at this time."""
        round = sum(at <= now for at in self.closed.values())
        found = []
        for slice, given in self.given.items():
            if slice[0] == round and any(at <= now for at, _ in self.answered[slice]) is False:
                before = [name for at, name in given if at <= now]
                found += [slice] if before and before[-1] == member else []
        return found

    def next_given(self, slice: Slice, now: float) -> float | None:
        """When somebody got it after this, or it was not wanted any more; None: never."""
        later = [at for at, _ in self.given[slice] if at > now]
        later += [at for at, _ in self.answered[slice] if at > now]
        later += [self.closed[slice[0]]] if slice[0] in self.closed else []
        return min(later, default=None)


def too_late(
    dealings: Dealings, happenings: Sequence[Happening], noticed_s: float, end: float
) -> list[str]:
    """The slices of killed members that were given out too late: `noticed_s`, hub.lost_after_s and
    the beat by which a hub learns of a lost connection, after the kill, or after whatever else went
    wrong by then; `end`: of the run."""
    broken = []
    for kill in happenings:
        if kill.kind not in NOTICED_S:
            continue
        most = noticed_s + NOTICED_S[kill.kind]
        begins, until = kill.at_s, kill.at_s + most
        for other in happenings:  # in order of time
            if other is not kill and other.at_s <= until and other.at_s + other.for_s >= begins:
                begins = max(begins, other.at_s + other.for_s)
                until = begins + most
        for member in (f"m{index}" for index in kill.members):
            for slice in dealings.held_by(member, kill.at_s):
                again = dealings.next_given(slice, kill.at_s)
                if min(end, until) < (end if again is None else again):
                    at = "never" if again is None else f"at {again:.2f} s"
                    broken.append(
                        f"{member} was killed at {kill.at_s:.2f} s with slice {slice[1]} of round "
                        f"{slice[0]}, which was given out again {at}, not by {until:.2f} s"
                    )
    return broken
