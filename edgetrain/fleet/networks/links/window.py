"""A congestion window without packets: how much TCP would let a sender have in flight. Pure.

The stream proxy does not see packets or acknowledgements; it asks this window how much may be in
flight. CUBIC follows RFC 9438 as implemented in Linux (HyStart by ack train and by delay, growth of
5 % per round trip before the first loss), Reno follows RFC 5681, idle restart follows RFC 2861.
Times are integer nanoseconds. `Window` is a fluid of bytes, `WholeWindow` counts whole segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MSS = 1448
FIRST_SEGMENTS = 10
"""The first window of Linux, in segments (RFC 6928)."""
MOST_BURST = 22 * MSS
"""Bytes of a super-packet at most."""
TURN_BYTES = 2 * MOST_BURST
"""That a connection lets go before others of its machine have their turn: two super-packets, as
TCP's small queues have it (tcp_limit_output_bytes)."""
_RTO_MIN = 200_000_000
_CUBIC_BETA = 717 / 1024
_CUBIC_C = 0.4
TICK = 4_000_000
"""Nanoseconds of a tick with CONFIG_HZ=250: kernels of Debian, Raspberry Pi OS and Ubuntu."""
_CUBIC_LOOK = 7 * TICK  # HZ / 32
_RENO_BETA = 0.5
_HYSTART_LOW = 16 * MSS
_HYSTART_SPACING = 2_000_000
_HYSTART_SAMPLES = 8
_SHORT_SPREAD, _MOST_SAMPLES = 1_000_000, 16
_GATHER = 1_000_000  # a super-packet is at most this much of a sender's pacing
_FRIENDLY = 3 * (1 - _CUBIC_BETA) / (1 + _CUBIC_BETA)  # RFC 9438, 4.3: segments per round trip

ALGORITHMS = ("cubic", "reno")


def send_limit_bytes() -> int:
    """Return the most bytes that this kernel lets a connection have in flight (tcp_wmem)."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text("ascii").split()[2])
    except (OSError, ValueError, IndexError):
        return 4 << 20


@dataclass(slots=True)
class _Round:
    """One round trip of acknowledgements, as HyStart sees it."""

    start: int = 0
    end_sent: int = 0
    last_ack: int = 0
    fastest: int = 0
    samples: int = 0


class Window:
    """The sender of one connection in one direction."""

    def __init__(
        self, algorithm: str, rtt_ns: int, limit_bytes: int, restarts: bool = True, first: int = 0
    ) -> None:
        """`restarts`: start slowly after a pause, as Linux does by default. `first`: segments that
        a start begins with (initcwnd of a route); 0: FIRST_SEGMENTS."""
        self.algorithm, self.restarts = algorithm, restarts
        self.size = self._first = float((first or FIRST_SEGMENTS) * MSS)
        self.threshold = float("inf")  # ssthresh
        self.in_flight = 0
        self.rtt = max(rtt_ns, 1)  # smoothed
        # Linux keeps four times the mean deviation; for the first sample that is half the sample.
        self.deviation = 2 * self.rtt
        """Mean deviation of round trips, in ns."""
        self._variance = max(self.deviation, _RTO_MIN)
        self._most_deviation = self._variance  # as in Linux: the timeout falls a round trip later
        self._variance_end = 0
        self._least_rtt = 1 << 62
        self._limit = limit_bytes
        self._sent = self._acked = 0
        self._recover = 0  # no second cut before the bytes below this are acknowledged
        self.held = False
        """Acknowledgements do not grow the window: losses are being repaired."""
        self._last_send = 0
        # How much of the window the application has used, kept until `_used_until` is acknowledged.
        self._was_full, self._most_in_flight, self._used_until = False, 0, 0
        self._round = _Round()
        self._found = False  # HyStart has ended slow start: not again before a timeout
        self._epoch = 0
        self._origin = self._peak = self._k = self._reno_size = 0.0

    @property
    def timeout(self) -> int:
        """Retransmission timeout, RFC 6298 as in Linux: the round trip plus at least 200 ms."""
        return self.rtt + self._variance

    def _timeouts_since(self, then: int, now: int) -> int:
        """Return how many whole timeouts have passed, by a clock that counts ticks."""
        ticks = now // TICK - then // TICK
        return max(ticks - 1, 0) // -(-self.timeout // TICK)

    def room(self, now: int) -> int:
        """Return the bytes that may be sent now. After a pause the window shrinks first."""
        if self.in_flight == 0 and self._last_send and self.restarts:
            self._restart(now)
        return int(min(self.size, self._limit)) - self.in_flight

    def space(self) -> int:
        """Return the same as `room` without looking for a pause, for bytes that are in flight."""
        return int(min(self.size, self._limit)) - self.in_flight

    def sent(self, count: int, now: int) -> None:
        """Record `count` bytes that were sent."""
        self._last_send = now
        self._sent += count
        self.in_flight += count
        full = self.in_flight > self.size - MSS
        fresh = self._acked >= self._used_until
        if fresh or full or (not self._was_full and self.in_flight > self._most_in_flight):
            self._was_full, self._most_in_flight = full, self.in_flight
            self._used_until = self._sent

    def lost(self, count: int) -> None:
        """Record `count` bytes in flight that are lost."""
        self.in_flight -= count

    def resent(self, count: int, now: int) -> None:
        """Record `count` bytes that were sent again."""
        self._sent -= count
        self.sent(count, now)

    def _restart(self, now: int) -> None:
        """Halve the window for each retransmission timeout that has passed without sending."""
        idle = self._timeouts_since(self._last_send, now)
        if idle > 0:
            self.threshold = max(self.threshold, 0.75 * self.size)
            kept = (int(self.size) // MSS >> min(idle, 30)) * MSS
            self.size = max(float(kept), min(self._first, self.size))
            self._epoch = 0
            self._last_send = now

    def acked(self, count: int, now: int, rtt: int, spread: int = 0) -> None:
        """Record `count` acknowledged bytes; the last of them arrived at `now`, after `rtt`.

        `spread` is the time that these bytes took on the line: the first one was that much earlier.
        """
        rtt -= spread
        was_limited = self._limited()
        self.in_flight -= count
        self._acked += count
        # Time every acknowledgement: segments that leave together wait for each other on the line,
        # and each acknowledges two
        samples = min(-(-count // (2 * MSS)), _MOST_SAMPLES) if spread > _SHORT_SPREAD else 1
        for sample in range(samples):
            self._time(rtt + spread * sample // samples)
        self._least_rtt = min(self._least_rtt, rtt)
        if self._acked <= self._recover or self.held:
            return
        if self.size < self.threshold and not self._found:
            self._hystart(count, rtt, now, now - spread)
        if was_limited:
            self._grow(count, now)

    def _time(self, rtt: int) -> None:
        """Update the round trip; its variance rises at once and falls by 1/4 per round trip."""
        error = rtt - self.rtt
        self.rtt = max(self.rtt + error // 8, 1)
        change = abs(error) - self.deviation // 4
        if error < 0 and change > 0:
            change //= 8  # a shorter round trip must not lengthen the timeout
        self.deviation += change
        self._most_deviation = max(self._most_deviation, self.deviation)
        self._variance = max(self._variance, self._most_deviation)
        if self._acked > self._variance_end:
            self._variance -= (self._variance - self._most_deviation) // 4
            self._most_deviation = _RTO_MIN
            self._variance_end = self._sent

    def _limited(self) -> bool:
        """Return whether the application fills the window, which else cannot grow.

        As tcp_cwnd_validate does.
        """
        if self._was_full:
            return True
        return self.size < self.threshold and self.size < 2 * self._most_in_flight

    def _hystart(self, count: int, rtt: int, now: int, first: int) -> None:
        """Leave slow start if a train of acknowledgements is long or the round trip grows."""
        turn = self._round
        if self._acked > turn.end_sent:
            turn.start = turn.last_ack = first
            turn.end_sent = self._sent
            turn.fastest, turn.samples = rtt, 0
        if self.algorithm != "cubic" or self.size < _HYSTART_LOW:
            return
        if first - turn.last_ack <= _HYSTART_SPACING:
            turn.last_ack = now
            if now - turn.start > self._least_rtt // 2:
                self.threshold = self.size
                self._found = True
        turn.fastest = min(turn.fastest, rtt)
        before, gathered = turn.samples, self._gathered(count, now - first)
        turn.samples += max(count // gathered, 1)
        margin = min(max(self._least_rtt // 8, 4_000_000), 16_000_000)
        if turn.samples > _HYSTART_SAMPLES and turn.fastest > self._least_rtt + margin:
            # The ninth sample decides; by then the first eight have opened the window.
            earlier = max(_HYSTART_SAMPLES - before, 0) * gathered
            self.threshold = self.size + min(earlier, count)
            self._found = True

    def _gathered(self, count: int, spread: int) -> int:
        """Return the bytes that are acknowledged together: two segments, or one super-packet.

        Linux makes super-packets of a millisecond of its pacing, which is twice the window per
        round trip; a slower line cuts them.
        """
        burst = 2 * self.size * _GATHER / self.rtt
        if spread > 0:
            burst = min(burst, count * _GATHER / spread)
        return max(int(burst), 2 * MSS)

    def _grow(self, count: int, now: int) -> None:
        if self.size < self.threshold:
            grown = min(self.size + count, max(self.threshold, self.size))
            count -= int(grown - self.size)
            self.size = grown
        if count > 0 and self.size >= self.threshold:
            if self.algorithm == "reno":
                self.size += MSS * count / self.size
            else:
                if not self._epoch:
                    self._epoch = now
                    self._reno_size = self.size
                    gap = max(self._peak - self.size, 0.0) / MSS
                    self._k = (gap / _CUBIC_C) ** (1 / 3)
                    self._origin = max(self._peak, self.size)
                seconds = (now - self._epoch + self._least_rtt) / 1e9
                target = self._origin + _CUBIC_C * (seconds - self._k) ** 3 * MSS
                step = min(max((target - self.size) / self.size, 0.01 * MSS / self.size), 0.5)
                if not self._peak:
                    step = max(step, 0.05)
                self._reno_size += _FRIENDLY * MSS * count / self.size
                self.size += step * count
                self.size = max(self.size, self._reno_size)

    def cut(self) -> None:
        """Shrink the window after a loss; once for all losses of the same window."""
        if self._acked < self._recover:
            return
        self._recover = self._sent
        beta = _CUBIC_BETA if self.algorithm == "cubic" else _RENO_BETA
        falling = self.size < self._peak
        self._peak = self.size * (1 + beta) / 2 if falling else self.size
        self.size = self.threshold = max(self.size * beta, 2 * MSS)
        self._epoch = 0

    def collapse(self) -> None:
        """Start again from one segment, after a retransmission timeout."""
        self.cut()
        self.size = float(MSS)
        self._recover = 0
        self._found = False


class WholeWindow(Window):
    """A window in whole segments, computed as Linux does (tcp_cubic.c, tcp_cong.c).

    If losses keep the window at a few segments, the rounding of integers is a tenth of the
    throughput. CUBIC forgets its peak after a timeout, and updates its curve every 28 ms.
    """

    def __init__(
        self, algorithm: str, rtt_ns: int, limit_bytes: int, restarts: bool = True, first: int = 0
    ) -> None:
        super().__init__(algorithm, rtt_ns, limit_bytes, restarts, first)
        self._credit = 0  # snd_cwnd_cnt
        self._pace = 0  # cnt: segments to be acknowledged before the window grows by one
        self._seen, self._seen_at = 0, -1
        self._since, self._reno = 0, 0  # ack_cnt, tcp_cwnd
        self._used, self._used_at = 0, 0  # snd_cwnd_used, snd_cwnd_stamp

    def validate(self, now: int) -> None:
        """Shrink a window of which the application has not used all for a timeout (RFC 2861).

        Call this after each write, as Linux does (tcp_cwnd_validate).
        """
        if self._limited() or not self.restarts:
            self._used, self._used_at = 0, now
            return
        self._used = max(self._used, self.in_flight)
        if now // TICK - self._used_at // TICK < -(-self.timeout // TICK):
            return
        used = max(self._used, int(self._first))
        if used < self.size and not self.held:
            segments = int(self.size) // MSS
            self.threshold = max(self.threshold, float(((segments >> 1) + (segments >> 2)) * MSS))
            self.size = float((int(self.size) // MSS + used // MSS) // 2 * MSS)
        self._used, self._used_at = 0, now

    def acked(self, count: int, now: int, rtt: int, spread: int = 0) -> None:
        """See Window. An acknowledgement that may grow the window puts off its shrinking, as
        tcp_cong_avoid sets snd_cwnd_stamp."""
        super().acked(count, now, rtt, spread)
        if self._acked > self._recover and not self.held:
            self._used_at = now

    def _restart(self, now: int) -> None:
        """See Window. The curve does not advance during a pause (CA_EVENT_TX_START)."""
        epoch, pause = self._epoch, now - self._last_send
        if self._timeouts_since(self._last_send, now):
            self._used, self._used_at = 0, now
        super()._restart(now)
        if epoch:
            self._epoch = min(epoch + pause, now)

    def _grow(self, count: int, now: int) -> None:
        acked, size = -(-count // MSS), int(self.size) // MSS
        if self.size < self.threshold:
            most = int(self.threshold) // MSS if self.threshold < float("inf") else size + acked
            grown = max(min(size + acked, most), size)
            acked -= grown - size
            size = grown
        if acked > 0:
            if self.algorithm == "reno":
                self._pace = size
            else:
                self._follow(size, acked, now)
            size = self._add(size, acked)
        self.size = float(size * MSS)

    def _add(self, size: int, acked: int) -> int:
        """Grow by one segment per `_pace` acknowledged ones (tcp_cong_avoid_ai)."""
        if self._credit >= self._pace:
            self._credit = 0
            size += 1
        self._credit += acked
        whole = self._credit // self._pace
        self._credit -= whole * self._pace
        return size + whole

    def _follow(self, size: int, acked: int, now: int) -> None:
        """Set `_pace` from CUBIC's curve, but not slower than Reno (bictcp_update)."""
        self._since += acked
        if self._seen == size and now - self._seen_at <= _CUBIC_LOOK:
            return
        if not self._epoch or now // TICK != self._seen_at // TICK:
            self._seen, self._seen_at = size, now
            # Set `_pace` from the distance between the window and the curve
            peak = int(self._peak) // MSS
            if not self._epoch:
                self._epoch, self._since, self._reno = now, acked, size
                self._k = (max(peak - size, 0) / _CUBIC_C) ** (1 / 3)
                self._origin = max(peak, size)
            rise = (now - self._epoch + self._least_rtt) / 1e9 - self._k
            target = int(self._origin) + int(
                _CUBIC_C * rise**3
            )  # both halves are rounded towards it
            self._pace = size // (target - size) if target > size else 100 * size
            if not peak:
                self._pace = min(self._pace, 20)
        friendly = max(size * 15 >> 3, 1)
        while self._since > friendly:
            self._since -= friendly
            self._reno += 1
        if self._reno > size:
            self._pace = min(self._pace, size // (self._reno - size))
        self._pace = max(self._pace, 2)

    def cut(self) -> None:
        if self._acked < self._recover:
            return
        self._recover = self._sent
        size = max(int(self.size) // MSS, 1)
        falling = self.algorithm == "cubic" and size * MSS < self._peak
        self._peak = float((size * (1024 + 717) // 2048 if falling else size) * MSS)
        kept = size * 717 // 1024 if self.algorithm == "cubic" else size // 2
        self.size = self.threshold = float(max(kept, 2) * MSS)
        self._epoch = self._credit = 0

    def recovered(self) -> None:
        """End a recovery: all that was in flight at the cut has arrived."""
        self.size = self.threshold
        self._recover = 0

    def collapse(self) -> None:
        super().collapse()
        self._peak = 0.0
