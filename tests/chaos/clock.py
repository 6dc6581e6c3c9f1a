"""A monotonic clock that another process can let jump ahead.

It stands for a machine that has slept. Nothing in edgetrain measures time by the wall clock, which
can be set back. Timers of sockets and of the kernel do not jump, and nobody sleeps.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_AHEAD = struct.Struct("<d")


class Clock:
    """time.monotonic() plus the jumps so far, which are in a file that several processes map.

    A process that is started again with the same file keeps the jumps of its machine.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; create it, without jumps, if it does not exist."""
        with path.open("a+b") as file:
            if file.seek(0, 2) < _AHEAD.size:
                file.write(_AHEAD.pack(0.0))
                file.flush()
            self._ahead = mmap.mmap(file.fileno(), _AHEAD.size)

    def __call__(self) -> float:
        """Seconds, as time.monotonic()."""
        ahead: float = _AHEAD.unpack_from(self._ahead)[0]
        return time.monotonic() + ahead

    def jump(self, seconds: float) -> None:
        """Be `seconds` later at once, in all processes. Only one process may call this."""
        (ahead,) = _AHEAD.unpack_from(self._ahead)
        _AHEAD.pack_into(self._ahead, 0, ahead + seconds)

    def close(self) -> None:
        """Unmap the file."""
        self._ahead.close()
