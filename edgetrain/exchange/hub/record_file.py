"""Records in files: one behind the other, each with its lengths and checksums before it.

A record is a prefix (magic, length of the header, of the payload, CRC-32 of both, CRC-32 of these
fields), its header, its payload. A record whose checksums hold and that still cannot be read is
not damaged: another edgetrain wrote it, and nobody but that may say what is in it. So the shape of
the prefix, and the first three letters of the magic, never change.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.descriptors import reserve
from edgetrain.exchange.hub import records
from edgetrain.exchange.hub.records import Record, State
from edgetrain.files.writing import write_all
from edgetrain.vectors.vector import Buffer

_PREFIX = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
_MAGIC, _FAMILY = b"etj1", b"etj"
PREFIX_BYTES = _PREFIX.size + _CHECK.size
MOST_SEARCHED = 1 << 30
"""Bytes of damage that are searched for records: seconds."""


def write_record(
    file: int,
    header: bytes,
    payloads: list[Buffer],
    writev: Callable[[int, Sequence[Buffer]], int],
) -> int:
    """Write one record without copying its payloads; returns its length."""
    views = [memoryview(payload).cast("B") for payload in payloads if memoryview(payload).nbytes]
    check = zlib.crc32(header)
    for view in views:
        check = zlib.crc32(view, check)
    size = sum(view.nbytes for view in views)
    prefix = _PREFIX.pack(_MAGIC, len(header), size, check)
    prefix += _CHECK.pack(zlib.crc32(prefix))
    write_all(file, [prefix, header, *views], writev)
    return len(prefix) + len(header) + size


def read_records(path: Path) -> Iterator[Record]:
    """The whole records at the beginning of a segment. Raises as `scan`."""
    return (record for record, _ in scan(path) if not isinstance(record, State))


def read_states(path: Path) -> Iterator[State]:
    """The State of a snapshot; nothing if it cannot be read. Raises as `scan`."""
    return (record for record, _ in scan(path) if isinstance(record, State))


def scan(path: Path) -> Iterator[tuple[Record | State, int]]:
    """Each whole record of a file and where it ends, to the first that is not whole. ConfigError at
    one that another edgetrain wrote; OSError."""
    try:
        with reserve():
            file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        end = 0
        while (found := _next_record(file, os.fstat(file.fileno()).st_size - end)) is not None:
            record, length = found
            end += length
            yield record, end


def count_records(path: Path, start: int) -> int:
    """Whole records behind `start`, within MOST_SEARCHED bytes. Raises as `scan`."""
    count, size = 0, path.stat().st_size
    if start >= size:
        return 0
    end = start + MOST_SEARCHED
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        at = content.find(_MAGIC, start, end)
        while at >= 0:
            file.seek(at)
            found = _next_record(file, size - at)
            count += found is not None
            at = content.find(_MAGIC, at + (found[1] if found else 1), end)
    return count


def is_unfinished(path: Path, start: int) -> bool:
    """Whether the bytes from `start` to the end of a file are the beginning of one record, as a
    crash in the middle of writing it leaves them."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - start
        file.seek(start)
        prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return _MAGIC.startswith(prefix[: len(_MAGIC)])
    lengths = _lengths(prefix)
    return lengths is not None and PREFIX_BYTES + sum(lengths) > left


def _lengths(prefix: bytes) -> tuple[int, int] | None:
    """Lengths of a record's header and payload; None: not the prefix of a record."""
    magic, header_bytes, payload_bytes, _ = _PREFIX.unpack_from(prefix)
    (own,) = _CHECK.unpack_from(prefix, _PREFIX.size)
    whole = own == zlib.crc32(prefix[: _PREFIX.size])
    return (header_bytes, payload_bytes) if whole and magic.startswith(_FAMILY) else None


def _next_record(file: BinaryIO, left: int) -> tuple[Record | State, int] | None:
    prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    lengths = _lengths(prefix)
    if lengths is None or PREFIX_BYTES + sum(lengths) > left:
        return None
    header, payload = (file.read(length) for length in lengths)
    check = _PREFIX.unpack_from(prefix)[3]
    if check != zlib.crc32(payload, zlib.crc32(header)):
        return None
    try:
        if not prefix.startswith(_MAGIC):
            raise BadMessage(f"the file begins with {prefix[:4]!r}, not with {_MAGIC!r}")
        return records.decode(header, payload), PREFIX_BYTES + sum(lengths)
    except BadMessage as error:
        raise ConfigError(
            f"{file.name} was written by another edgetrain: {error}",
            "use that one, or a newer one; nothing was changed here",
        ) from None


def segment_of(folder: Path, round: int) -> Path:
    """The file of the records that follow a snapshot after this many rounds."""
    return folder / f"{round:020d}.log"


def files(folder: Path, suffix: str) -> list[Path]:
    """The journal's files with this suffix, in order. ConfigError for other than files."""
    with reserve():
        inside = list(folder.iterdir())
    found = sorted(p for p in inside if p.suffix == suffix and _NAME.fullmatch(p.name))
    for path in found:
        if not path.is_file():
            raise ConfigError(
                f"{path} is not a file", f"is {folder} a journal? nothing was changed in it"
            )
    return found


_NAME = re.compile(r"\d{20}\.(base|log|tmp)")
