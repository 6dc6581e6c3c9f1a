"""Files that are whole or not there: written as a draft, then renamed into their place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def file_mode(folder: Path) -> int:
    """Permissions of a new file in a folder: users without access to the folder have none to the
    file, wherever it is moved. Raises OSError."""
    return folder.stat().st_mode & 0o644


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden draft beside `path`: write it in the block; at its end it takes the place of `path`.

    A reader sees the old file or the new one, never half of it, even after a loss of power. If the
    block raises, `path` is as before and the draft is removed. Raises OSError if the disk refuses.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.touch(file_mode(path.parent))
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Put a UTF-8 file in the place of `path`, whole. Raises OSError if the disk refuses."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
