"""What a service manager (systemd) is told of a member: ready, alive, and what it waits for.

    moment                                   told
    the process starts                       STATUS=looking for the hub at …
    the hub has welcomed the member          READY=1, and WATCHDOG_USEC until steps are known
    a member waits, or has taken a step      WATCHDOG=1 and STATUS, every few seconds
    a step took longer than all before       WATCHDOG_USEC, SLOWEST times as long
    the hub has been away for AWAY_S         RELOADING=1: the unit is no longer "active (running)"
    the hub answers again                    READY=1
    it ends                                  STOPPING=1 and STATUS, with the reason

A member whose hub is away keeps its model, and what the hub has not got yet, in memory: it goes on
where it was if it waits, and not if it is started again. For a unit of Type=notify RELOADING=1 is
the one state that says "running, but not ready".

Without NOTIFY_SOCKET in the environment nothing is told to anybody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from edgetrain.errors import EdgetrainError, Stopped

SLOWEST = 20.0
"""How many times longer than the longest step so far a step may take, before it counts as hung."""
UNKNOWN_S = 3600.0
"""The watchdog's time until the first steps have been taken."""
MOST_S = 10.0
"""Seconds between two signs of life, at most."""
AWAY_S = 10.0
"""Seconds without an answer after which a member is no longer ready: shorter ones are hiccups."""


@contextlib.contextmanager
def told_why() -> Iterator[Service]:
    """A service manager, which is told which error ends this, or who asked it to stop."""
    service = Service()
    try:
        yield service
    except (EdgetrainError, Stopped) as error:
        service.stopping(str(error) if isinstance(error, EdgetrainError) else "asked to stop")
        raise


class Service:
    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        watchdog = environment.get("WATCHDOG_USEC", "")
        self._watchdog_s = float(watchdog) / 1e6 if watchdog.isdigit() else 0.0
        self._clock = clock
        self._told = self._seen = clock()
        self._longest_s = 0.0
        self._steps = 0
        self.is_ready = self._is_away = False
        self.describe: Callable[[], str] = lambda: ""
        """Description of the member's current work."""
        self.away: Callable[[], float] = lambda: 0.0
        """Seconds for which the hub has not answered; 0.0 if it has."""

    def tell(self, **fields: str) -> None:
        """Send fields as sd_notify does. A service manager that is gone is not an error."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        text = "\n".join(f"{key}={' '.join(value.split())}" for key, value in fields.items())
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(address)
            to.sendall(text.encode())

    def status(self, text: str | Callable[[], str]) -> None:
        """Say in words what the member is doing, until it does something else. A function is called
        again at each sign of life."""
        self.describe = (lambda: text) if isinstance(text, str) else text
        self.tell(STATUS=self.describe())

    def ready(self) -> None:
        self.is_ready = True
        self.tell(READY="1", STATUS=self.describe())
        self._raise_watchdog(UNKNOWN_S)

    def alive(self, steps: int = 0) -> None:
        """The member waits, or has taken `steps` steps in all. Called often; told now and then."""
        now = self._clock()
        if steps > self._steps:
            self._steps = steps
            longest = max(self._longest_s, now - self._seen)
            if longest > self._longest_s:
                self._longest_s = longest
                self._raise_watchdog(SLOWEST * longest)
        self._seen = now
        if now - self._told >= min(MOST_S, self._watchdog_s / 4 or MOST_S):
            self._told = now
            self.tell(**self._state(), WATCHDOG="1")

    def _state(self) -> dict[str, str]:
        away_s, was_away = self.away(), self._is_away
        self._is_away = self.is_ready and away_s >= AWAY_S
        if self._is_away:
            text = f"looking for the hub: nothing from it for {away_s:.0f} s"
            return {"STATUS": text} | ({} if was_away else {"RELOADING": "1"})
        return {"STATUS": self.describe()} | ({"READY": "1"} if was_away else {})

    def stopping(self, reason: str) -> None:
        self.tell(STOPPING="1", STATUS=reason)

    def _raise_watchdog(self, seconds: float) -> None:
        """Let the watchdog wait for this long, and never less than the unit says."""
        if self._watchdog_s:
            self.tell(WATCHDOG_USEC=f"{1e6 * max(seconds, self._watchdog_s):.0f}")
