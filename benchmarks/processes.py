"""What a set of processes costs, whoever started them: memory and CPU seconds, read from /proc.

A set is found by environment variables that its processes were started with, so that daemons and
children of children belong to it as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_TRIES = 8
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Marked:
    """The running processes whose environment had all these variables when they began."""

    def __init__(self, **variables: str) -> None:
        self._wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        self._known: dict[int, int] = {}

    def __call__(self) -> list[int]:
        """Their numbers now."""
        present = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        self._known = {pid: self._looked(pid, self._known.get(pid, _TRIES)) for pid in present}
        return [pid for pid, tries in self._known.items() if tries < 0]

    def _looked(self, pid: int, tries: int) -> int:
        """Tries left; below 0: it belongs. A process has its own environment only once it has
        executed its command, a moment after it was forked: so it is asked more than once."""
        if tries <= 0:
            return tries
        return -1 if self._asked(pid) else tries - 1

    def _asked(self, pid: int) -> bool:
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return self._wanted <= set(found)


def memory_bytes(pids: Sequence[int]) -> int:
    """Memory of their own: anonymous pages and shared memory, those that several of these share
    once. Not pages of files: programs and libraries, of which a machine has one copy."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
        total += 1024 * (int(fields.get("Pss_Anon", 0)) + int(fields.get("Pss_Shmem", 0)))
    return total


def cpu_seconds(pids: Sequence[int]) -> float:
    """What they have used so far, and what ended children used that they have waited for."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        total += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return total * _TICK_S


class Peak:
    """The most memory and the most processes of a set, looked at every `period_s` seconds."""

    def __init__(self, variables: Mapping[str, str], period_s: float = 0.25) -> None:
        self.memory_bytes = self.processes = 0
        self._marked, self._period_s = Marked(**variables), period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._period_s):
            pids = self._marked()
            self.processes = max(self.processes, len(pids))
            self.memory_bytes = max(self.memory_bytes, memory_bytes(pids))
