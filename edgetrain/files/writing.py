"""Files that are whole or not there: written as a draft, then renamed into their place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

PARTS_PER_WRITE = 64
"""Buffers handed to the kernel in one call; the kernel's own limit is 1024."""


def file_mode(folder: Path) -> int:
    """Permissions of a new file in a folder: users without access to the folder have none to the
    file, wherever it is moved. Raises OSError."""
    return folder.stat().st_mode & 0o644


@contextlib.contextmanager
def replacing(
    path: Path, draft: Path | None = None, mode: int | None = None, *, durable: bool = True
) -> Iterator[BinaryIO]:
    """An empty file, open to write; at the end of the block it takes the place of `path`.

    draft: its path until then, in the same folder (None: a hidden one beside `path`).
    mode: permissions of a new file, less the umask (None: `file_mode`).
    A reader sees the old file or the new one, never half of it; if `durable`, even after a loss of
    power: the content is on the disk before the rename, the rename after `sync`. If the
    block raises or the disk refuses (OSError), `path` is as before and the draft is removed; a
    process that is killed may leave it.
    """
    draft = draft or path.with_name(f".{path.name}.{os.getpid()}")
    mode = file_mode(path.parent) if mode is None else mode

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    try:
        with open(draft, "wb", opener=opened) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Put a UTF-8 file in the place of `path`, whole. Raises OSError if the disk refuses."""
    with replacing(path) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(
    file: int,
    parts: Sequence[bytes | bytearray | memoryview],
    writev: Callable[[int, Sequence[memoryview]], int] | None = None,
) -> None:
    """Write all bytes of these buffers, in order, without copying them. Raises OSError.

    `writev` (None: os.writev) writes some of them and returns how many bytes.
    """
    writev = writev or os.writev
    views = [memoryview(part).cast("B") for part in parts]
    left = [view for view in views if view.nbytes]
    while left:
        done = writev(file, left[:PARTS_PER_WRITE])
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left:
            left[0] = left[0][done:]
