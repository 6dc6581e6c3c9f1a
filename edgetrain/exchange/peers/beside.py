"""How what a member does for others runs beside its training: in threads, or in virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Flag(Protocol):
    """As threading.Event."""

    def set(self) -> None:
        """It is so."""

    def clear(self) -> None:
        """It is not so."""

    def is_set(self) -> bool:
        """Whether it is so."""

    def wait(self, timeout: float) -> bool:
        """Wait until it is so, for at most this many seconds; returns whether it is."""


class Beside(Protocol):
    """Starts code that runs at the same time as its caller."""

    def start(self, code: Callable[[], None]) -> Callable[[], None]:
        """Run this; returns what waits for its end."""

    def flag(self) -> Flag:
        """A flag for both, not set."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class Threads:
    """In threads of this process, by real time: Beside."""

    def start(self, code: Callable[[], None]) -> Callable[[], None]:
        thread = threading.Thread(target=code, name="edgetrain beside", daemon=True)
        thread.start()
        return thread.join

    def flag(self) -> Flag:
        return threading.Event()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


THREADS = Threads()
