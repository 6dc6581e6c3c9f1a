"""Ending on request: the first signal asks, the second ends the process at once.

Code that is to stop checks at points where nothing is half done. No handler is installed by itself.

    state      event      effect                                  next state
    direct     a signal   raises Stopped where the code is        asked
    direct     `defer`    -                                       deferred
    deferred   a signal   remembered; `check` raises Stopped      asked
    asked      a signal   the system ends the process             -
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from edgetrain.errors import Stopped

GRACE_S = 2.0
"""Seconds that a member goes on waiting for a reply after the signal. The reply is probably on its
way, and then the step can be finished."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """A handler for signals, and their request. Before `defer` a signal raises Stopped at once;
    afterwards it is a request, and training calls `check` where nothing is half done.

    `asked` is the signal's number; 0: there was none. `alive` is called at each `check`: these are
    the points at which a member that waits shows that it is not hung.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = 0
        self.alive: Callable[[], None] = lambda: None
        self._clock = clock
        self._since = 0.0
        self._deferred = False

    def __call__(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Request the end. As a handler (with `frame`) restore the system's handlers first, so that
        the next signal ends the process."""
        if frame is not None:
            for each in SIGNALS:
                if signal.getsignal(each) is self:
                    signal.signal(each, signal.SIG_DFL)
        if not self.asked:
            self.asked, self._since = int(signum), self._clock()
        if not self._deferred:
            raise Stopped(self.asked)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Self]:
        """Within: handle SIGTERM and SIGINT (Ctrl-C). Only in a process's main thread."""
        before = {each: signal.signal(each, self) for each in SIGNALS}
        try:
            yield self
        finally:
            for each, handler in before.items():
                if signal.getsignal(each) is self:
                    signal.signal(each, handler)

    def defer(self) -> None:
        """Treat signals as requests from now on. Raises Stopped if there was one."""
        self._deferred = True
        self.check()

    def check(self, grace_s: float = 0.0) -> None:
        """Raise Stopped if that was requested at least `grace_s` seconds ago."""
        self.alive()
        if self.asked and self._clock() - self._since >= grace_s:
            raise Stopped(self.asked)
