"""Lines of metrics: format one, parse one, follow a file that grows, read a whole file.

A line that is torn or not ours is skipped. Keys and units: docs/reference/run-folder.md. Only the
standard library is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edgetrain.errors import ConfigError
from edgetrain.files.reading import open_regular, parse_json
from edgetrain.runs import shapes

Record = dict[str, Any]
"""One line as a dictionary; `kind`, `t` and `member` are always there."""

HUB = "hub"
"""The name in `member` of lines that the hub writes."""

COMMON = ("kind", "t", "member", "step", "round", "eval_s", "cut")
"""Keys of an "eval" line that are not figures of the task."""

LINE_BYTES = 4096
"""Most bytes of a line. A page is copied to the file in one piece even if the writer is killed, so
that only a full disk can tear a line."""

MOST_BYTES = 1 << 20
"""Limit of a line that is read: more than any version has written."""

_MOST_WITHOUT_END = 16
"""Pieces of MOST_BYTES without a line end, after which there are no more lines: a hole in a file
may have terabytes."""

_CHUNK_BYTES = 16 << 20
"""Read at a time of a file that grows."""

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
    if start < 0 or len(line) - start > MOST_BYTES:
        return None
    try:
        record = parse_json(line[start:])
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    kind, member = record.get("kind"), record.get("member")
    usable = (
        isinstance(kind, str)
        and isinstance(member, str)
        and shapes.seconds.fits(record.get("t"))
        and shapes.fits(record, shapes.LINES.get(kind, {}))
    )
    return record if usable else None


def figures(evaluation: Record) -> dict[str, float | None]:
    """The task's own figures in an "eval" record: what its evaluate() returned."""
    return {key: value for key, value in evaluation.items() if key not in COMMON}


def told_evaluation(figure: Record) -> Record | None:
    """A "figure" record of a hub as the member's "eval" record; None if it is damaged."""
    metric, value, at = figure.get("metric"), figure.get("value"), figure.get("at")
    if not (isinstance(metric, str) and isinstance(value, int | float)):
        return None
    keys = {"kind": "eval", "t": at if isinstance(at, int | float) else figure["t"]}
    keys |= {"member": str(figure.get("about")), "step": figure.get("step"), "round": 0}
    return {metric: value, **keys}


class Follower:
    """Reads a metrics.jsonl that is still being written: each `read()` returns what is new.

    The file need not exist yet. A last line without a line end waits until the end arrives.
    `damaged` counts lines that could not be read. Where there are no more lines (a hole), `read`
    raises ConfigError, as for what is not a regular file.
    """

    def __init__(self, path: Path | str, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.path = Path(path)
        self.damaged = 0
        self.is_behind = False
        """Whether the last read ended before the file did."""
        self._chunk_bytes = chunk_bytes
        self._offset = 0
        self._tail = b""
        self._without_end = 0
        """Bytes that were read since the last line end."""

    def read(self) -> list[Record]:
        """The records completed since the last call; of a long file, the next part's."""
        if self._without_end > _MOST_WITHOUT_END * MOST_BYTES:
            self.is_behind = False
            at = self._offset - self._without_end
            raise ConfigError(
                f"{self.path} has no line end in {self._without_end >> 20} MiB after byte {at:,}",
                "it is damaged: cut it there, or move its folder away",
            )
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset)
            new = file.read(self._chunk_bytes)
        self._offset += len(new)
        self.is_behind = len(new) == self._chunk_bytes
        *lines, tail = (self._tail + new).split(b"\n")
        self._without_end = len(tail) if lines else self._without_end + len(new)
        # What is longer than a line has no end that is worth waiting for.
        self._tail = tail[-MOST_BYTES:]
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


class Lines:
    """All records of a metrics.jsonl, or those of some kinds, in file order.

    Iterate over it once. Lines that cannot be read are left out and counted in `damaged` (of some
    kinds: those that look like it); a file that does not exist has no records. Keeps one line in
    memory at a time. Raises ConfigError for what is not a regular file.
    """

    def __init__(self, path: Path | str, *kinds: str) -> None:
        self.damaged = 0
        self._path, self._kinds = Path(path), kinds

    def __iter__(self) -> Iterator[Record]:
        # Most lines are steps: do not parse them for a reader of other kinds.
        marks = [b'"kind":"%b"' % kind.encode() for kind in self._kinds] or [b""]
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            without_end = 0
            while (line := file.readline(MOST_BYTES)) and without_end < _MOST_WITHOUT_END:
                without_end = 0 if line.endswith(b"\n") else without_end + 1
                if not any(mark in line for mark in marks):
                    continue
                record = parse_line(line)
                if record is None:
                    self.damaged += bool(line.strip())
                elif not self._kinds or record["kind"] in self._kinds:
                    yield record
