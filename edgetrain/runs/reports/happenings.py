"""Happenings in a run besides training: faults, absences, lost members, another delay.

A pure function of the lines of a run folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgetrain.runs.data import MARKED
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.reports import units

KINDS = {
    "fault": "faults",
    "absence": "absences",
    "gone": "members given up",
    "back": "members back",
    "error": "errors",
    "delay": "changes of the delay",
}
"""Kinds of happenings, and what several of them are called."""


@dataclass(frozen=True)
class Happening:
    """One of KINDS, at `t` seconds since training began, in a few words."""

    kind: str
    t: float
    said: str


def event_in_words(record: Record) -> tuple[str, str, str]:
    """Who, what and why, of an event's line: other machines send names and reasons."""
    said = record.get("about") or record["member"], record.get("event"), record.get("reason") or ""
    about, event, reason = (units.printable(str(each)) for each in said)
    return about, event, reason


def happenings(records: Iterable[Record]) -> tuple[Happening, ...]:
    listed, delays = [], []
    for record in records:
        kind, t = record["kind"], max(0.0, float(record["t"]))
        about, event, reason = event_in_words(record)
        if kind == "event" and event in MARKED:
            listed.append(Happening(event, t, f"{about} {event}" + f": {reason}" * bool(reason)))
        elif kind == "round" and isinstance(record.get("delay"), int):
            delays.append((t, int(record["delay"])))
    delays.sort()
    listed += [
        Happening("delay", t, f"delay {before} to {after}")
        for (_, before), (t, after) in itertools.pairwise(delays)
        if before != after
    ]
    return tuple(sorted(listed, key=lambda each: each.t))


MOST_MARKS = 25
"""Marks of a kind on one line; of more, as many are drawn, evenly chosen."""


def placed(
    those: Sequence[Happening],
    line: Sequence[tuple[float, float]],
    limits: tuple[float, float],
    end: float,
) -> list[tuple[Happening, float]]:
    """The happenings up to `end` seconds that are marked on a line of (seconds, figure), and the
    height of each within `limits`: kind by kind, and evenly chosen where there are many."""
    marks, (low, high) = [], limits
    for kind in KINDS:
        found = [each for each in those if each.kind == kind and each.t <= end]
        last = len(found) - 1
        if last >= MOST_MARKS:
            found = [found[place * last // (MOST_MARKS - 1)] for place in range(MOST_MARKS)]
        marks += [(e, min(max(_height_at(line, e.t, low), low), high)) for e in found]
    return marks


def _height_at(line: Sequence[tuple[float, float]], t: float, lowest: float) -> float:
    """The height of a line of points at `t`, or at its nearer end; `lowest` where it has none."""
    if not line:
        return lowest
    before = [point for point in line if point[0] <= t]
    after = [point for point in line if point[0] > t]
    if not before or not after:
        return after[0][1] if after else before[-1][1]
    (t0, y0), (t1, y1) = before[-1], after[0]
    return y0 + (y1 - y0) * (t - t0) / (t1 - t0)
