"""The few kernel calls that Python 3.11 lacks: timerfd, prctl, unshare, setns. Linux only.

ctypes wrappers that raise OSError; nothing here knows what a network profile is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import struct
import sys
import time
from functools import cache

CLONE_NEWNET = 0x40000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNS = 0x00020000
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_TFD_NONBLOCK = 0o4000
_TFD_CLOEXEC = 0o2000000
_TFD_TIMER_ABSTIME = 1
_CLOCK_MONOTONIC = 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Give this process namespaces of its own. CLONE_NEWUSER asks for a single thread."""
    _check(_libc().unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`; `kind` is its CLONE_NEW flag."""
    _check(_libc().setns(fd, kind), "setns")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the thread that started this process ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def fine_timers() -> None:
    """Timers of this process fire within a nanosecond of slack, not the usual 50 microseconds."""
    _check(_libc().prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0), "prctl")


def raise_priority() -> str:
    """The best scheduling this process may have, by name: what was granted goes into reports.

    Real time where allowed: under load it wakes within a tenth of a millisecond where nice alone
    takes milliseconds. An ordinary user still gets a short time slice, which halves the wait.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return "short slices" if _short_slices() else "normal"
    return "real time"


def ordinary_priority() -> None:
    """Take back `raise_priority` for this thread: who moves bulk data must not hold others up."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}


def _short_slices() -> bool:
    """Ask for slices of 0.1 ms (struct sched_attr; heeded from Linux 6.12 on)."""
    call = _SCHED_SETATTR.get(platform.machine())
    if call is None:
        return False
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 100_000, 0, 0)
    return bool(_libc().syscall(call, 0, attributes, 0) == 0)


class Timer:
    """A timerfd on CLOCK_MONOTONIC, armed to absolute nanoseconds. The owner closes it."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("timerfd needs Linux")
        flags = _TFD_NONBLOCK | _TFD_CLOEXEC
        self.fd = _check(_libc().timerfd_create(_CLOCK_MONOTONIC, flags), "timerfd_create")
        # struct itimerspec: interval (s, ns), value (s, ns)
        self._spec = (ctypes.c_long * 4)(0, 0, 0, 0)
        self._settime = _libc().timerfd_settime
        self._armed = 0

    def arm(self, at_ns: int) -> None:
        """Fire once at `at_ns`; a time in the past fires at once. The same time again is free."""
        if at_ns == self._armed:
            return
        self._spec[2], self._spec[3] = divmod(max(at_ns, 1), 1_000_000_000)
        _check(self._settime(self.fd, _TFD_TIMER_ABSTIME, self._spec, None), "timerfd_settime")
        self._armed = at_ns

    def fired(self) -> None:
        """The expiry was seen (edge-triggered): the next `arm` is not skipped."""
        self._armed = 0

    def clear(self) -> None:
        """Take the expiry off the descriptor, once it is readable."""
        self._armed = 0
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lead:
    """How much earlier than due to wake, so that the median delivery is on time.

    From a timer's expiry to this process running it takes 30 to 150 microseconds, depending on how
    deep the processor slept. It is measured at the start, and then follows what deliveries show,
    by a quarter of the error and at most 20 microseconds at a time, so that no outlier leads.
    """

    __slots__ = ("_most", "ns")

    def __init__(self, timer: Timer, most_ns: int = 250_000, rounds: int = 40) -> None:
        late: list[int] = []
        with select.epoll() as epoll:
            epoll.register(timer.fd, select.EPOLLIN)
            for _ in range(rounds):
                at = time.monotonic_ns() + 300_000
                timer.arm(at)
                epoll.poll(0.1)
                late.append(time.monotonic_ns() - at)
                timer.clear()
        self._most = most_ns
        self.ns = min(max(sorted(late)[rounds // 2], 0), most_ns)

    def learn(self, late_ns: int) -> None:
        """A delivery that a timer woke us for came this late, or early if negative."""
        step = min(max(late_ns // 4, -20_000), 20_000)
        self.ns = min(max(self.ns + step, 0), self._most)
