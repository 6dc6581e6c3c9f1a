"""Signs of life of ranks, in their attempt's store.

A rank that was stopped, or whose machine stands still, closes no connection: all others wait for
it, and say nothing. So a thread of each rank counts up in the store, whatever the rank computes,
and the run that started them looks who has stopped counting. Ranks that wait for another count on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from threading import Event, Thread

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edgetrain.training.servers.mesh import store_at

LINE_S = 60.0
"""Silence that is said in a line."""
_MOST_S = 5.0


def every_s(hang_s: float) -> float:
    """Seconds between two signs of a rank whose attempt ends after `hang_s` without one."""
    return min(_MOST_S, hang_s / 10)


def begin(host: str, port: int, rank: int, hang_s: float) -> Callable[[], None]:
    """Give signs in the store at host:port, over a connection of their own; what is returned ends
    it. They end with the store as well."""
    store = store_at(host, port, is_master=False)
    over = Event()

    def count() -> None:
        while not over.is_set():
            try:
                store.add(_key(rank), 1)
            except RuntimeError:  # the attempt is over
                return
            over.wait(every_s(hang_s))

    thread = Thread(target=count, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


class SilentRanks:
    """Who of the ranks of an attempt gives no sign, as the owner of its store sees it."""

    def __init__(
        self,
        store: TCPStore,
        ranks: int,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._clock, self._every = store, clock, every_s(hang_s)
        self._looked = clock()
        self._counts = dict.fromkeys(range(ranks), 0)
        self.seconds = dict.fromkeys(range(ranks), 0.0)
        """Since the last sign of each rank."""

    def look(self, ended: Collection[int]) -> None:
        """Bring `seconds` up to now, if it is time; ranks that have `ended` are silent for none.
        Time in which nobody looked, as this process was stopped too, counts little."""
        passed = self._clock() - self._looked
        if passed < self._every:
            return
        self._looked += passed
        for rank, known in self._counts.items():
            found = self._counts[rank] = self._store.add(_key(rank), 0)
            is_heard = found != known or rank in ended
            self.seconds[rank] = 0.0 if is_heard else (
                self.seconds[rank] + min(passed, 2 * self._every)
            )  # fmt: skip


def _key(rank: int) -> str:
    return f"signs of r{rank}"
