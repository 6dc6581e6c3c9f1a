"""Times at which devices are away: scheduled in the job, or drawn by chance. Pure and seeded.

Only the times; their effect on a member is decided elsewhere. Seconds count from the start of
training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from edgetrain.files.tables import ranged, read


@dataclass(frozen=True, slots=True)
class Absence:
    """Members that lose power at `at_s` and start again `for_s` seconds later; empty means all."""

    at_s: float = ranged(MISSING, 0, 1e9, unit="s")
    for_s: float = ranged(MISSING, 0, 1e9, unit="s")
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Presence:
    """The absences of all members.

    `absences` are scheduled. In addition a member stays for exponential times of mean `online_s`
    and is away for exponential times of mean `offline_s`; if `online_s` is 0, only the schedule
    counts.
    """

    absences: tuple[Absence, ...] = ()
    online_s: float = 0.0
    offline_s: float = 0.0
    seed: int = 0

    @property
    def is_steady(self) -> bool:
        return not self.absences and not self.online_s

    def is_off_at_first(self, member: int) -> bool:
        mine = (each for each in self.absences if not each.members or member in each.members)
        return any(absence.at_s == 0 for absence in mine)

    def of(self, member: int) -> Iterator[tuple[float, float]]:
        """Yield (leaves, returns) of a member in time order; endless if `online_s` is not 0."""
        planned = sorted(
            (absence.at_s, absence.at_s + absence.for_s)
            for absence in self.absences
            if not absence.members or member in absence.members
        )
        return _apart(planned, self._by_chance(member))

    def _by_chance(self, member: int) -> Iterator[tuple[float, float]]:
        rng = random.Random(f"{self.seed} {member} presence")
        now = 0.0
        while self.online_s:
            goes = now + rng.expovariate(1 / self.online_s)
            now = goes + rng.expovariate(1 / self.offline_s) if self.offline_s else goes
            yield goes, now


def _apart(
    planned: Sequence[tuple[float, float]], chance: Iterator[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Merge both in time order; overlapping absences become one."""
    queue = list(planned)
    drawn = next(chance, None)
    held: tuple[float, float] | None = None
    while queue or drawn is not None:
        if drawn is None or (queue and queue[0] <= drawn):
            one = queue.pop(0)
        else:
            one, drawn = drawn, next(chance, None)
        if held is None:
            held = one
        elif one[0] <= held[1]:
            held = held[0], max(held[1], one[1])
        else:
            yield held
            held = one
    if held is not None:
        yield held


def parse_absences(tables: Iterable[Mapping[str, Any]], members: int) -> tuple[Absence, ...]:
    """Read absences from a job's [[absences]] tables. ConfigError names the table, key and range.

    >>> parse_absences([{"at_s": 5, "for_s": 60, "members": [1]}], 4)
    (Absence(at_s=5.0, for_s=60.0, members=(1,)),)
    """
    return tuple(
        read(Absence, table, prefix=f"absences[{i}].", within={"members": members - 1})
        for i, table in enumerate(tables)
    )
