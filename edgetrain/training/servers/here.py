"""The ranks that one machine runs in an attempt: processes from a fork server."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized

from edgetrain.training import processes
from edgetrain.training.processes import Child
from edgetrain.training.servers.attempt import Attempt, RankEnd

PRELOAD = ("edgetrain.training.servers.process",)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Here:
    """Ranks as children of this process. It never goes away: it is this process."""

    gone, problem = False, ""

    def __init__(self) -> None:
        self._context = processes.fork_server(PRELOAD)
        self._began: Synchronized[float] = self._context.Value("d", 0.0)
        self._children: dict[int, Child] = {}

    @property
    def is_ready(self) -> bool:
        return True

    def start(self, attempt: Attempt, ranks: Sequence[int], interface: str = "") -> None:
        """Start these ranks of an attempt. They talk over `interface`; "": as torch chooses."""
        if interface:
            os.environ.update(dict.fromkeys(INTERFACES, interface))
        if attempt.elapsed_s is not None:
            self._began.value = time.monotonic() - attempt.elapsed_s
        for local, rank in enumerate(ranks):
            given = (attempt, rank, local, interface, self._began)
            self._children[rank] = processes.start(self._context, f"r{rank}", _rank, *given)

    def ended(self) -> dict[int, RankEnd]:
        found = {}
        for rank, child in self._children.items():
            if not child.running:
                found[rank] = RankEnd(child.exit_code or 0, child.error)
        return found

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since training began, if the leader, rank 0, is here; None: it has not."""
        return time.monotonic() - self._began.value if self._began.value else None

    def wait(self, seconds: float) -> None:
        """Wait this long, or until one of the ranks has ended."""
        running = [child for child in self._children.values() if child.running]
        if running:
            running[0].process.join(seconds)
        else:
            time.sleep(seconds)

    def stop(self) -> None:
        processes.stop_all(list(self._children.values()), 0.5)
        self._children.clear()

    def close(self) -> None:
        self.stop()


def _rank(
    attempt: Attempt, rank: int, local: int, interface: str, began: Synchronized[float]
) -> None:
    from edgetrain.training.servers.process import rank_process

    if interface:
        os.environ.update(dict.fromkeys(INTERFACES, interface))
    rank_process(attempt, rank, local, began)
