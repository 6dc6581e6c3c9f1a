"""A fleet's figures on the data that its members hold out of their own: mean, median, worst tenth.

Members say sums and counts, so the mean is that over all their data. Medians and the rest go over
members, each counting once however much data it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median, pstdev
from typing import Any

from edgetrain.runs.metrics.lines import Record

Pair = tuple[float, float]
"""A sum, and what it is a sum over."""


@dataclass(frozen=True)
class Spread:
    """A figure over members. None of them has a count of 0."""

    mean: float
    """Over the data of all members."""
    median: float
    worst_tenth: float
    """Mean of the worst tenth of members; of one at least."""
    deviation: float
    """Standard deviation over members."""
    members: int
    count: float
    """Denominator of `mean`: samples, as a rule."""

    @classmethod
    def of(cls, pairs: Iterable[Pair], better: str) -> Spread | None:
        """`better` is "higher" or "lower"; None: nobody has said anything."""
        known = [pair for pair in pairs if pair[1] > 0]
        if not known:
            return None
        values = sorted((value / count for value, count in known), reverse=better == "lower")
        worst = values[: max(1, len(values) // 10)]
        count = math.fsum(count for _, count in known)
        return cls(
            mean=math.fsum(value for value, _ in known) / count,
            median=median(values),
            worst_tenth=math.fsum(worst) / len(worst),
            deviation=pstdev(values),
            members=len(values),
            count=count,
        )


@dataclass
class OwnData:
    """Evaluations on members' own data, line by line."""

    at: dict[int, dict[str, dict[str, Pair]]] = field(default_factory=dict)
    """By steps of the job that were over, member and name of the figure."""

    def add(self, record: Record) -> None:
        """Add an "own_eval" line, of the member itself or of the hub about it. Of two that say the
        same the later one holds."""
        step, member = record.get("step") or 0, str(record.get("about") or record["member"])
        found = self.at.setdefault(step, {}).setdefault(member, {})
        found.update((name, (value, count)) for name, value, count in record.get("sums") or ())

    def merge(self, other: OwnData) -> None:
        """Add what other lines said; of two that say the same the other holds."""
        for step, members in other.at.items():
            for member, found in members.items():
                self.at.setdefault(step, {}).setdefault(member, {}).update(found)

    @property
    def last(self) -> int | None:
        """The newest step at which members evaluated; not one in whose middle the run was cut off,
        where fewer than half as many did as the time before. None: there is none."""
        steps = sorted(self.at)[-2:]
        if len(steps) > 1 and 2 * len(self.at[steps[1]]) < len(self.at[steps[0]]):
            return steps[0]
        return steps[-1] if steps else None

    def pairs(self, step: int, name: str) -> list[Pair]:
        return [found[name] for found in self.at.get(step, {}).values() if name in found]

    def values(self, step: int, name: str) -> list[float]:
        """Values of all reporting members, in no order."""
        return [value / count for value, count in self.pairs(step, name) if count]

    def values_at_the_end(self, name: str) -> list[float]:
        return [] if self.last is None else self.values(self.last, name)

    def course(self, name: str) -> list[tuple[float, float, float, float]]:
        """Along the job's steps: (steps that were over, mean over all data, and what a tenth and
        nine tenths of members are below)."""
        found = []
        for step in sorted(self.at):
            if values := sorted(self.values(step, name)):
                total, count = map(math.fsum, zip(*self.pairs(step, name), strict=True))
                tenth = (len(values) - 1) // 10
                found.append((float(step), total / count, values[tenth], values[-1 - tenth]))
        return found

    def names(self) -> list[str]:
        """Names of figures, in the order of their first report."""
        every = (name for by in self.at.values() for found in by.values() for name in found)
        return list(dict.fromkeys(every))

    def newest(self, name: str) -> Spread | None:
        """A figure over members as it is by now; None: nobody has said anything of it."""
        return (
            None if self.last is None else Spread.of(self.pairs(self.last, name), better_of(name))
        )

    def at_the_end(self, metric: str, better: str) -> dict[str, Any]:
        """For a summary: at which step, and every figure's spread; {}: nobody evaluated."""
        if (step := self.last) is None:
            return {}
        spreads = {
            name: Spread.of(self.pairs(step, name), better_of(name, metric, better))
            for name in self.names()
        }
        return {"step": step, "figures": {n: vars(found) for n, found in spreads.items() if found}}


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row for each figure of "own_eval" lines; those that a hub was told only where no member
    writes lines of its own."""
    every = list(records)
    chosen = [record for record in every if not record.get("about")] or every
    return [
        {
            **{key: record.get(key) for key in ("t", "step", "round")},
            "member": str(record.get("about") or record["member"]),
            **{"figure": name, "sum": value, "count": count},
            "value": value / count if count else None,
        }
        for record in chosen
        for name, value, count in record.get("sums") or ()
    ]


def better_of(name: str, metric: str = "", better: str = "higher") -> str:
    """Which way a figure improves: as the task's metric does if it is that, a loss or an error
    downwards, others upwards."""
    if name == metric:
        return better
    return "lower" if "loss" in name or "error" in name else "higher"
