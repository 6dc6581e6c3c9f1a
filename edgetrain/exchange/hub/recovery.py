"""Opening a journal again: what is whole is found first, and only then does a file change.

A crash leaves the beginning of one record at the end of the newest segment: it is cut off, because
nobody was told of that round. Everything else that cannot be read is damage: it is moved aside
(`….damaged`), or copied there before it is cut. A journal that another edgetrain wrote, or of which
no snapshot can be read, is refused as it is: training must not begin anew in its place.

The alternative, to mend each file as it is read, would have changed some before the first sign that
the journal is another version's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.exchange.hub.record_file import (
    count_records,
    files,
    is_unfinished,
    read_records,
    read_states,
    scan,
    segment_of,
)
from edgetrain.exchange.hub.records import Round, State

MOST_COPIED = 64 << 30
"""Bytes behind damage that are copied; a file of more is no segment."""


@dataclass
class Recovered:
    """The content of a journal."""

    snapshot: State | None = None
    """The newest snapshot that can be read; None: training had not begun."""
    newest: Path = Path()
    """The segment that new records belong in."""
    rounds: int = 0
    first_reply: int = 0
    """The first round from which on every reply is here."""
    mended: list[str] = field(default_factory=list)
    """Repaired damage, in sentences."""


def recover(folder: Path) -> Recovered:
    """Find what a journal holds, then take out what cannot be read.

    Raises ConfigError, and changes nothing, if another edgetrain wrote it or no snapshot can be
    read; EdgetrainError if there is no room to keep what is damaged; OSError.
    """
    found, mend = Recovered(), _Mend(folder)
    for path in reversed(files(folder, ".base")):
        found.snapshot = next(read_states(path), None)
        if found.snapshot is not None:
            break
        aside = mend.set_aside(path)
        found.mended.append(f"the snapshot {path.name} cannot be read; it is kept as {aside}")
    if found.snapshot is None:
        _refuse_without_snapshot(folder)
        mend.carry_out()
        return found
    first = found.snapshot.round
    found.first_reply = _first_reply(folder, first)
    found.newest = segment_of(folder, first)
    _follow(found, mend, first)
    mend.carry_out()
    return found


_REMAINS = re.compile(r"\d{20}\.(base|log)(\.damaged\d*)?")


def _refuse_without_snapshot(folder: Path) -> None:
    """Raise ConfigError if a journal without a snapshot holds anything all the same."""
    held = [p.name for p in folder.iterdir() if _REMAINS.fullmatch(p.name) and p.stat().st_size]
    if held:
        raise ConfigError(
            f"training had begun in the journal {folder}, and no snapshot in it can be read: "
            f"{', '.join(sorted(held)[:3])}{' …' if len(held) > 3 else ''}",
            "put back a copy of its files, or begin anew in another folder; nothing was changed",
        )


def _first_reply(folder: Path, newest: int) -> int:
    """The first round that, with all from there to `newest`, is in the segments. Older ones are for
    members that are behind: only while nothing is missing."""
    first = newest
    for path in reversed(files(folder, ".log")):
        begins = int(path.stem)
        if begins >= newest:
            continue
        rounds = [record.round for record in read_records(path) if isinstance(record, Round)]
        if rounds != list(range(begins, first)):
            break
        first = begins
    return first


def _follow(found: Recovered, mend: _Mend, first: int) -> None:
    """Follow the segments from the snapshot on, as far as they make sense."""
    expected, torn = first, False
    if not found.newest.exists():
        found.mended.append(
            f"{found.newest.name} is missing: what followed the snapshot after {first} rounds is "
            "lost"
        )
    for path in files(mend.folder, ".log"):
        if int(path.stem) < first:
            continue
        if torn or int(path.stem) != expected:
            if path.stat().st_size:
                count, aside = count_records(path, 0), mend.set_aside(path)
                found.mended.append(
                    f"{path.name} follows records that are lost; its {count} records are kept in "
                    f"{aside}"
                )
            continue
        good, begins = 0, expected
        for record, end in scan(path):
            if isinstance(record, Round):
                if record.round != expected:
                    break
                expected += 1
            good = end
        found.newest, found.rounds = path, expected - begins
        left = path.stat().st_size - good
        if left:
            torn = True
            found.mended.append(
                f"{path.name} ends in {left} bytes that are no record{mend.cut(path, good)}"
            )


class _Mend:
    """Changes to the files of a journal, decided now and carried out together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changes: list[Callable[[], object]] = [
            draft.unlink for draft in files(folder, ".tmp")
        ]

    def set_aside(self, path: Path) -> str:
        """Rename a file, so that it is not read again; returns its new name."""
        aside = _unused(path)
        self._changes.append(lambda: path.rename(aside))
        return aside.name

    def cut(self, path: Path, good: int) -> str:
        """Cut a file behind `good`; other than half a record is copied first. Says where to."""
        said, left = "", path.stat().st_size - good
        if left > MOST_COPIED:
            raise ConfigError(
                f"{path} ends in {left:,} bytes that are no record, too many to be kept",
                f"move it away, or cut it behind byte {good}; nothing was changed",
            )
        if not is_unfinished(path, good):
            count, aside = count_records(path, good), _unused(path)
            records = f"the {count} records behind them are" if count else "they are"
            said = f"; {records} kept in {aside.name}"
            self._changes.append(lambda: _copy_behind(path, good, aside))
        self._changes.append(lambda: os.truncate(path, good))
        return said

    def carry_out(self) -> None:
        """Change the files. Drafts of snapshots go: each holds what the journal has besides."""
        for change in self._changes:
            change()


def _copy_behind(path: Path, start: int, aside: Path) -> None:
    try:
        with path.open("rb") as source, open(aside, "xb", opener=_private) as copy:
            source.seek(start)
            shutil.copyfileobj(source, copy, 1 << 20)
            os.fsync(copy.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise EdgetrainError(
            f"{path} is damaged, and what lies behind the damage cannot be kept: {error.strerror}",
            "make room, or copy the journal elsewhere first",
        ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unused(path: Path) -> Path:
    numbers = (path.with_name(f"{path.name}.damaged{n}") for n in ("", *range(2, 1_000_000)))
    return next(name for name in numbers if not name.exists())
