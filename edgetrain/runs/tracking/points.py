"""Lines of metrics as points of curves, by key (docs/reference/run-folder.md). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgetrain.runs.metrics.lines import HUB, Record, figures, told_evaluation


@dataclass(frozen=True)
class Point:
    """A number of one curve."""

    tag: str
    """The curve's name: "eval/accuracy"."""
    member: str
    """Whose it is; "": the fleet's."""
    axis: str
    """What `at` counts: "step" or "round"."""
    at: int
    t: float
    """Seconds since training began."""
    value: float


_STATUS = {
    "pace_s": "time/pace_s",
    "round_trip_s": "network/round_trip_s",
    "celsius": "machine/celsius",
}
_MEMBER = {
    "compute_s": "time/compute_s",
    "wait_s": "time/wait_s",
    "overhead_s": "time/overhead_s",
    "sent_bytes": "network/sent_bytes",
    "received_bytes": "network/received_bytes",
    "peak_bytes": "machine/peak_bytes",
    "joules": "machine/joules",
}
TABLE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "step": ("step", {"loss": "train/loss", **_MEMBER, "cpu_s": "machine/cpu_s"}),
    "status": ("step", {**_STATUS, **_MEMBER}),
    "exchange": ("round", {
        "sent_bytes": "exchange/sent_bytes", "received_bytes": "exchange/received_bytes",
        "submit_s": "exchange/submit_s", "decode_s": "exchange/decode_s",
        "apply_s": "exchange/apply_s",
    }),
    "round": ("round", {
        "members": "round/members", "missing": "round/missing", "close_s": "round/close_s",
        "delay": "round/delay", "local_steps": "round/local_steps", "sent_bytes": "hub/sent_bytes",
        "received_bytes": "hub/received_bytes", "cpu_s": "hub/cpu_s",
        "peak_bytes": "hub/peak_bytes",
    }),
}  # fmt: skip
"""Of each kind of line: what its points stand at, and the curve of each key. Lists count their
names. Figures of evaluations are "eval/" and their own name."""


class Curves:
    """The points in records of one run. Members beyond the first `most` that have lines are left
    out, and counted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: set[str] = set()
        self.left_out: set[str] = set()
        """Members whose own curves are not drawn."""
        self._evaluates = ""

    def points(self, records: Iterable[Record]) -> Iterator[Point]:
        """In the order of the records; what is not known (null) is no point."""
        for record in records:
            kind = record["kind"]
            told = told_evaluation(record) if kind == "figure" else record
            if kind in TABLE:
                axis, keys = TABLE[kind]
                who = record.get("about") if kind == "status" else record["member"]
                member = "" if who == HUB else who
                there = {tag: record.get(key) for key, tag in keys.items()}
                found = {tag: len(v) if isinstance(v, list) else v for tag, v in there.items()}
            elif told is not None and kind in ("eval", "figure"):
                record, axis, who = told, "step", told["member"]
                self._evaluates = self._evaluates or who
                member = "" if who == self._evaluates else who
                found = {f"eval/{name}": value for name, value in figures(told).items()}
            else:
                continue
            at = record.get(axis)
            if isinstance(at, int) and isinstance(member, str) and self._takes(member):
                for tag, value in found.items():
                    if isinstance(value, int | float):
                        yield Point(tag, member, axis, at, record["t"], float(value))

    def _takes(self, member: str) -> bool:
        if not member or member in self._taken:
            return True
        if len(self._taken) < self._most:
            self._taken.add(member)
            return True
        self.left_out.add(member)
        return False


def parameters(job: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """A job as one table of texts: "train.steps" and so on."""
    found: dict[str, str] = {}
    for key, value in job.items():
        if isinstance(value, Mapping):
            found |= parameters(value, f"{under}{key}.")
        else:
            found[f"{under}{key}"] = str(value)
    return found
