"""Kernel calls that Python 3.11 lacks: timerfd, prctl, unshare, setns. Linux only.

ctypes wrappers that raise OSError. Does not know network profiles.
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
    """Give this process new namespaces. CLONE_NEWUSER needs a process with a single thread."""
    _check(_libc().unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`; `kind` is its CLONE_NEW flag."""
    _check(_libc().setns(fd, kind), "setns")


def die_with_parent(signal_number: int) -> None:
    """Let the kernel send this signal when the thread that started this process ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def fine_timers() -> None:
    """Set the slack of this process's timers to 1 nanosecond instead of 50 microseconds."""
    _check(_libc().prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0), "prctl")


def raise_priority() -> str:
    """Get the best scheduling that is allowed; return its name, for reports.

    With real time the process wakes within 0.1 ms under load, with nice alone it takes
    milliseconds. An ordinary user gets a short time slice, which halves the wait.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return "short slices" if _short_slices() else "normal"
    return "real time"


def ordinary_priority() -> None:
    """Undo `raise_priority` for this thread, so that moving bulk data does not delay others."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}


def _short_slices() -> bool:
    """Request time slices of 0.1 ms (struct sched_attr; effective since Linux 6.12)."""
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
        """Fire once at `at_ns`, or now if it is past. Free if that time is already set."""
        if at_ns == self._armed:
            return
        self._spec[2], self._spec[3] = divmod(max(at_ns, 1), 1_000_000_000)
        _check(self._settime(self.fd, _TFD_TIMER_ABSTIME, self._spec, None), "timerfd_settime")
        self._armed = at_ns

    def fired(self) -> None:
        """Record an expiry that was seen edge-triggered, so that the next `arm` is not skipped."""
        self._armed = 0

    def clear(self) -> None:
        """Read the expiry from the descriptor, when it is readable."""
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
    """Lead with which to wake before a delivery is due, so that the median delivery is on time.

    From the expiry of a timer until this process runs, 30 to 150 microseconds pass, depending on
    how deep the processor sleeps. The lead is measured at the start. Each delivery corrects it by a
    quarter of its error and at most 20 microseconds, so that outliers have little effect.
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
        """Correct the lead by a delivery after a timer: `late_ns` is negative if it was early."""
        step = min(max(late_ns // 4, -20_000), 20_000)
        self.ns = min(max(self.ns + step, 0), self._most)
