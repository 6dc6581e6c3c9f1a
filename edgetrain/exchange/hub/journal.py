"""The hub's journal: records in files that no crash can spoil.

A folder of snapshots and segments, each named by the round it begins with: `…40.base` is the
hub's state after 40 rounds, `…40.log` what happened since. A record is its lengths, its checksums,
its header, its payload; what does not check is where the journal ends, and is cut off. What
the records mean is `records`' business and the hub's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import BadMessage, ConfigError, EdgetrainError
from edgetrain.exchange.descriptors import is_out_of_descriptors, reserve
from edgetrain.exchange.files import replacing, sync_folder, write_all
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.records import Record, Round, State
from edgetrain.vectors.vector import Buffer

_PREFIX = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
_MAGIC = b"etj1"
PREFIX_BYTES = _PREFIX.size + _CHECK.size
MAX_HEADER_BYTES = 64 << 20

SEGMENT_BYTES = 64 << 20
SEGMENT_BASES = 8
SEGMENT_ROUNDS = 1000
"""A snapshot is due after so many bytes (or bases, if that is more), or so many rounds."""

GENERATIONS = 2
"""Snapshots that are kept, with their segments: should one not be readable, the one before is."""
MOST_GENERATIONS = 8
"""And as many at most, for members that are behind."""


@dataclass(frozen=True)
class Fsync:
    """When the kernel is told to bring what was written to the disk.

    A killed process loses nothing in any case; this is for a machine that loses power.
    """

    every: int
    """Rounds between; 0: never, the kernel does it in its own time."""

    @classmethod
    def parse(cls, text: str) -> Fsync:
        """From "always", "never" or "round-every N"; ConfigError."""
        if text in ("always", "never"):
            return cls(int(text == "always"))
        word, _, number = text.partition(" ")
        if word == "round-every" and number.strip().isdigit() and int(number) > 0:
            return cls(int(number))
        raise ConfigError(
            f"hub.fsync = '{text}'", "allowed are 'always', 'never' and 'round-every N', as in "
            "'round-every 20'",
        )  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """How a journal reaches its disk. Another one stands in for a disk that fills up."""

    writev: Callable[[int, Sequence[Buffer]], int] = lambda file, parts: os.writev(file, parts)
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    """Bytes."""


@dataclass(frozen=True)
class Settings:
    """How a journal is kept."""

    fsync: Fsync = Fsync(1)
    stop_when_full: bool = True
    """Whether a full disk stops the hub, or the hub goes on without a journal until there is
    room."""
    snapshot_every: int = 0
    """Rounds; 0: as bytes ask for it."""


class Journal:
    """The journal in `folder`, opened for appending; what a crash left half written is cut off.

    `state` is the newest snapshot that can be read (None: there is none), `records()` what follows
    it, `mended` says in sentences what was damaged. `say` is told later what a person should know.
    Raises ConfigError when another process has it open, EdgetrainError when the disk says no.
    One thread uses it.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings = Settings(),
        say: Callable[[str], None] = lambda line: None,
        disk: Disk = Disk(),
    ) -> None:
        self.folder = folder
        self.mended: list[str] = []
        self.state: State | None = None
        self.bytes_written = 0
        self._settings = settings
        self._say = say
        self._disk = disk
        self._log = -1
        self._rounds = self._bytes = self._unsynced = 0
        self._suspended = self._postponed = False
        self.first_round = 0
        """`tail`, also while the journal is not written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot keep a journal in {folder}: {error.strerror}", "name another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"another hub writes the journal {folder}", "end it first, or name another folder"
            ) from None
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise EdgetrainError(
                f"the journal {folder} cannot be opened: {error.strerror}"
            ) from None
        except BaseException:
            self.close()
            raise

    # -- reading ------------------------------------------------------------------------------

    def records(self) -> Iterator[Record]:
        """What follows `state`, in order. Payloads are valid as long as they are held."""
        if self.state is not None:
            for path in self._segments(self.state.round):
                yield from _read(path)

    @property
    def tail(self) -> int | None:
        """The first round from which on every reply is here; None: none is."""
        return None if self._suspended or self._log < 0 else self.first_round

    def replies(self, first: int) -> Iterator[Round]:
        """The rounds from `first` (not before `tail`) to the newest.

        Ends early where a record cannot be read: the disk spoilt it since the journal was opened.
        """
        with contextlib.suppress(OSError):
            yield from self._replies(first)

    def _replies(self, first: int) -> Iterator[Round]:
        expected = first
        for path in self._segments(0):
            if _next_name(path, self._segments(0)) <= first:
                continue
            for record in _read(path):
                if isinstance(record, Round) and record.round >= first:
                    if record.round != expected:
                        return
                    yield record
                    expected += 1

    # -- writing ------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Write a record; afterwards it is there, as durably as the settings say.

        Raises EdgetrainError when the disk is full and the job says to stop. Whatever happens, what
        was whole before stays whole.
        """
        if self._suspended or self._log < 0:
            return
        header, payloads = records.encode(record)
        start = os.fstat(self._log).st_size
        try:
            written = _write(self._disk, self._log, header, payloads)
            if isinstance(record, Round):
                self._rounds += 1
                self._unsynced += 1
            every = self._settings.fsync.every
            if every and (self._unsynced >= every or not isinstance(record, Round)):
                os.fdatasync(self._log)
                self._unsynced = 0
        except OSError as error:
            os.ftruncate(self._log, start)
            self._no_room(error)
            return
        self._bytes += written
        self.bytes_written += written

    @property
    def due(self) -> bool:
        """Whether it is time for a snapshot."""
        if self._log < 0:
            return False
        if self._suspended:
            return self._has_room()
        if not self._rounds:
            return False
        if self._settings.snapshot_every:
            return self._rounds >= self._settings.snapshot_every
        enough = max(SEGMENT_BYTES, SEGMENT_BASES * self._base_bytes)
        return self._rounds >= SEGMENT_ROUNDS or self._bytes >= enough

    def save(self, state: State, needed: int | None = None) -> None:
        """Write a snapshot: whole and durable, or not at all. Then drop what is older.

        `needed` is the oldest round whose reply a member may still ask for. If no descriptor is
        free, the snapshot is postponed: records are appended as before.
        """
        self._base_bytes = _bytes_of(state)
        try:
            with reserve():
                log = self._write_snapshot(state)
        except OSError as error:
            if is_out_of_descriptors(error) and self._log >= 0:
                self._postpone(state.round, error)
            else:
                self._no_room(error)
            return
        self._postponed = False
        if self._suspended:
            self._suspended, self.first_round = False, state.round
            self._say(f"there is room again: the journal goes on from round {state.round}")
        if self._log >= 0:
            os.close(self._log)
        else:
            self.first_round = state.round
        self._log = log
        self._rounds = self._bytes = self._unsynced = 0
        with contextlib.suppress(OSError):  # done with the next snapshot
            self._compact(needed)

    def _write_snapshot(self, state: State) -> int:
        """Bring a snapshot to the disk; returns a descriptor of the segment that follows it. That
        is made first: a snapshot in place, and records behind the segment before it, would be a
        gap. Raises OSError, and leaves everything as it was."""
        name = self._path_of(state.round).with_suffix(".base")
        segment, durable = self._path_of(state.round), self._settings.fsync.every > 0
        is_new, log = not segment.exists(), -1
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            log = os.open(segment, _APPEND, 0o600)
            header, payloads = records.encode(state)
            with replacing(name, name.with_suffix(".tmp"), 0o600, durable=durable) as file:
                self.bytes_written += _write(self._disk, file, header, payloads)
                # The records that the snapshot replaces have to be durable before it is in place.
                if self._log >= 0 and durable and not self._suspended:
                    os.fdatasync(self._log)
            is_new = False
            os.ftruncate(log, 0)  # the snapshot has what was in it
            if durable:
                os.fsync(folder)
        except OSError:
            if log >= 0:
                os.close(log)
            if is_new:
                segment.unlink(missing_ok=True)
            raise
        finally:
            os.close(folder)
        return log

    def _postpone(self, round: int, error: OSError) -> None:
        """Try the next snapshot when one is due again."""
        if not self._postponed:
            self._say(
                f"no snapshot after round {round} in the journal {self.folder}: {error.strerror}; "
                "rounds are still written, and the next snapshot is tried later"
            )
        self._postponed = True
        self._rounds = self._bytes = 0

    def _compact(self, needed: int | None) -> None:
        kept = self._snapshots()
        for index, path in enumerate(kept[:-GENERATIONS]):
            begins = int(kept[index + 1].stem)  # a segment ends where the next one begins
            old = len(kept) - index > MOST_GENERATIONS
            if old or begins < self.first_round or needed is None or begins <= needed:
                path.unlink()
                path.with_suffix(".log").unlink(missing_ok=True)
                self.first_round = max(self.first_round, begins)
            else:
                break
        # A hub that was killed while it saved left a segment without a snapshot.
        oldest = min(int(path.stem) for path in self._snapshots())
        for path in self._segments(0):
            if int(path.stem) < oldest:
                path.unlink()

    def close(self) -> None:
        """Let go; works twice."""
        if self._log >= 0:
            if self._settings.fsync.every:
                with contextlib.suppress(OSError):
                    os.fdatasync(self._log)
            os.close(self._log)
            self._log = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- inside -------------------------------------------------------------------------------

    _base_bytes = 0

    def _snapshots(self) -> list[Path]:
        return self._files(".base")

    def _segments(self, first: int) -> list[Path]:
        return [path for path in self._files(".log") if int(path.stem) >= first]

    def _files(self, suffix: str) -> list[Path]:
        """The journal's own files with this suffix, in the order of their rounds. Raises
        OSError."""
        with reserve():
            found = list(self.folder.iterdir())
        return sorted(p for p in found if p.suffix == suffix and _NAME.fullmatch(p.name))

    def _no_room(self, error: OSError) -> None:
        reason = f"the journal {self.folder} cannot be written: {error.strerror}"
        if self._settings.stop_when_full or is_out_of_descriptors(error):
            way = "raise `ulimit -n`" if is_out_of_descriptors(error) else "make room"
            raise EdgetrainError(
                reason, f"{way}, then go on with `edgetrain hub --resume`; nothing is lost"
            ) from None
        if not self._suspended:
            self._say(f"{reason}; training goes on without it until there is room")
        self._suspended = True

    def _has_room(self) -> bool:
        return self._disk.free(self.folder) > 2 * SEGMENT_BYTES + 4 * self._base_bytes

    def _sync_folder(self) -> None:
        if self._settings.fsync.every:
            sync_folder(self.folder)

    def _recover(self) -> None:
        for partial in self._files(".tmp"):
            partial.unlink()
        for path in reversed(self._snapshots()):
            first = next(_read(path, of_states=True), None)
            if isinstance(first, State):
                self.state = first
                break
            aside = _set_aside(path)
            self.mended.append(f"the snapshot {path.name} cannot be read; it is kept as {aside}")
        if self.state is None:
            for path in self._segments(0):
                self.mended.append(f"{path.name} follows no snapshot{_drop(path)}")
            return
        self._base_bytes = _bytes_of(self.state)
        self._drop_before_a_gap(self.state.round)
        self._cut_torn_tail(self.state.round)
        newest = (self._segments(self.state.round) or [self._path_of(self.state.round)])[-1]
        self._log = os.open(newest, _APPEND, 0o600)
        self._bytes = os.fstat(self._log).st_size
        self._rounds = sum(isinstance(record, Round) for record in _read(newest))
        self._sync_folder()

    def _path_of(self, round: int) -> Path:
        return self.folder / f"{round:020d}.log"

    def _cut_torn_tail(self, first: int) -> None:
        """Cut the segments from here on where they stop making sense."""
        expected, torn = first, False
        if not self._path_of(first).exists():
            self.mended.append(
                f"{self._path_of(first).name} is missing: what followed the snapshot after "
                f"{first} rounds is lost"
            )
        for path in self._segments(first):
            if torn or int(path.stem) != expected:
                self.mended.append(f"{path.name} follows records that are lost{_drop(path)}")
                continue
            good = 0
            for record, end in scan(path):
                if isinstance(record, Round):
                    if record.round != expected:
                        break
                    expected += 1
                good = end
            size = path.stat().st_size
            if good < size:
                torn = True
                kept = _keep_behind(path, good)
                os.truncate(path, good)
                told = f"{path.name} ends in {size - good} bytes that are no record"
                self.mended.append(told + kept)

    def _drop_before_a_gap(self, newest: int) -> None:
        """Older segments are for members that are behind: only while nothing is missing."""
        self.first_round = newest
        older = [path for path in reversed(self._segments(0)) if int(path.stem) < newest]
        for path in older:
            found = [r.round for r in _read(path) if isinstance(r, Round)]
            begins = int(path.stem)
            if found != list(range(begins, self.first_round)):
                return
            self.first_round = begins


_NAME = re.compile(r"\d{20}\.(base|log|tmp)")
_APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def _bytes_of(state: State) -> int:
    """About how large a snapshot is: a base, and the fixed tensors."""
    return 4 * state.elements + sum(memoryview(piece).nbytes for piece in state.fixed)


def _keep_behind(path: Path, start: int) -> str:
    """If whole records lie behind the bytes at `start`, which are none, this is damage and not
    the end of a record that a crash cut short: keep a copy. Returns words that say so."""
    count = _count_records(path, start)
    if not count:
        return ""
    aside = _unused(path)
    try:
        with path.open("rb") as source, open(aside, "xb", opener=_private) as copy:
            source.seek(start)
            shutil.copyfileobj(source, copy, 1 << 20)
            os.fsync(copy.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise EdgetrainError(
            f"{path} is damaged, and the {count} records behind the damage cannot be kept: "
            f"{error.strerror}",
            "make room, or copy the journal elsewhere first",
        ) from None
    return f"; the {count} records behind them are kept in {aside.name}"


def _drop(path: Path) -> str:
    """Take a segment out of the journal; it is kept under another name if it holds records.
    Returns words that say so."""
    count = _count_records(path, 0)
    if not count:
        path.unlink()
        return ""
    return f"; its {count} records are kept in {_set_aside(path)}"


def _set_aside(path: Path) -> str:
    """Rename a file, so that it is not read again; its new name."""
    aside = _unused(path)
    path.rename(aside)
    return aside.name


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unused(path: Path) -> Path:
    """A name beside `path` for what is damaged."""
    numbers = (path.with_name(f"{path.name}.damaged{n}") for n in ("", *range(2, 1000)))
    return next(name for name in numbers if not name.exists())


def _count_records(path: Path, start: int) -> int:
    """Whole records anywhere behind `start`."""
    count, size = 0, path.stat().st_size
    if start >= size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        at = content.find(_MAGIC, start)
        while at >= 0:
            file.seek(at)
            found = _next_record(file, size - at)
            count += found is not None
            at = content.find(_MAGIC, at + (found[1] if found else 1))
    return count


def _next_name(path: Path, segments: list[Path]) -> float:
    """The round that the segment after this one begins with."""
    later = [int(other.stem) for other in segments if other.stem > path.stem]
    return min(later, default=float("inf"))


def _write(disk: Disk, file: int, header: bytes, payloads: list[Buffer]) -> int:
    """Write one record without copying its payloads; returns its length."""
    views = [memoryview(payload).cast("B") for payload in payloads if memoryview(payload).nbytes]
    check = zlib.crc32(header)
    for view in views:
        check = zlib.crc32(view, check)
    size = sum(view.nbytes for view in views)
    prefix = _PREFIX.pack(_MAGIC, len(header), size, check)
    prefix += _CHECK.pack(zlib.crc32(prefix))
    write_all(file, [prefix, header, *views], disk.writev)
    return len(prefix) + len(header) + size


def _read(path: Path, *, of_states: bool = False) -> Iterator[Record]:
    """The whole records at the beginning of a file; of a snapshot, its State."""
    for record, _ in scan(path):
        if isinstance(record, State) == of_states:
            yield record  # type: ignore[misc]


def scan(path: Path) -> Iterator[tuple[Record | State, int]]:
    """Each whole record of a file and where it ends; stops at the first that is not."""
    try:
        with reserve():
            file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        end = 0
        while (found := _next_record(file, size - end)) is not None:
            record, length = found
            end += length
            yield record, end


def _next_record(file: BinaryIO, left: int) -> tuple[Record | State, int] | None:
    prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    magic, header_bytes, payload_bytes, check = _PREFIX.unpack_from(prefix)
    (own,) = _CHECK.unpack_from(prefix, _PREFIX.size)
    length = PREFIX_BYTES + header_bytes + payload_bytes
    if own != zlib.crc32(prefix[: _PREFIX.size]) or magic != _MAGIC or length > left:
        return None
    header, payload = file.read(header_bytes), file.read(payload_bytes)
    if len(header) < header_bytes or len(payload) < payload_bytes:
        return None
    if check != zlib.crc32(payload, zlib.crc32(header)):
        return None
    try:
        return records.decode(header, payload), length
    except BadMessage:
        return None
