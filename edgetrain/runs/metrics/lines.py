"""Lines of metrics: format one, parse one, follow a file that grows, read a whole file.

A line that is torn or not ours is skipped. Keys and units: docs/run-folder.md. This module imports
only the standard library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One line as a dictionary; `kind`, `t` and `member` are always there."""

HUB = "hub"
"""The name in `member` of lines that the hub writes."""

COMMON = ("kind", "t", "member", "step", "round", "eval_s", "cut")
"""Keys of an "eval" line that are not figures of the task."""

LINE_BYTES = 4096
"""Most bytes of a line. A page is copied to the file in one piece even if the writer is killed, so
that only a full disk can tear a line."""

_START = b'{"kind":'
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def format_line(keys: Record) -> bytes:
    """One line, at most LINE_BYTES long. NaN and infinity are not allowed (see `number`).

    To shorten it, the longest text or list is halved again and again; the key `cut` has how many
    characters or names each one lost. (Ten thousand names of a round do not fit.)
    """
    line = _encode(keys).encode("ascii") + b"\n"
    cut: dict[str, int] = {}
    while len(line) > LINE_BYTES:
        longest = max(
            (name for name, value in keys.items() if isinstance(value, str | list) and value),
            key=lambda name: len(_encode(keys[name])),
        )
        value = keys[longest]
        kept = value[: len(value) // 2]
        cut[longest] = cut.get(longest, 0) + len(value) - len(kept)
        keys = {**keys, longest: kept, "cut": cut}
        line = _encode(keys).encode("ascii") + b"\n"
    return line


def number(value: float) -> float | None:
    """A number for a line. JSON has no NaN and no infinity: they become None (null)."""
    value = float(value)
    return value if math.isfinite(value) else None


def seconds(value: float) -> float | None:
    """Seconds for a line, to 0.1 microseconds: more digits are noise and double a line's length."""
    value = float(value)
    return round(value, 7) if math.isfinite(value) else None


def parse_line(line: bytes) -> Record | None:
    """The record in a line of metrics.jsonl, or None if it is not one.

    A line torn by a full disk may have another process's line glued to its end; that line is
    recovered. Text within a line cannot contain the mark searched for: its quotes are escaped.
    """
    start = line.rfind(_START)
    if start < 0:
        return None
    try:
        record = json.loads(line[start:])
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and all(
        isinstance(record.get(key), kind)
        for key, kind in (("kind", str), ("member", str), ("t", int | float))
    )
    return record if usable else None


def figures(evaluation: Record) -> dict[str, float | None]:
    """The task's own figures in an "eval" record: what its evaluate() returned."""
    return {key: value for key, value in evaluation.items() if key not in COMMON}


def told_evaluation(figure: Record) -> Record | None:
    """A "figure" record of a hub as the "eval" record that the member would have written; None if
    it is damaged. The member chose the figure's name: it replaces none of the line's own keys."""
    metric, value, at = figure.get("metric"), figure.get("value"), figure.get("at")
    if not (isinstance(metric, str) and isinstance(value, int | float)):
        return None
    keys = {"kind": "eval", "t": at if isinstance(at, int | float) else figure["t"]}
    keys |= {"member": str(figure.get("about")), "step": figure.get("step"), "round": 0}
    return {metric: value, **keys}


class Follower:
    """Reads a metrics.jsonl that is still being written: each `read()` returns what is new.

    The file need not exist yet. A last line without a line end waits until the end arrives.
    `damaged` counts lines that could not be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.damaged = 0
        self._offset = 0
        self._tail = b""

    def read(self) -> list[Record]:
        """The records that were completed since the last call, in file order."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._tail = (self._tail + new).split(b"\n")
        return self._parse(lines)

    def rest(self) -> list[Record]:
        """The record after the last line end, if it is whole. Call it when writing is over."""
        line, self._tail = self._tail, b""
        return self._parse([line])

    def _parse(self, lines: Iterable[bytes]) -> list[Record]:
        records = []
        for line in lines:
            record = parse_line(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                self.damaged += 1
        return records


def read(path: Path | str, kind: str | None = None) -> Iterator[Record]:
    """All records of a metrics.jsonl, or those of one kind, in file order.

    Lines that cannot be read are left out; a file that does not exist has no records. Keeps one
    line in memory at a time.
    """
    # Most lines are steps: do not parse them for a reader of another kind.
    mark = b"" if kind is None else b'"kind":"%b"' % kind.encode()
    try:
        file = Path(path).open("rb")  # noqa: SIM115  closed below, in a generator
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = parse_line(line) if mark in line else None
            if record is not None and kind in (None, record["kind"]):
                yield record
