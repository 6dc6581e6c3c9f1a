"""Virtual time: a clock that jumps from event to event, and processes that sleep and wait in it.

A process is ordinary blocking code (the same that runs on a real member) on a greenlet. Instead of
waiting it switches to the event loop. There is one thread, no real clock and no randomness; events
of one instant happen in the order in which they were requested, so a run is reproducible.

    state of a process   event                           next state
    waiting              `resume`                        running, until it waits again
    waiting              `resume` before `hold`'s time   waiting: resumed again at that time
    waiting              `kill`                          over
    running              its code returns or fails       over
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
SECOND = 1_000_000_000


class Process:
    """Code that runs in virtual time until it returns, fails or is killed. Made by `World.start`.

    `error` is the exception that it failed with; `over` is True once it has ended in any way. An
    interrupt is nobody's failure: it ends the process and leaves the event loop, too.
    """

    def __init__(self, world: World, name: str, code: Callable[[], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.failed_at = 0
        """Nanoseconds."""
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
        except Exception as error:
            self.error, self.failed_at = error, self._world.now
        finally:
            self.over = True

    def resume(self) -> None:
        """Continue it now, or at the time it is held until; returns when it waits again. Call it
        from the event loop only."""
        if self._world.now < self._held_until:
            self._world.at(self._held_until, self.resume)
        elif not self.over:
            self._greenlet.switch()

    def hold(self, until: int) -> None:
        """Do not continue it before `until` nanoseconds, as if it got SIGSTOP."""
        self._held_until = max(self._held_until, until)

    def kill(self) -> None:
        """End it where it waits, as SIGKILL would. Its `finally` clauses still run, so cut it off
        from the world first. Call it from the event loop only; works twice."""
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
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0

    def clock(self) -> float:
        """Virtual seconds since the beginning: stands in for time.monotonic."""
        return self.now / SECOND

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Call `action` at this time in nanoseconds, or now if it has passed."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, action))

    def start(self, name: str, code: Callable[[], None], when: int = 0) -> Process:
        """Make a process that begins at `when` nanoseconds."""
        process = Process(self, name, code)
        self.at(when, process.resume)
        return process

    def sleep(self, seconds: float) -> None:
        """Suspend the calling process for this many seconds: stands in for time.sleep."""
        self.at(self.now + round(seconds * SECOND), getcurrent().process.resume)
        self.wait()

    def wait(self) -> None:
        """Let events happen until the calling process is resumed. One that an interrupt or `kill`
        ends waits for nothing more in its `finally` clauses: nobody else may go on meanwhile."""
        ends = sys.exc_info()[1]
        if ends is not None and not isinstance(ends, Exception):
            raise ends
        self.loop.switch()

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True


class Mailbox(Generic[T]):
    """A queue of items for one process, in order."""

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

    def wake(self) -> None:
        """Let the process go on without an item, if it waits."""
        if self._reader is not None:
            self._wake(self._turn)

    def get(self, timeout_s: float) -> T | None:
        """The next item; None if none arrives within `timeout_s` virtual seconds."""
        if not self._items and timeout_s > 0:
            self._turn += 1
            turn, self._reader = self._turn, getcurrent().process
            # At least one tick: shorter waits would never see time pass.
            deadline = self._world.now + max(round(timeout_s * SECOND), 1)
            self._world.at(deadline, lambda: self._wake(turn))
            self._world.wait()
        return self._items.popleft() if self._items else None

    def _wake(self, turn: int) -> None:
        """Resume the reader, unless it has gone on since `turn`, or will at this instant."""
        reader = self._reader
        if reader is None or turn != self._turn:
            return
        self._reader = None
        self._world.at(self._world.now, reader.resume)
