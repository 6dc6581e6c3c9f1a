"""Watching the connections of a hub from a thread of its own.

libzmq accepts and reads connections in its own thread, also while the hub merges a round or waits
for its disk. So a thread that does nothing else looks every WATCH_S at the connections that were
accepted, and as often as that costs little at what they have sent. It shuts down those that
`Arrivals` finds over a limit, and those from an address that was: libzmq then closes them and frees
what they had.

A descriptor may be closed, and be another connection's, between a report of libzmq's and its
shutdown. As all reports are read first, that other one was accepted a moment ago and has said
nothing: a member whose connection is shut down makes another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque

import zmq

from edgetrain.exchange.zeromq.arrivals import BARRED_S, Arrivals, Barred, Limits
from edgetrain.exchange.zeromq.handshakes import Newcomers, next_event
from edgetrain.exchange.zeromq.tcp_counters import peer_of, received_bytes_of, shut_down

WATCH_S = 0.02
LOOK_TIMES = 100
"""A look at what connections have sent takes microseconds for each: wait this many times as long
before the next,"""
GROWTH_BYTES = 4 << 20
"""or until the process has grown by this much. (Memory that was freed before is no growth.)"""
LINES_KEPT = 1000


class Watch:
    """The connections of one hub. Its methods may be called from any thread.

    Reads `monitor`, a monitor socket, and nobody else may. `encrypted`: whether connections prove a
    key.
    """

    def __init__(
        self, monitor: zmq.Socket[bytes], limits: Limits, encrypted: bool, handshake_ms: int
    ) -> None:
        self._monitor = monitor
        self._limits = limits
        self._newcomers = Newcomers() if encrypted else None
        self._handshake_ms = handshake_ms
        self._arrivals = Arrivals(limits)
        self._barred = Barred()
        self._lines: deque[tuple[str, str]] = deque(maxlen=LINES_KEPT)
        # Reentrant: a garbage collection may close the hub in the middle of anything.
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._look_again = float("-inf")
        self._statm = -1
        with contextlib.suppress(OSError):  # not Linux: then every look is worth it
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._resident = self._resident_bytes()
        self._thread = threading.Thread(target=self._run, name="edgetrain watch", daemon=True)
        self._thread.start()

    # -- what the hub's thread calls ----------------------------------------------------------

    def count_message(self, descriptor: int, owner: bytes) -> None:
        """A whole message of a member, with this key, came over this connection."""
        if self._newcomers is None and self._arrivals.count_message(descriptor, owner):
            return
        with self._lock:
            if descriptor not in self._arrivals:
                self._read_events()
            self._arrivals.count_message(descriptor, owner)
            if self._newcomers is not None:
                self._newcomers.message_came(descriptor)

    def was_refused(self) -> None:
        """The gate refuses a connection; that has been reported."""
        with self._lock:
            if self._newcomers is not None:
                self._newcomers.was_refused()

    def read_lines(self) -> list[tuple[str, str]]:
        """(kind, line) of connections that failed or were ended since the last call, as the thread
        has found by now: asked at each poll."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def stop(self) -> None:
        """Stop watching: `monitor` may be closed afterwards. Works twice."""
        self._stopped.set()
        with self._lock:
            if self._statm >= 0:
                os.close(self._statm)
                self._statm = -1
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- watching -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_S):
            with self._lock:
                self._read_events()
                crowd = self._arrivals.find_crowd(peer_of)
                if crowd:
                    most = self._limits.newcomers
                    line = f"{len(crowd)} that said nothing, more than {most} at a time, are ended"
                    self._lines.append(("crowd", f"connections: {line}"))
                for descriptor in crowd:
                    self._end(descriptor)
                self._end_excessive()

    def _end_excessive(self) -> None:
        resident = self._resident_bytes()
        self._resident = min(self._resident, resident)
        began = time.monotonic()
        if began < self._look_again and resident - self._resident < GROWTH_BYTES:
            return
        self._resident = resident
        received = {number: received_bytes_of(number) for number in self._arrivals}
        for descriptor, unfinished in self._arrivals.find_excessive(received):
            address = peer_of(descriptor)
            line = (
                f"it sent {unfinished / 1e6:.1f} MB and no whole message; it is ended, "
                f"and for {BARRED_S:.0f} s no other is taken from there"
            )
            self._lines.append(("unfinished", f"{address}: {line}"))
            self._barred.add(address, began)
            self._end(descriptor)
        now = time.monotonic()
        self._look_again = now + LOOK_TIMES * (now - began)

    def _end(self, descriptor: int) -> None:
        self._arrivals.remove(descriptor)
        if self._newcomers is not None:
            self._newcomers.was_ended(descriptor)
        shut_down(descriptor)

    def _resident_bytes(self) -> int:
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed by a garbage collection in between
            while not self._stopped.is_set() and (found := next_event(self._monitor)) is not None:
                self._record(*found)

    def _record(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._arrivals.add(value)
            if self._barred and self._barred.has(peer_of(value), time.monotonic()):
                self._end(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._arrivals.remove(value)
        if self._newcomers is not None and self._newcomers.record_event(event, value):
            self._lines.append(("unproved", f"a connection: {_UNPROVED}"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            reason = _PROTOCOL_ERRORS.get(value, "it does not speak ZeroMQ as members do")
            self._lines.append((reason, f"a connection: {reason}"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in _TIMED_OUT:
            seconds = self._handshake_ms // 1000
            reason = f"it did not say who it is within {seconds} s"
            self._lines.append(("silent", f"a connection: {reason}"))


_TIMED_OUT = (errno.EAGAIN, errno.ETIMEDOUT)

_UNPROVED = (
    "it could not prove itself: its pinned key differs, it does not encrypt as this hub does, or "
    "it does not speak ZeroMQ"
)

_PROTOCOL_ERRORS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it encrypts, and this hub does not",
}
