"""A ZeroMQ context and the sockets made in it, closed together.

A socket that nobody closes must not outlive its context: `zmq_ctx_term` waits for it for ever. That
happens if an exception leaves the code that would have closed it, its traceback is kept, and later
the garbage collector finds both: the order in which it finalizes objects of a cycle is not
specified, and pyzmq's context cannot see its sockets any more by then. So a finalizer holds context
and sockets, which keeps them out of the collector's reach, and closes them in order once their
owner is gone.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable

import zmq


class OpenSockets:
    """A context and its open sockets. Belongs to `owner`, which calls `close`; if it is collected
    without, the sockets are closed then, what is queued is dropped, and a ResourceWarning says so.
    """

    def __init__(self, owner: object) -> None:
        self.context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._before_close: list[Callable[[], None]] = []
        self._process = os.getpid()
        name = type(owner).__name__
        # Not at exit: then nobody waits for the context, and other threads may still use sockets.
        weakref.finalize(owner, self._close_dropped, name).atexit = False

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """A new socket of this kind, such as zmq.DEALER. Raises zmq.ZMQError."""
        sock = self.context.socket(kind)
        self._sockets.append(sock)
        return sock

    def watch(self, sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """A monitor socket on which libzmq reports these events of `sock`."""
        monitor = sock.get_monitor_socket(events)
        monitor.setsockopt(zmq.LINGER, 0)
        self._sockets.append(monitor)
        return monitor

    def before_close(self, stop: Callable[[], None]) -> None:
        """Call `stop` before sockets are closed. It must not refer to the owner; works twice."""
        self._before_close.append(stop)

    def close_socket(self, sock: zmq.Socket[bytes], linger_ms: int | None = None) -> None:
        if sock in self._sockets:
            self._sockets.remove(sock)
            sock.close(linger_ms)

    def close(self, linger_ms: int | None = None) -> None:
        """Close sockets and context, after at most `linger_ms` (None: as set). Works twice."""
        for stop in self._before_close:
            stop()
        for sock in [*self._sockets]:
            self.close_socket(sock, linger_ms)
        self.context.term()

    def _close_dropped(self, owner: str) -> None:
        """The owner was collected. May run in any thread, and in a fork of the process."""
        if self.context.closed or os.getpid() != self._process:
            return
        self.close(0)
        warnings.warn(f"a {owner} was not closed", ResourceWarning, stacklevel=2)
