"""Lines of metrics, read: one by one, as they come, or all of a file.

A torn or foreign line is skipped, never believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COMMON = ("kind", "t", "member", "step", "round", "eval_s", "cut")
"""Keys of lines that are not figures of the task."""
_START = b'{"kind":'

Record = dict[str, Any]


# Up to one page a line: a page is copied to the file in one piece even when the writer is killed,
# so only a full disk can tear a line.
LINE_BYTES = 4096


def parse_line(line: bytes) -> Record | None:
    """A line of metrics.jsonl, or None if it is not one.

    A line torn by a full disk has another process's line glued to its end; that one is recovered.
    No text within a line can hold the mark that is looked for: its quotes would be escaped.
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
    """The task's own figures of an "eval" record: what its evaluate() returned."""
    return {key: value for key, value in evaluation.items() if key not in COMMON}


class Follower:
    """Reads a metrics.jsonl that is still being written: each `read()` gives what is new.

    The file need not exist yet. A last line without its end is kept back until the end arrives.
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
        """What stands after the last line end: a whole record or nothing. Ask when all is over."""
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

    Unreadable lines are left out, and an absent file has no records. Holds one line at a time.
    """
    # Most lines are steps; who asks for something else need not parse them.
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
