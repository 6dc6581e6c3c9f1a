"""The lines of a run beside its sums: steps and exchanges as columns, rounds and events as read.

For pages and pictures. Times are seconds since training began.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgetrain.runs.data import MemberData, RunData
from edgetrain.runs.metrics.lines import Record
from edgetrain.runs.shapes import PARTS


class Columns:
    """Lines of one kind as columns of float64, fed line by line; of more than `most` the last.

    `keys`: the columns, and what stands in each where a line has no number. `most` = 0: all.
    """

    def __init__(self, keys: Mapping[str, float], most: int = 0) -> None:
        self._keys, self._most = keys, most
        self._flat = array("d")
        self._rows: NDArray[Any] | None = None

    def add(self, record: Record) -> None:
        self._flat.extend(
            instead if (value := record.get(key)) is None else value
            for key, instead in self._keys.items()
        )
        room = self._most * len(self._keys)
        if room and len(self._flat) >= 2 * room:
            del self._flat[:-room]
        self._rows = None

    @property
    def rows(self) -> NDArray[Any]:
        """A structured array [lines], a field for each key, in the order of `t`."""
        if self._rows is None:
            flat = self._flat[-self._most * len(self._keys) :]
            rows = np.array(flat).view([(key, "f8") for key in self._keys])
            self._rows = rows[np.argsort(rows["t"], kind="stable")]
        return self._rows


STEP = {
    "t": nan, "steps": 1.0, "step": nan, "loss": nan, **dict.fromkeys(PARTS, 0.0),
    "sent_bytes": nan, "received_bytes": nan,
}  # fmt: skip
EXCHANGE = {
    "t": nan, "round": nan, "submitted_t": nan, "arrived_t": nan, "submit_s": 0.0, "decode_s": 0.0,
    "apply_s": 0.0, "sent_bytes": nan, "received_bytes": nan,
}  # fmt: skip
"""Columns of "exchange" lines: older folders have no bytes."""
_KEPT = {"step": STEP, "exchange": EXCHANGE}
_NEEDED = {
    "step": ("step", "sent_bytes", "received_bytes"),
    "exchange": ("round", "submitted_t", "arrived_t"),
}
"""Keys without which a line is damaged."""
MOST_KEPT, MOST_ROUNDS, MOST_EVENTS = 64, 12, 200
"""Members whose lines are kept where only the last of each are, and rounds then; events."""
_ROUTINE = ("joined", "started", "finished", "left")


@dataclass
class MemberLines(MemberData):
    """One member: the sums of its lines, and its lines."""

    kept: dict[str, Columns] = field(default_factory=dict)
    """Kept lines of each kind."""

    @property
    def steps(self) -> NDArray[Any]:
        """[lines] with the fields of STEP."""
        return (self.kept.get("step") or Columns(STEP)).rows

    @property
    def exchanges(self) -> NDArray[Any]:
        """[lines] with the fields of EXCHANGE."""
        return (self.kept.get("exchange") or Columns(EXCHANGE)).rows


@dataclass
class RunLines(RunData):
    """The sums of all lines of a run, and its lines."""

    kind_of_member = MemberLines
    most: int = 0
    """Lines of a kind that are kept of each of the first MOST_KEPT members, the last ones; 0: all,
    of all members."""
    merged: list[Record] = field(default_factory=list)
    """Lines of rounds that are kept."""
    events: list[Record] = field(default_factory=list)
    """Lines of events that are kept, without those of every member of a healthy run."""
    events_left_out: int = 0
    damaged: int = 0
    """Lines that lack what would be kept of them."""
    _members_kept: int = 0

    def add(self, record: Record) -> None:
        super().add(record)
        self._keep(record["kind"], record)

    @property
    def writers(self) -> dict[str, MemberLines]:
        """The members whose lines are here."""
        members = self.members.items()
        return {n: m for n, m in members if isinstance(m, MemberLines) and m.kept}

    def steps(self) -> NDArray[Any]:
        """The steps of all members in the order of time, with the fields of STEP; bytes are those
        of the whole fleet until then."""
        every = [member.steps.copy() for member in self.writers.values()]
        carried = "sent_bytes", "received_bytes"
        for steps in every:
            for key in carried:
                more = np.diff(steps[key], prepend=0.0)
                steps[key] = np.where(more < 0, steps[key], more)
        steps = np.concatenate([Columns(STEP).rows, *every])
        steps = steps[np.argsort(steps["t"], kind="stable")]
        for key in carried:
            steps[key] = steps[key].cumsum()
        return steps

    def _keep(self, kind: str, record: Record) -> None:
        if kind in _KEPT:
            if any(record.get(key) is None for key in _NEEDED[kind]):
                self.damaged += 1
                return
            member = self._of(record["member"])
            if not isinstance(member, MemberLines):  # no hub has steps of its own
                self.damaged += 1
            elif member.kept or not self.most or self._members_kept < MOST_KEPT:
                self._members_kept += not member.kept
                member.kept.setdefault(kind, Columns(_KEPT[kind], self.most)).add(record)
        elif kind == "round":
            self.merged.append(record)
            if self.most:
                del self.merged[:-MOST_ROUNDS]
        elif kind == "event" and record.get("event") not in _ROUTINE:
            if len(self.events) < MOST_EVENTS:
                self.events.append(record)
            else:
                self.events_left_out += 1
