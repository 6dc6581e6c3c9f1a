"""Ending because someone asked for it: the first signal asks, the second ends the process at once.

What is to stop looks here when it can stop whole. Nothing here knows what that is, and no handler
is installed by itself.
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
"""A reply that is waited for when the signal comes is waited for so much longer: it is most likely
on its way, and the step can be finished."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """A handler for signals, and what they asked for. Before `defer` a signal ends what is going on
    where it is, by Stopped; from then on it is a request, and whoever trains calls `check` where
    nothing is half done.

    `asked` is the signal's number, 0 as long as there was none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = 0
        self._clock = clock
        self._since = 0.0
        self._deferred = False

    def __call__(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Ask. As a handler it gives its signals back to the system first: the next one ends the
        process, whatever it is doing."""
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
        """Within: handle SIGTERM and Ctrl-C. Only in a process's main thread."""
        before = {each: signal.signal(each, self) for each in SIGNALS}
        try:
            yield self
        finally:
            for each, handler in before.items():
                if signal.getsignal(each) is self:
                    signal.signal(each, handler)

    def defer(self) -> None:
        """From now on a signal is a request. Raises Stopped if there was one."""
        self._deferred = True
        self.check()

    def check(self, grace_s: float = 0.0) -> None:
        """Raise Stopped if that was asked for, at least so long ago."""
        if self.asked and self._clock() - self._since >= grace_s:
            raise Stopped(self.asked)
