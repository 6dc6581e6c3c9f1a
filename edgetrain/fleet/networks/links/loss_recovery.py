"""Loss recovery as in Linux's TCP: which segments are lost, and when they are sent again. Pure.

Models one sender of one connection: the segments in flight, the bytes that the receiver has, and
the running timer. It follows RACK and tail loss probes (RFC 8985), retransmission timeouts (RFC
6298) and proportional rate reduction (RFC 6937, RFC 9937) as implemented in tcp_input.c,
tcp_output.c, tcp_recovery.c and tcp_timer.c (net/ipv4) of Linux 6. `window` computes the size of
the window after a loss. Segments that are sent together are one object, and are split only if some
of them are lost. Nothing is sent here: times are arguments, in integer nanoseconds; sequence
numbers are bytes since the connection began.

The state of a sender, which decides how the window changes:

    state      event                                        next      window
    open       RACK finds a loss                            recovery  reduced in proportion
    any        the retransmission timeout                   loss      one segment, slow start
    recovery   all bytes that were in flight are received   open      the threshold
    loss       all bytes that were in flight are received   open      grows on

A sender has one timer:

    timer      armed                                        when it expires
    probe      in state open, if no byte is missing         send a probe; then wait for the timeout
    reorder    if segments may be late instead of lost      apply RACK again
    timeout    otherwise, while anything is in flight       all old segments are lost

Not modelled: lost acknowledgements, delayed acknowledgements, F-RTO and undoing of a reduction
(losses are never mistaken here).
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

from edgetrain.fleet.networks.links.window import MSS, TICK, WholeWindow

DUPLICATES = 3
"""After this many segments out of order, missing segments are lost at once:
net.ipv4.tcp_reordering, RFC 6675's DupThresh, kept by RFC 8985, section 6.2, step 4."""

REORDER_SHARE = 4
"""Below that RACK waits 1/4 of the shortest round trip: RFC 8985, section 6.2, step 4."""

PROBE_ROUND_TRIPS = 2
"""Smoothed round trips of silence before a probe: RFC 8985, section 7.2."""

PROBE_SLACK_NS = 2_000_000
"""Time added to the silence before a probe: TCP_TIMEOUT_MIN_US."""

PROBE_ALONE_NS = 200_000_000
"""Added instead if a single segment is in flight, whose acknowledgement may be delayed:
tcp_schedule_loss_probe adds tcp_rto_min."""

LONGEST_TIMEOUT_NS = 120_000_000_000
"""TCP_RTO_MAX."""

GREETING_TIMEOUT_NS = 1_000_000_000
"""Time until the first retransmission of a SYN: TCP_TIMEOUT_INIT, RFC 6298, section 2.1."""

NEVER = 1 << 62

_OPEN, _RECOVERY, _LOSS = range(3)
_IDLE, _PROBE, _REORDER, _TIMEOUT = range(4)


def on_wheel(delay: int) -> int:
    """Return the mean time after which a timer for `delay` expires.

    The kernel keeps timers in wheels of 64 slots, each 8 times coarser than the one before, and
    rounds up to a slot (kernel/time/timer.c).
    """
    unit = TICK
    while delay >= 63 * unit:
        unit *= 8
    return delay + (unit + TICK) // 2


@dataclass(slots=True, eq=False)
class Segments:
    """A piece of the stream: bytes `start` to `end`, sent together at time `sent`.

    `order` counts transmissions. `copy` is the retransmission of these bytes, `of` is the
    transmission that this one repeats. `lost`: the sender believes them lost. `gone`: they will not
    arrive, which only the network knows. `done`: acknowledged, or not needed any more.
    """

    start: int
    end: int
    sent: int
    order: int = 0
    of: Segments | None = None
    copy: Segments | None = None
    gone: bool = False
    lost: bool = False
    done: bool = False

    @property
    def count(self) -> int:
        return _count(self.start, self.end)


class Received:
    """The bytes of a stream that have arrived: all below `next`, and ranges above it."""

    __slots__ = ("_ranges", "next", "segments")

    def __init__(self) -> None:
        self.next = 0
        self._ranges: list[tuple[int, int]] = []  # neither overlapping nor touching
        self.segments = 0
        """Segments that arrived above the first hole."""

    def add_range(self, start: int, end: int) -> bool:
        """Add bytes, new or known; return whether `next` has moved."""
        if end <= self.next:
            return False
        if start <= self.next and not self._ranges:  # the common case
            self.next = end
            return True
        first = bisect.bisect_left(self._ranges, start, key=lambda each: each[1])
        last = bisect.bisect_right(self._ranges, end, key=lambda each: each[0])
        for low, high in self._ranges[first:last]:
            start, end = min(start, low), max(end, high)
            self.segments -= _count(low, high)
        if start > self.next:
            self._ranges[first:last] = [(start, end)]
            self.segments += _count(start, end)
            return False
        self._ranges[:last] = []
        self.next = end
        return True

    def has(self, start: int, end: int) -> bool:
        """Return whether all of these bytes have arrived."""
        if end <= self.next:
            return True
        place = bisect.bisect_left(self._ranges, end, key=lambda each: each[1])
        return place < len(self._ranges) and self._ranges[place][0] <= max(start, self.next)


def _count(start: int, end: int) -> int:
    return -(-(end - start) // MSS)


class Recovery:
    """A sender's knowledge of the segments it has sent.

    The owner reports transmissions (`send`, `resend`) and acknowledgements (`acked`), and calls
    `expire` at `deadline`. It sends the segments in `lost` again, as far as the window has room,
    before any new data. While data is in flight, this object changes the window.
    """

    def __init__(self, window: WholeWindow) -> None:
        self.window = window
        self.lost: list[Segments] = []
        """Segments to send again, in the order of the stream."""
        self.missing = 0
        """Pieces that will not arrive and have not been sent again. While this is 0, an expired
        timer changes nothing, so that the owner need not wait for it."""
        self.end = 0
        """Bytes that have been sent."""
        self.deadline = NEVER
        self.probing = False
        """A tail loss probe is due: a segment of new data, or the last segment that was sent."""
        self._flying: list[Segments] = []  # in flight, in the order of sending
        self._known = Received()
        self._state = _OPEN
        self._high = 0  # recovery ends when the bytes below this are acknowledged
        self._timer = _IDLE
        self._backoff = 0
        self._probed = 0  # `end` when the last probe was sent; 0: no probe is in flight
        self._order = 0
        self._newest = (-1, -1)  # (order, end) of the latest piece that has arrived
        self._newest_rtt = 0
        self._least_rtt = NEVER
        self._prior = self._delivered = self._out = 0  # of proportional rate reduction

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._known.next == self.end

    # -- sending ----------------------------------------------------------------------------------

    def send(self, size: int, now: int) -> Segments:
        """Send `size` bytes of new data."""
        piece = Segments(self.end, self.end + size, now, self._next_order())
        self.end += size
        self._flying.append(piece)
        self.window.sent(piece.count * MSS, now)
        if self._state == _RECOVERY:
            self._out += piece.count * MSS
        if self.probing:
            self._probe_sent(now)
        elif self._state == _OPEN and not self._known.segments:
            self._arm(now, advancing=False)
        elif self._timer == _IDLE:
            self._arm_timeout(now)
        return piece

    def resend(self, room: int, now: int) -> Segments:
        """Send the first lost segments again: at most `room` bytes, but at least one segment."""
        old = self.lost[0]
        most = max(room // MSS, 1) * MSS
        if old.end - old.start > most:
            rest = dataclasses.replace(old, start=old.start + most)
            self.missing += rest.gone
            self.lost[0] = rest
            old.end = rest.start
        else:
            self.lost.pop(0)
        piece = self._send_again(old, now)
        if self._state == _RECOVERY:
            self._out += piece.count * MSS
        if piece.start == self._known.next and self._timer != _REORDER:
            self._arm_timeout(now)
        return piece

    def probe(self, now: int) -> Segments | None:
        """Send the last segment again as a probe, for an owner that has no new data."""
        last = max(self._flying, key=lambda piece: piece.end, default=None)
        if last is None:
            self._probe_sent(now)
            return None
        begin = last.start + (last.count - 1) * MSS
        if begin > last.start:
            # Segments that will still arrive are not split: they arrive as they were sent.
            last = (
                self.split(last, [begin])[-1]
                if last.gone
                else Segments(begin, last.end, now, done=True)
            )
        piece = self._send_again(last, now)
        self._probe_sent(now)
        return piece

    def _send_again(self, old: Segments, now: int) -> Segments:
        piece = Segments(old.start, old.end, now, self._next_order(), of=old)
        old.copy = piece
        self.missing -= old.gone
        self._flying.append(piece)
        self.window.resent(piece.count * MSS, now)
        return piece

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _probe_sent(self, now: int) -> None:
        self.probing = False
        self._probed = self.end
        self._arm_timeout(now)

    def split(self, piece: Segments, at: list[int]) -> list[Segments]:
        """Split a piece at these bytes; return all parts, of which `piece` is the first."""
        parts = [piece]
        for begin in at:
            part = dataclasses.replace(piece, start=begin, end=parts[-1].end)
            self.missing += part.gone and part.copy is None and not part.done
            parts[-1].end = begin
            parts.append(part)
        among = self.lost if piece.lost else self._flying
        if not piece.done and not (piece.lost and piece.copy):
            place = among.index(piece)
            among[place : place + 1] = parts
        return parts

    def vanish(self, piece: Segments) -> None:
        """Lose a piece in the network; the sender does not know of it."""
        piece.gone = True
        if piece.copy is None and not piece.done:
            self.missing += 1

    # -- acknowledgements -------------------------------------------------------------------------

    def acked(self, piece: Segments, now: int, spread: int) -> None:
        """Process the acknowledgement of a piece. `spread` is as in `Window.acked`."""
        if piece.done:
            return
        size = piece.count * MSS
        if piece.lost:  # it was only late
            self.window.in_flight += size
            if piece.copy is None:
                self.lost.remove(piece)
        else:
            self._flying.remove(piece)
        piece.done = True
        advanced = self._known.add_range(piece.start, piece.end)
        # Forget other transmissions of the bytes that have arrived with this piece
        twins = []
        twin = piece.of
        while twin is not None:
            twins.append(twin)
            twin = twin.of
        twin = piece.copy
        while twin is not None:
            twins.append(twin)
            twin = twin.copy
        for twin in twins:
            if not twin.done and self._known.has(twin.start, twin.end):
                self._drop_copy(twin)
        rtt = now - piece.sent
        self._least_rtt = min(self._least_rtt, rtt)
        if self._state != _OPEN and self._known.next >= self._high:
            if self._state == _RECOVERY:
                self.window.recovered()
            self._state = _OPEN
        # What arrives out of order does not let the window grow (tcp_may_raise_cwnd).
        self.window.held = self._state == _RECOVERY or not advanced
        self.window.acked(size, now, rtt, spread)
        if (piece.order, piece.end) > self._newest:
            self._newest, self._newest_rtt = (piece.order, piece.end), rtt
        if self._end_of_probe(piece):
            self.window.cut()
            self.window.recovered()
        waits, lost = self._detect(now)
        if self._state == _RECOVERY:
            self._reduce(size, advanced and not lost)
        if advanced:
            self._backoff = 0
            if not waits:
                self._arm(now, advancing=True)

    def cover(self, below: int) -> None:
        """Drop pieces of which all bytes are `below`: they arrived, and what acknowledged them was
        lost. The next acknowledgement is for them, too; nothing is timed."""
        for piece in [p for p in (*self._flying, *self.lost) if p.gone and p.end <= below]:
            if not piece.done:
                self._known.add_range(piece.start, piece.end)
                self._drop_copy(piece)

    def _drop_copy(self, piece: Segments) -> None:
        piece.done = True
        if piece.gone and piece.copy is None:
            self.missing -= 1
        if not piece.lost:
            self._flying.remove(piece)
            self.window.lost(piece.count * MSS)
        elif piece.copy is None:
            self.lost.remove(piece)

    def _end_of_probe(self, piece: Segments) -> bool:
        """Return whether a tail loss probe has repaired a loss (tcp_process_tlp_ack)."""
        if not self._probed or self._known.next < self._probed:
            return False
        self._probed = 0
        return piece.of is not None

    def _detect(self, now: int) -> tuple[bool, bool]:
        """RACK: segments sent before one that has arrived are lost, after some patience.

        Returns whether the reorder timer was armed, and whether a loss was found.
        """
        patience = self._patience()
        due, lost = 0, False
        for piece in list(self._flying):
            if (piece.order, piece.end) >= self._newest:
                break
            at = piece.sent + self._newest_rtt + patience
            if at <= now:
                self._mark_lost(piece)
                lost = True
            else:
                due = max(due, at)
        if lost and self._state == _OPEN:
            self._prior = max(int(self.window.size), MSS)
            self._delivered = self._out = 0
            self.window.cut()
            self._state, self._high = _RECOVERY, self.end
        if due:
            self._timer, self.deadline = _REORDER, due
        return bool(due), lost

    def _patience(self) -> int:
        """Return how much longer to wait: tcp_rack_reo_wnd, if no reordering was seen."""
        if self._state != _OPEN or self._known.segments >= DUPLICATES:
            return 0
        return min(self._least_rtt // REORDER_SHARE, self.window.rtt)

    def _mark_lost(self, piece: Segments) -> None:
        self._flying.remove(piece)
        piece.lost = True
        self.window.lost(piece.count * MSS)
        if piece.copy is None:
            bisect.insort(self.lost, piece, key=lambda each: each.start)

    # -- the window -------------------------------------------------------------------------------

    def _reduce(self, size: int, safe: bool) -> None:
        """Reduce the window in proportion to what arrives: tcp_cwnd_reduction, in bytes."""
        self._delivered += size
        window = self.window
        pipe, target = window.in_flight, int(window.threshold)
        if pipe > target:
            count = -(-self._delivered * target // self._prior) - self._out
        else:
            count = max(self._delivered - self._out, size) + (MSS if safe else 0)
            count = min(target - pipe, count)
        count = max(count, 0 if self._out else MSS)
        window.size = float(pipe + count)

    # -- timers -----------------------------------------------------------------------------------

    def expire(self, now: int) -> None:
        """Handle the timer that was due at `deadline`."""
        timer, self._timer, self.deadline = self._timer, _IDLE, NEVER
        if timer == _PROBE:
            if self._probed:  # one at a time
                self._arm_timeout(max(self._head_sent(now), now - self._timeout() + 1))
            else:
                self.probing = True
        elif timer == _REORDER:
            waits, _ = self._detect(now)
            if self._state == _RECOVERY:
                self._reduce(MSS, safe=False)
            if not waits:
                self._arm_timeout(max(self._head_sent(now), now - self._timeout() + 1))
        elif timer == _TIMEOUT:
            self.time_out(now)

    def time_out(self, now: int) -> None:
        """Handle a retransmission timeout: old segments are lost, one is sent (tcp_enter_loss)."""
        self.probing, self._probed = False, 0
        if self.idle:
            return
        for piece in list(self._flying):
            if piece.start == self._known.next or piece.sent + self._newest_rtt <= now:
                self._mark_lost(piece)
        if not self._backoff:
            self.window.collapse()
        self.window.size = float(self.window.in_flight + MSS)
        self._state, self._high = _LOSS, self.end
        self._backoff += 1
        self._arm_timeout(now)

    def _arm(self, now: int, advancing: bool) -> None:
        """Arm the probe timer if no loss is suspected, else the timeout (tcp_set_xmit_timer)."""
        if self.idle:
            self._timer, self.deadline = _IDLE, NEVER
        elif self._state == _OPEN and not self._known.segments:
            alone = len(self._flying) == 1 and self._flying[0].count == 1
            patience = PROBE_ALONE_NS if alone else PROBE_SLACK_NS
            timeout = (now if advancing else self._head_sent(now)) + self._timeout()
            silence = PROBE_ROUND_TRIPS * self.window.rtt + patience
            if timeout > now:
                silence = min(silence, timeout - now)
            self._timer, self.deadline = _PROBE, now + on_wheel(silence)
        else:
            self._arm_timeout(now)

    def _arm_timeout(self, now: int) -> None:
        self._timer, self.deadline = _TIMEOUT, now + on_wheel(self._timeout())

    def _timeout(self) -> int:
        return min(self.window.timeout << min(self._backoff, 20), LONGEST_TIMEOUT_NS)

    def _head_sent(self, now: int) -> int:
        """Return when the first unacknowledged byte was last sent."""
        for piece in self._flying:
            if piece.start == self._known.next:
                return piece.sent
        return now
