"""Where the code of a room in memory runs: in threads, by this machine's time; or on greenlets, in
virtual time, where a seed draws how long each message takes, and so who is first."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter

from greenlet import getcurrent

from edgetrain.exchange.peers.beside import Threads
from edgetrain.training.simulated.peers import VirtualFlag
from edgetrain.training.simulated.virtual import SECOND, Mailbox, World
from tests.fakes.loopback import Loopback

LOOK_S = 0.01
"""Virtual seconds between two looks at whether code has ended."""


class RealTime(Threads):
    """A thread for each."""

    clock = staticmethod(time.monotonic)

    def loopback(self) -> Loopback:
        return Loopback()

    def task(self, code):
        return threading.Thread(target=code, daemon=True)

    def machine(self) -> RealTime:
        """A Beside of one member's machine."""
        return self


class VirtualTime:
    """As a RealTime, of a world of its own. Messages take up to `trip_s`, those of one
    connection in order; its greenlets run while the main one waits for one of them."""

    def __init__(self, seed: int, trip_s: float = 0.02) -> None:
        self.world, self._rng, self.trip_s = World(), random.Random(f"{seed} scene"), trip_s
        self.dying = {}
        """What processes are to raise where they wait."""

    def clock(self) -> float:
        return self.world.clock()

    def sleep(self, seconds: float) -> None:
        """As time.sleep."""
        self.world.sleep(seconds)
        self.live()

    def live(self) -> None:
        """Raise what the process is to die of."""
        if (error := self.dying.pop(getcurrent().process, None)) is not None:
            raise error

    def loopback(self) -> LateLoopback:
        return LateLoopback(lambda: LateQueue(self))

    def delay(self) -> int:
        """Nanoseconds that the next message takes."""
        return round(self._rng.uniform(0, self.trip_s) * SECOND)

    def task(self, code) -> Task:
        return Task(self, code)

    def machine(self) -> Machine:
        """A Beside of one member's machine."""
        return Machine(self)


class Machine:
    """One member's machine: a Beside."""

    def __init__(self, scene: VirtualTime) -> None:
        self._scene, self.tasks = scene, []
        self.sleep = scene.sleep

    def start(self, code):
        task = self._scene.task(code)
        self.tasks.append(task)
        task.start()
        return task.join

    def flag(self) -> VirtualFlag:
        return VirtualFlag(self._scene.world)

    def hold(self, seconds: float) -> None:
        """Nothing runs here for a while."""
        for task in self.tasks:
            task.hold(seconds)


class Task:
    """As a threading.Thread."""

    def __init__(self, scene: VirtualTime, code) -> None:
        self._scene, self._code, self.process = scene, code, None

    def start(self) -> None:
        world = self._scene.world
        self.process = world.start("task", self._code, world.now)

    def hold(self, seconds: float) -> None:
        """Let it stand still for a while."""
        self.process.hold(self._scene.world.now + round(seconds * SECOND))

    def throw(self, error: BaseException) -> None:
        """Raise this where the code waits. To be called by the world."""
        if self.is_alive():
            self._scene.dying[self.process] = error
            self.process.resume()

    def is_alive(self) -> bool:
        return self.process is not None and not self.process.over

    def join(self, timeout: float | None = None) -> None:
        world = self._scene.world
        until = world.clock() + (float("inf") if timeout is None else timeout)
        while self.is_alive() and world.clock() < until:
            if getcurrent() is not world.loop:
                world.sleep(LOOK_S)
            elif not world.step():
                return
        if self.process is not None and self.process.error is not None:
            raise self.process.error


class LateLoopback(Loopback):
    """One of VirtualTime."""

    def cut(self, name: bytes) -> None:
        """A member's connection breaks: what is under way is lost."""
        self.disconnect(name)
        self._inbox.lose(name)


class LateQueue:
    """As a queue.Queue, of what is put in for one reader."""

    def __init__(self, scene: VirtualTime) -> None:
        self._scene, self._here, self._newest = scene, Mailbox(scene.world), {}
        self._losses = Counter()

    def lose(self, sender) -> None:
        """What is under way from this sender never arrives."""
        self._losses[sender] += 1

    def put(self, item) -> None:
        """Items of one sender, (sender, frames), stay in order."""
        world = self._scene.world
        sender = item[0] if isinstance(item, tuple) else None
        at = max(self._newest.get(sender, 0), world.now + self._scene.delay())
        self._newest[sender] = at
        losses = self._losses[sender]
        world.at(at, lambda: self._losses[sender] == losses and self._here.put(item))

    def get(self, block: bool = True, timeout: float | None = None):
        found = self._here.get((1e9 if timeout is None else timeout) if block else 0.0)
        self._scene.live()
        if found is None:
            raise queue.Empty
        return found

    def get_nowait(self):
        return self.get(block=False)
