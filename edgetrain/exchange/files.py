"""Files that are whole or not there: written as a draft, then renamed into their place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgetrain.vectors.vector import Buffer

PARTS_PER_WRITE = 64
"""Buffers handed to the kernel in one call; the kernel's own limit is 1024."""


@contextlib.contextmanager
def replacing(path: Path, draft: Path, mode: int, *, durable: bool = True) -> Iterator[int]:
    """A descriptor of the empty file `draft`, which is renamed to `path` when the block ends.

    mode: permissions of a new draft, less the umask. If `durable`, the content is on the disk
    before the rename; the rename itself is on the disk after `sync_folder`. Both files are in one
    folder. If the disk refuses (OSError), `path` is as before and the draft is removed; a process
    that is killed may leave the draft.
    """
    try:
        with _opened(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, mode) as file:
            yield file
            if durable:
                os.fsync(file)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: files made, renamed and removed. Raises OSError."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def write_all(
    file: int,
    parts: Sequence[Buffer],
    writev: Callable[[int, Sequence[Buffer]], int] | None = None,
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


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
