"""A file that many processes append whole lines to, and what a full disk does to it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from edgetrain.errors import explain_os_errors
from edgetrain.files.writing import file_mode

_logger = logging.getLogger("edgetrain")


class LineFile:
    """Appends lines to `path` for one writer, each call in a single write.

    Any number of processes may append to the same file: it is opened with O_APPEND. A full disk is
    not an error: it is logged once, in the name of `writer`, and the next call tries again. Raises
    ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self._writer = writer
        self._torn = False
        self._warned = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with explain_os_errors(f"cannot write {path}", "choose another folder for runs"):
            self._fd: int | None = os.open(path, flags, file_mode(path.parent))

    @property
    def closed(self) -> bool:
        return self._fd is None

    def append(self, lines: bytes) -> int:
        """Append whole lines. Returns how many of them the disk did not take."""
        if self._fd is None:
            return lines.count(b"\n")
        # After a torn line begin a new one, so that only the torn one cannot be read.
        data = b"\n" + lines if self._torn else lines
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return lines.count(b"\n")
        if written < len(data):  # the disk filled up in the middle
            self._warn(os.strerror(errno.ENOSPC))
        self._torn = not data[:written].endswith(b"\n")
        return data[max(written, 1) :].count(b"\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "%s cannot write its metrics to %s: %s; training goes on without them",
                self._writer,
                self.path,
                why,
            )
