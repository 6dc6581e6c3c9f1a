"""What simulated machines have of their own: a clock that can jump, a disk that can fill up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.training.simulated.virtual import World
from edgetrain.vectors.vector import Buffer


class MachineClock:
    """The monotonic clock of one machine, in virtual seconds: the world's time plus its jumps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead = 0.0

    def __call__(self) -> float:
        return self._world.clock() + self._ahead

    def jump(self, seconds: float) -> None:
        """Be `seconds` later at once, and stay so."""
        self._ahead += seconds


class FillingDisk:
    """The disk of the hub's journal. While it is full, half of what is written still fits.

    `writev` and `free` are what a `JournalDisk` needs; `full_until` is the virtual time in
    nanoseconds at which the last of the writes that filled it is deleted.
    """

    def __init__(self, world: World) -> None:
        self.full = False
        self.full_until = 0
        self._world = world

    def fill(self, until: int) -> None:
        """Be full until this virtual time; the longest of several calls counts."""
        self.full, self.full_until = True, max(self.full_until, until)
        self._world.at(until, self._make_room)

    def _make_room(self) -> None:
        self.full = self._world.now < self.full_until

    def writev(self, file: int, buffers: Sequence[Buffer]) -> int:
        """See os.writev."""
        if not self.full:
            return os.writev(file, buffers)
        os.write(file, memoryview(buffers[0])[: memoryview(buffers[0]).nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self, folder: Path) -> int:
        """Bytes left for `folder`."""
        return 0 if self.full else 1 << 60


@dataclass(frozen=True)
class ComputedUsage:
    """CPU seconds of a simulated machine: the virtual ones it computed. Memory is not simulated."""

    seconds: Callable[[], float]

    @property
    def cpu_s(self) -> float:
        return self.seconds()

    @property
    def peak_bytes(self) -> int:
        return 0
