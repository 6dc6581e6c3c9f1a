"""A member's checkpoint: a file that no lost power can spoil, and how seldom one is written.

What a member needs besides the hub to go on where it was, as plain values and raw buffers;
nothing is pickled. Here are the file's bytes, the folder with the last two of them, and the pace
that spares a card; what the values mean is `member`'s business. No torch, no socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import math
import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import BadMessage, ConfigError, explain_os_errors
from edgetrain.files.writing import replacing, sync, write_all

log = logging.getLogger("edgetrain")

Bytes = NDArray[np.uint8]

LAYOUT = 1
"""Version of the fields, one higher at each change."""

MAX_HEADER_BYTES = 16 << 20
GENERATIONS = 2
"""Files that are kept: should the newest not be readable, the one before is."""

_MAGIC = b"etc1"
_PREFIX = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
_ENDING = ".checkpoint"
_U63, _U64 = (1 << 63) - 1, (1 << 64) - 1


@dataclass(frozen=True)
class Sparing:
    """Limits of checkpoint writing: cards wear out, and a save interrupts training."""

    every_s: float = 600.0
    """Minimum seconds between two saves."""
    share: float = 0.02
    """Maximum share of the time for saves."""
    bytes_an_hour: float = 256e6
    """Maximum bytes an hour written by saves, on average."""

    def __post_init__(self) -> None:
        if not (self.every_s >= 0 and 0 < self.share <= 1 and self.bytes_an_hour > 0):
            raise ConfigError(
                f"a checkpoint every {self.every_s:g} s, {self.share:g} of the time, "
                f"{self.bytes_an_hour:g} bytes an hour",
                "allowed are 0 and more, above 0 to 1, and above 0",
            )

    def pause_s(self, spent_s: float, written: int) -> float:
        """Seconds until the next save, after one of `spent_s` seconds and `written` bytes."""
        of_the_time = spent_s * (1 / self.share - 1)
        return max(self.every_s, of_the_time, written * 3600 / self.bytes_an_hour)


@dataclass(frozen=True)
class Keep:
    """A member's checkpoint: its folder, and the limits of writing it."""

    folder: Path
    sparing: Sparing = Sparing()


@dataclass(frozen=True)
class Saved:
    """Content of a checkpoint, taken between two rounds: every local step is in a contribution."""

    model: str
    """Digest of the model's tensors."""
    job: str
    """Digest of the job, or ""."""
    name: str
    """The member's, as the hub calls it."""
    session: int
    """The member's proof of identity to the hub."""
    agreed: str
    """Strategy, local steps, and codec."""
    optimizer: str
    """Its class."""
    steps: int
    """Local steps taken, which is also how many batches were used."""
    round: int
    """The next round to submit."""
    applied: int
    checksum: int
    """Checksum of the base after them."""
    values: Any = None
    """The rest: what msgpack can hold, with numbers of `buffers` in it."""
    buffers: tuple[Bytes, ...] = field(default=(), repr=False)
    """uint8 [bytes] each; whoever saves keeps them unchanged until then."""


_TEXTS = ("model", "job", "name", "agreed", "optimizer")
_NUMBERS = {"session": _U64, "steps": _U63, "round": _U63, "applied": _U63, "checksum": _U64}


class _Newer(BadMessage):
    """A newer edgetrain wrote this checkpoint."""


class Folder:
    """The checkpoints of one member in `folder`, which is made (for its owner's eyes alone).

    `notes` says in sentences what was found damaged. Raises ConfigError when another process holds
    it, or the folder cannot be made.
    """

    def __init__(self, folder: Path, member: str) -> None:
        self.path = folder
        self.notes: list[str] = []
        self._member = _file_name(member)
        with explain_os_errors(f"cannot keep checkpoints in {folder}", "choose another folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self._lock = os.open(folder / f"{self._member}.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(
                f"another process keeps the checkpoint of '{member}' in {folder}",
                "end it first, or name another folder",
            ) from None
        for torn in folder.glob(f"{self._member}.*.tmp"):
            torn.unlink(missing_ok=True)

    def load(self) -> Saved | None:
        """The newest that can be read; None if there is none.

        Damaged ones that are newer than it are kept under another name. Raises ConfigError, and
        changes nothing, where there are some and none can be read, or one is a newer edgetrain's.
        """
        there, damaged = self._files(), list[Path]()
        for path in reversed(there):
            try:
                saved = read(path)
            except (BadMessage, OSError) as error:
                self.notes.append(f"the checkpoint {path} cannot be read: {error}")
                damaged.append(path)
                if isinstance(error, _Newer):
                    raise ConfigError(self.notes[-1], "use the edgetrain that wrote it") from None
                continue
            for each in damaged:
                with contextlib.suppress(OSError):
                    each.replace(each.with_suffix(".damaged"))
            return saved
        if there:
            raise ConfigError(
                self.notes[-1], "to join as a newcomer, delete it and those beside it"
            )
        return None

    def save(self, saved: Saved) -> int:
        """Write another, whole and durable or not at all, and drop what is older than the one
        before it; the bytes written. Raises OSError when the disk says no."""
        there = self._files()
        number = _number(there[-1]) + 1 if there else 1
        path = self.path / f"{self._member}.{number:08d}{_ENDING}"
        with replacing(path, path.with_suffix(".tmp"), 0o600) as file:
            written = _write(file.fileno(), saved)
        sync(self.path)
        for old in there[: len(there) - GENERATIONS + 1]:
            old.unlink(missing_ok=True)
        return written

    def clear(self) -> None:
        """Training is over: nobody is to go on from what is here."""
        with contextlib.suppress(OSError):
            for path in self._files():
                path.unlink(missing_ok=True)

    def set_aside(self) -> list[Path]:
        """Rename what is here so that it is not found again; under which names."""
        found = []
        for path in self._files():
            found.append(path.replace(path.with_suffix(".old")))
        return found

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _files(self) -> list[Path]:
        pattern = re.compile(re.escape(self._member) + r"\.\d{8,}" + re.escape(_ENDING))
        found = [path for path in self.path.iterdir() if pattern.fullmatch(path.name)]
        return sorted(found, key=_number)


class Keeper:
    """Writes a member's checkpoint when it is time. A disk that is full or broken costs a remark
    and no training."""

    def __init__(self, folder: Folder, sparing: Sparing, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.saves = 0
        self.bytes_written = 0
        self.seconds = 0.0
        """Seconds of all saves so far."""
        self._sparing = sparing
        self._clock = clock
        self._next = -math.inf
        self._failed = False

    def wait(self) -> None:
        """What is on the disk will do for now."""
        self._next = self._clock() + self._sparing.every_s

    @property
    def due(self) -> bool:
        return self._clock() >= self._next

    def save(self, make: Callable[[], Saved]) -> None:
        """Write what `make` gives."""
        began, written = self._clock(), 0
        try:
            written = self.folder.save(make())
        except OSError as error:
            if not self._failed:
                log.warning(
                    "the checkpoint in %s cannot be written: %s; training goes on without it",
                    self.folder.path, error.strerror,
                )  # fmt: skip
            self._failed = True
        else:
            if self._failed:
                log.warning("there is room again: checkpoints are written to %s", self.folder.path)
            self._failed = False
            self.saves += 1
            self.bytes_written += written
        spent_s = self._clock() - began
        self.seconds += spent_s
        self._next = self._clock() + self._sparing.pause_s(spent_s, written)


# -- the file -------------------------------------------------------------------------------------


MEMBER = "member"
"""File name of a checkpoint without a member's name."""


def has_checkpoint(folder: Path, member: str, job: str) -> bool:
    """Whether the newest checkpoint of a member in `folder` that can be read is of this job. Only
    looks: takes no lock, and makes nothing."""
    there = folder.glob(f"{glob.escape(_file_name(member))}.*{_ENDING}") if folder.is_dir() else ()
    for path in sorted((p for p in there if p.name.split(".")[-2].isdecimal()), reverse=True):
        with contextlib.suppress(BadMessage, OSError, ValueError), path.open("rb") as file:
            found: dict[str, Any] = _decode(_read_head(file)[0])[0]
            return bool(found["job"] == job)
    return False


def read(path: Path) -> Saved:
    """A checkpoint from its file. Raises BadMessage for anything damaged or too new, OSError."""
    with path.open("rb") as file:
        header, sizes_from, check = _read_head(file)
        try:
            saved, sizes = _decode(header)
        except _Newer:  # or a damaged number
            sum_so_far = zlib.crc32(header)
            while chunk := file.read(1 << 20):
                sum_so_far = zlib.crc32(chunk, sum_so_far)
            if sum_so_far != check:
                raise BadMessage("its checksum does not fit") from None
            raise
        except BadMessage:
            raise
        except Exception as error:  # msgpack raises half a dozen unrelated types on bad bytes
            raise BadMessage(f"its header makes no sense: {error}") from None
        if sum(sizes) != sizes_from:
            raise BadMessage(f"{sizes_from} bytes of buffers where {sum(sizes)} are told")
        sum_so_far = zlib.crc32(header)
        buffers = []
        for size in sizes:
            buffer = np.empty(size, np.uint8)
            if file.readinto(buffer.data) != size:
                raise BadMessage("it ends too early")
            sum_so_far = zlib.crc32(buffer.data, sum_so_far)
            buffers.append(buffer)
    if sum_so_far != check:
        raise BadMessage("its checksum does not fit")
    return Saved(**saved, buffers=tuple(buffers))


def _read_head(file: BinaryIO) -> tuple[bytes, int, int]:
    """(header, bytes of all buffers, checksum), the sizes held against the file's own."""
    prefix = file.read(_PREFIX.size + _CHECK.size)
    if len(prefix) < _PREFIX.size + _CHECK.size:
        raise BadMessage("it is too short")
    magic, header_bytes, buffer_bytes, check = _PREFIX.unpack_from(prefix)
    (own,) = _CHECK.unpack_from(prefix, _PREFIX.size)
    if magic != _MAGIC or own != zlib.crc32(prefix[: _PREFIX.size]):
        raise BadMessage("it is no checkpoint")
    size = os.fstat(file.fileno()).st_size
    if header_bytes > MAX_HEADER_BYTES or size != len(prefix) + header_bytes + buffer_bytes:
        raise BadMessage(f"it has {size} bytes, {len(prefix) + header_bytes + buffer_bytes} told")
    return file.read(header_bytes), buffer_bytes, check


def _decode(header: bytes) -> tuple[dict[str, Any], list[int]]:
    layout, fields, values, sizes = msgpack.unpackb(header, strict_map_key=False)
    if layout != LAYOUT:
        is_newer = isinstance(layout, int) and layout > LAYOUT
        raise (_Newer if is_newer else BadMessage)(
            f"it has layout {layout}, this version of edgetrain reads {LAYOUT}"
        )
    if set(fields) != {*_TEXTS, *_NUMBERS}:
        raise BadMessage("its fields are not those of a checkpoint")
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise BadMessage(f"{name} = {fields[name]!r} is no text")
    for name, most in _NUMBERS.items():
        value = fields[name]
        if type(value) is not int or not 0 <= value <= most:
            raise BadMessage(f"{name} = {value!r}: allowed is 0 to {most}")
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise BadMessage(f"sizes of buffers are no {sizes!r}")
    return {**fields, "values": values}, sizes


def _write(file: int, saved: Saved) -> int:
    """Write one without copying its buffers; returns its length."""
    fields = {name: getattr(saved, name) for name in (*_TEXTS, *_NUMBERS)}
    buffers = [buffer.data.cast("B") for buffer in saved.buffers if buffer.size]
    sizes = [buffer.size for buffer in saved.buffers]
    header: bytes = msgpack.packb([LAYOUT, fields, saved.values, sizes])
    check = zlib.crc32(header)
    for buffer in buffers:
        check = zlib.crc32(buffer, check)
    prefix = _PREFIX.pack(_MAGIC, len(header), sum(sizes), check)
    prefix += _CHECK.pack(zlib.crc32(prefix))
    write_all(file, [prefix, header, *buffers])
    return len(prefix) + len(header) + sum(sizes)


def _number(path: Path) -> int:
    return int(path.name.removesuffix(_ENDING).rpartition(".")[2])


def _file_name(member: str) -> str:
    """The member's name where it can be a file's, else what is left of it and a digest."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", member)[:80]
    return plain if plain == member else f"{plain}-{zlib.crc32(member.encode()):08x}"
