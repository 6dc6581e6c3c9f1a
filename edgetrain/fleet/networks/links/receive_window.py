"""The window that a receiver offers, as Linux sizes it (tcp_input.c). Pure.

A receiver begins with 64 kB and doubles what the application reads in a round trip (Dynamic
Right-Sizing). The first large messages of a connection over a long path wait for it, not for the
congestion window.
"""

from __future__ import annotations

_FIRST_SPACE = 14_480
"""Bytes per round trip before anything is measured: TCP_INIT_CWND segments."""

_FIRST_OFFER = 64_088
"""Bytes that the first acknowledgement offers: half of tcp_rmem[1], in whole segments."""

_FIRST_MOST = 84_150
"""Bytes that fit into the first buffer, tcp_rmem[1] = 128 KiB, as measured on Linux 6.18: the rest
is for the headers of the kernel."""


FIRST_BUFFER_KB = 131.072
"""Linux's first buffer, tcp_rmem[1]."""


def first_offer(buffer_kb: float = 0.0) -> int:
    """Bytes that the first acknowledgement offers; `buffer_kb` is tcp_rmem[1], 0: Linux's. Kernels
    before 6.11 offer no more than 64 kB, whatever the buffer."""
    return int(_FIRST_OFFER * (buffer_kb / FIRST_BUFFER_KB or 1))


class ReceiveWindow:
    """The number of bytes beyond those received that one end lets the other send."""

    def __init__(self, rtt_ns: int, limit_bytes: int, buffer_kb: float = 0.0) -> None:
        """`buffer_kb`: the first buffer; 0: Linux's."""
        self.offer = first_offer(buffer_kb)
        """Bytes beyond the last received one that may be sent (rcv_ssthresh)."""
        self._most = int(_FIRST_MOST * (buffer_kb / FIRST_BUFFER_KB or 1))
        self._limit = limit_bytes
        self._rtt = rtt_ns
        self._space = _FIRST_SPACE
        self._received = self._received_before = 0
        self._since = 0

    @property
    def grows(self) -> bool:
        """Whether the next bytes let the offer grow."""
        return self.offer < self._most

    def received(self, size: int, now: int) -> None:
        """Record `size` bytes, which the application reads at once (tcp_rcv_space_adjust)."""
        self._received += size
        self.offer = max(min(self.offer + 2 * size, self._most), self.offer)
        if now - self._since < self._rtt:
            return
        copied = self._received - self._received_before
        if copied > self._space:
            room = 2 * copied + 4 * copied * (copied - self._space) // self._space
            self._space = copied
            self._most = max(self._most, min(room, self._limit))
        self._received_before, self._since = self._received, now
