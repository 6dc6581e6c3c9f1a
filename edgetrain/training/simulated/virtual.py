"""Virtual time: a clock that jumps from event to event, and processes that sleep and wait in it.

A process is ordinary blocking code (the same that runs on a real member) on a greenlet: where it
would wait for the world, it hands over to the event loop instead. One thread, no real clock and no
randomness; events of one instant happen in the order in which they were asked for, so a run is
reproducible. What the events mean is not known here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
SECOND = 1_000_000_000


class Process:
    """Code that runs in virtual time until it returns, fails or is killed. Made by `World.start`.

    `error` is what it failed with, `over` is True once it has ended in any way.
    """

    def __init__(self, world: World, name: str, code: Callable[[], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.over = False
        self._world = world
        self._code = code
        self._held_until = 0
        self._greenlet = greenlet(self._run, world.loop)
        self._greenlet.process = self

    def _run(self) -> None:
        try:
            self._code()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.over = True

    def resume(self) -> None:
        """Go on with it now, or when it is let go of; comes back when it waits again. From the
        event loop only."""
        if self._world.now < self._held_until:
            self._world.at(self._held_until, self.resume)
        elif not self.over:
            self._greenlet.switch()

    def hold(self, until: int) -> None:
        """Do not let it go on before then, whatever it waits for: what SIGSTOP does."""
        self._held_until = max(self._held_until, until)

    def kill(self) -> None:
        """End it where it waits, as SIGKILL would: its `finally` clauses still run, so whoever
        kills it first cuts it off from the world. From the event loop only; works twice."""
        if not self.over:
            self._greenlet.throw(GreenletExit)
            self.over = True


class World:
    """The event loop. `now` is integer nanoseconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0
        self.loop = getcurrent()
        """The greenlet that runs events."""
        self.events = 0
        """Events that have happened."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0

    def clock(self) -> float:
        """Virtual seconds since the beginning: stands in for time.monotonic."""
        return self.now / SECOND

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Let `action` happen at this time, or now where that has passed."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, action))

    def start(self, name: str, code: Callable[[], None], when: int = 0) -> Process:
        """A new process, which begins at `when`."""
        process = Process(self, name, code)
        self.at(when, process.resume)
        return process

    def sleep(self, seconds: float) -> None:
        """Let the calling process stand still: stands in for time.sleep."""
        self.at(self.now + round(seconds * SECOND), getcurrent().process.resume)
        self.loop.switch()

    def step(self) -> bool:
        """Let the next event happen; False where there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True


class Mailbox(Generic[T]):
    """What arrives for one process, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[T] = deque()
        self._reader: Process | None = None
        self._turn = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add something; wakes the process if it waits."""
        self._items.append(item)
        if self._reader is not None:
            self._wake(self._turn)

    def get(self, timeout_s: float) -> T | None:
        """The next item, waiting at most so many virtual seconds for it; None if there was none."""
        if not self._items and timeout_s > 0:
            self._turn += 1
            turn, self._reader = self._turn, getcurrent().process
            # At least a tick: who waits for less than that would never see it pass.
            deadline = self._world.now + max(round(timeout_s * SECOND), 1)
            self._world.at(deadline, lambda: self._wake(turn))
            self._world.loop.switch()
        return self._items.popleft() if self._items else None

    def _wake(self, turn: int) -> None:
        """Resume the reader, unless it has gone on since `turn`, or will at this instant."""
        reader = self._reader
        if reader is None or turn != self._turn:
            return
        self._reader = None
        self._world.at(self._world.now, reader.resume)
