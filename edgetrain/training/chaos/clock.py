"""A clock that jumps ahead when somebody says so from outside, for a process that is passed it.

What can be set back, the wall clock, nothing in edgetrain measures time by: what jumps here is the
monotonic clock, as on a machine that has slept. The sleeping itself, sockets' and the kernel's
timers are no part of it.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_AHEAD = struct.Struct("<d")


class Clock:
    """time.monotonic(), and what it has jumped: kept in a file that several processes have open.

    A process that is started again with the same file has the clock of its machine, jumps and all.
    """

    def __init__(self, path: Path) -> None:
        """Make the file if it is not there, with a clock that has not jumped."""
        with path.open("a+b") as file:
            if file.seek(0, 2) < _AHEAD.size:
                file.write(_AHEAD.pack(0.0))
                file.flush()
            self._ahead = mmap.mmap(file.fileno(), _AHEAD.size)

    def __call__(self) -> float:
        """Seconds."""
        ahead: float = _AHEAD.unpack_from(self._ahead)[0]
        return time.monotonic() + ahead

    def jump(self, seconds: float) -> None:
        """Be so much later at once. One process jumps, any number look."""
        (ahead,) = _AHEAD.unpack_from(self._ahead)
        _AHEAD.pack_into(self._ahead, 0, ahead + seconds)

    def close(self) -> None:
        """Let go of the file."""
        self._ahead.close()
