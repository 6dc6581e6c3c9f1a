"""The hub's journal: records in files that no crash can spoil.

A folder of snapshots and segments, each named by the round it begins with: `…40.base` is the
hub's state after 40 rounds, `…40.log` what happened since. What a record is in a file, says
`record_file`; what is done with damage, `recovery`; what the records mean is `records`' business
and the hub's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.errors import ConfigError, EdgetrainError, explain_os_errors
from edgetrain.exchange.descriptors import is_out_of_descriptors, reserve
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.record_file import (
    files,
    read_records,
    read_states,
    segment_of,
    write_record,
)
from edgetrain.exchange.hub.records import Record, Round, State
from edgetrain.files.writing import replacing, sync
from edgetrain.vectors.vector import Buffer

LOCK = "lock"
"""A file that every journal has from the first; held by the hub that writes it."""

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
class JournalDisk:
    """How a journal reaches its disk. Another one stands in for a disk that fills up."""

    writev: Callable[[int, Sequence[Buffer]], int] = lambda file, parts: os.writev(file, parts)
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    """Bytes."""


@dataclass(frozen=True)
class JournalSettings:
    """How a journal is kept."""

    fsync: Fsync = Fsync(1)
    stop_on_disk_full: bool = True
    """Whether a full disk stops the hub, or the hub goes on without a journal until there is
    room."""
    snapshot_every: int = 0
    """Rounds; 0: as bytes ask for it."""


class Journal:
    """The journal in `folder`, opened for appending; what a crash left half written is cut off, and
    what is damaged is moved aside.

    `state` is the newest snapshot that can be read (None: there is none), `records()` what follows
    it, `mended` says in sentences what was damaged. `say` is told later what a person should know.
    Raises ConfigError when another process has it open, or another edgetrain wrote it, or none of
    its snapshots can be read (nothing is changed then); EdgetrainError when the disk says no.
    One thread uses it.
    """

    def __init__(
        self,
        folder: Path,
        settings: JournalSettings = JournalSettings(),
        say: Callable[[str], None] = lambda line: None,
        disk: JournalDisk = JournalDisk(),
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
        with explain_os_errors(f"cannot keep a journal in {folder}", "name another folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
        """The records after `state`, in order. Payloads are valid as long as they are held."""
        if self.state is not None:
            for path in self._segments(self.state.round):
                yield from read_records(path)

    @property
    def tail(self) -> int | None:
        """The first round from which on every reply is here; None: none is."""
        return None if self._suspended or self._log < 0 else self.first_round

    def replies(self, first: int) -> Iterator[Round]:
        """The rounds from `first` (not before `tail`) to the newest, or to a spoilt one."""
        with contextlib.suppress(OSError):
            yield from self._replies(first)

    def _replies(self, first: int) -> Iterator[Round]:
        expected = first
        for path in self._segments(0):
            segments = self._segments(0)
            later = [int(other.stem) for other in segments if other.stem > path.stem]
            if min(later, default=float("inf")) <= first:
                continue
            for record in read_records(path):
                if isinstance(record, Round) and record.round >= first:
                    if record.round != expected:
                        return
                    yield record
                    expected += 1

    def copy(self, needed: int) -> Iterator[State | Record]:
        """A snapshot, with all replies from round `needed` on behind it if that is there, and all
        records that follow it, to the newest that is written when they are asked for. Nothing
        while the journal is not written. Raises OSError."""
        snapshots = self._snapshots() if self.tail is not None else []
        older = [path for path in snapshots if int(path.stem) <= needed]
        for path in (older or snapshots)[-1 if older else 0 :][:1]:
            yield from read_states(path)
            segment: Path | None = path.with_suffix(".log")
            while segment is not None:
                yield from read_records(segment)
                later = self._segments(int(segment.stem) + 1)
                segment = later[0] if later else None

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
            written = write_record(self._log, header, payloads, self._disk.writev)
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
        if self._log < 0:
            return False
        if self._suspended:
            return self._disk.free(self.folder) > 2 * SEGMENT_BYTES + 4 * self._base_bytes
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

    def _write_snapshot(self, state: State) -> int:
        """Bring a snapshot to the disk; returns a descriptor of the segment that follows it. That
        is made first: a snapshot in place, and records behind the segment before it, would be a
        gap. Raises OSError, and leaves everything as it was."""
        name = segment_of(self.folder, state.round).with_suffix(".base")
        segment, durable = segment_of(self.folder, state.round), self._settings.fsync.every > 0
        is_new, log = not segment.exists(), -1
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            log = os.open(segment, _APPEND, 0o600)
            header, payloads = records.encode(state)
            with replacing(name, name.with_suffix(".tmp"), 0o600, durable=durable) as file:
                self.bytes_written += write_record(
                    file.fileno(), header, payloads, self._disk.writev
                )
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
        if not self._postponed:
            self._say(
                f"no snapshot after round {round} in the journal {self.folder}: {error.strerror}; "
                "rounds are still written, and the next snapshot is tried later"
            )
        self._postponed = True
        self._rounds = self._bytes = 0

    def close(self) -> None:
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
        return files(self.folder, ".base")

    def _segments(self, first: int) -> list[Path]:
        return [path for path in files(self.folder, ".log") if int(path.stem) >= first]

    def _no_room(self, error: OSError) -> None:
        reason = f"the journal {self.folder} cannot be written: {error.strerror}"
        if self._settings.stop_on_disk_full or is_out_of_descriptors(error):
            way = "raise `ulimit -n`" if is_out_of_descriptors(error) else "make room"
            raise EdgetrainError(
                reason, f"{way}, then go on with `edgetrain hub --resume`; nothing is lost"
            ) from None
        if not self._suspended:
            self._say(f"{reason}; training goes on without it until there is room")
        self._suspended = True

    def _recover(self) -> None:
        with reserve():
            inside = list(self.folder.iterdir())
        if not any(path.name[:1].isdigit() for path in inside):
            return  # a new journal
        from edgetrain.exchange.hub.recovery import recover

        found = recover(self.folder)
        self.mended = found.mended
        if found.snapshot is None:
            return
        self.state, self.first_round = found.snapshot, found.first_reply
        self._base_bytes = _bytes_of(found.snapshot)
        self._log = os.open(found.newest, _APPEND, 0o600)
        self._bytes = os.fstat(self._log).st_size
        self._rounds = found.rounds
        if self._settings.fsync.every:
            sync(self.folder)


_APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


def _bytes_of(state: State) -> int:
    """About how large a snapshot is: a base, the outer rule's vectors, and the fixed tensors."""
    vectors = 1 + len(state.outer)
    return 4 * state.elements * vectors + sum(memoryview(piece).nbytes for piece in state.fixed)
