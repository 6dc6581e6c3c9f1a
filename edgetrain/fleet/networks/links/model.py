"""The effect of one direction of a link on a packet: loss, queue, rate, delay. Pure.

Time is an argument (integer nanoseconds of any monotonic clock) and randomness is seeded, so that
the same objects run in the packet emulator, the stream proxy, the simulator and tests. The order is
netem's: a packet is lost before it uses the rate.
"""

from __future__ import annotations

import bisect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from edgetrain.fleet.networks import traces
from edgetrain.fleet.networks.profile import Burst, Direction

ETHERNET_BYTES = 14  # added to an IP packet by its frame, counted as netem's `rate` does
_FULL_FRAME = 1514
_NS = 1_000_000_000
_MS = 1_000_000
_SHORTEST_PERIOD_NS = 5 * _MS
# Time between two draws of jitter, in standard deviations: about as far as the delay can fall.
_GRID = {"normal": 5, "uniform": 5, "pareto": 13}


class GilbertElliott:
    """Loss in bursts. Call it once per packet; True means lost. `rest` lets a burst end with time.

    In the order of sch_netem's loss_gilb_ell: the state changes first, then the packet is drawn.
    """

    __slots__ = ("_bad", "_burst", "_random", "lost")

    def __init__(self, burst: Burst, rng: random.Random) -> None:
        self.lost = 0
        """Packets lost since the owner, which counts their time, set this to 0."""
        self._burst = burst
        self._random = rng.random
        self._bad = False

    def __call__(self) -> bool:
        draw, burst = self._random, self._burst
        if self._bad:
            self._bad = draw() * 100 >= burst.leave_percent
        else:
            self._bad = draw() * 100 < burst.enter_percent
        percent = burst.lost_in_bad_percent if self._bad else burst.lost_in_good_percent
        if percent > 0 and draw() * 100 < percent:
            self.lost += 1
            return True
        return False

    def rest(self, packets: int) -> None:
        """Move the state on by the time of this many packets, during which none was sent."""
        enter, leave = self._burst.enter_percent, self._burst.leave_percent
        bad = enter / (enter + leave)
        bad += (self._bad - bad) * (1 - (enter + leave) / 100) ** packets
        self._bad = self._random() < bad


class Bernoulli:
    """Independent loss. Call it once per packet; True means lost."""

    __slots__ = ("_random", "_share")

    def __init__(self, percent: float, rng: random.Random) -> None:
        self._share = percent / 100
        self._random = rng.random

    def __call__(self) -> bool:
        return self._random() < self._share


def _draw(distribution: str, rng: random.Random) -> Callable[[], float]:
    """Return a source of draws with mean 0 and deviation 1. Normal draws are cut at ±3."""
    if distribution == "uniform":
        return lambda: (2 * rng.random() - 1) * math.sqrt(3)
    if distribution == "pareto":
        return lambda: _pareto(rng)
    return lambda: _bounded_normal(rng)


def _bounded_normal(rng: random.Random) -> float:
    while abs(value := rng.gauss(0, 1)) > 3:
        pass
    return value / 0.98658  # the deviation of a normal variable cut at three deviations


_PARETO_SHAPE, _PARETO_TOP = 3.0, 8.0


def _pareto(rng: random.Random) -> float:
    """Draw from Pareto of shape 3 on [1, 8], shifted and scaled to mean 0 and deviation 1."""
    low = float(_PARETO_TOP**-_PARETO_SHAPE)
    value: float = (1 - rng.random() * (1 - low)) ** (-1 / _PARETO_SHAPE)
    return (value - _PARETO_MEAN) / _PARETO_DEVIATION


def _pareto_moment(order: int) -> float:
    a, top = _PARETO_SHAPE, _PARETO_TOP
    whole = 1 - float(top**-a)
    if order == a:
        return math.log(top) * a / whole
    return a / (a - order) * (1 - float(top ** (order - a))) / whole


_PARETO_MEAN = _pareto_moment(1)
_PARETO_DEVIATION = math.sqrt(_pareto_moment(2) - _PARETO_MEAN**2)


def jitter_period_s(way: Direction) -> float:
    """Return the seconds between two draws of jitter."""
    period_ms = way.jitter_period_ms or _GRID[way.distribution] * way.jitter_ms
    return max(period_ms * _MS, _SHORTEST_PERIOD_NS) / _NS


class Jitter:
    """A delay that changes smoothly: draws on a time grid, interpolated linearly.

    Independent draws per packet would reorder packets, and holding packets back to keep their order
    biases the mean (100 ± 10 ms at 10,000 packets a second becomes 121 ± 4). On a grid several
    deviations wide the delay falls more slowly than time runs, so that order is kept without this
    bias. The draws are scaled so that mean and deviation over time are those of the profile.
    """

    __slots__ = ("_draw", "_keep", "_left", "_mix", "_period", "_right", "_scale", "_slot")

    def __init__(self, way: Direction, rng: random.Random) -> None:
        self._period = int(jitter_period_s(way) * _NS)
        self._keep = way.jitter_correlation
        self._mix = math.sqrt(1 - self._keep**2)
        # Mean square of f*a + (1-f)*b over f in [0, 1], a and b correlated by `keep`.
        self._scale = way.jitter_ms * _MS / math.sqrt(2 / 3 + self._keep / 3)
        self._draw = _draw(way.distribution, rng)
        self._slot = -1
        self._left = self._right = 0.0

    def at(self, now_ns: int) -> int:
        """Return nanoseconds to add to the delay. Times must not fall by more than one slot."""
        slot, rest = divmod(now_ns, self._period)
        while slot > self._slot:
            if slot - self._slot > 16:  # after a pause, old draws do not matter
                self._slot, self._right = slot - 1, self._draw()
            self._left = self._right
            self._right = self._keep * self._left + self._mix * self._draw()
            self._slot += 1
        share = rest / self._period
        return int(self._scale * (self._left + (self._right - self._left) * share))


class DelayTrace:
    """A recorded delay, repeated, interpolated linearly between its points."""

    __slots__ = ("_delays", "_start", "_times")

    def __init__(self, file: str, start_ns: int) -> None:
        self._times, self._delays = traces.read_delay(file)
        self._start = start_ns

    def at(self, now_ns: int) -> int:
        """Return the delay in nanoseconds."""
        when = max(now_ns - self._start, 0) % self._times[-1]
        right = bisect.bisect_right(self._times, when)
        left = right - 1
        share = (when - self._times[left]) / (self._times[right] - self._times[left])
        return int(self._delays[left] + (self._delays[right] - self._delays[left]) * share)


class Queue(ABC):
    """A drop-tail queue before a line that sends one byte after the other."""

    __slots__ = ("_queue_bytes",)

    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes

    @abstractmethod
    def waiting_bytes(self, now: int) -> float:
        """Return the bytes that have not left yet."""

    @abstractmethod
    def full(self, now: int) -> bool:
        """Return whether the queue has no room for another packet."""

    @abstractmethod
    def depart(self, now: int, wire_bytes: int) -> int:
        """Add bytes to the queue; return when the last of them has left."""

    def room(self, now: int, packet_bytes: int) -> int:
        """Return how many packets of this size the queue would accept now."""
        if self.full(now):
            return 0
        return int((self._queue_bytes - self.waiting_bytes(now)) // packet_bytes) + 1


class Rate(Queue):
    """A line of `mbit` Mbit/s."""

    __slots__ = ("_free", "_ns_per_byte", "_queue_ns")

    def __init__(self, mbit: float, queue_bytes: int) -> None:
        super().__init__(queue_bytes)
        self._free = 0
        self.scale(mbit)

    def scale(self, mbit: float) -> None:
        """Change the rate; bytes that are in the queue keep their times."""
        self._ns_per_byte = 8000 / mbit
        self._queue_ns = self._queue_bytes * self._ns_per_byte

    def waiting_bytes(self, now: int) -> float:
        return max(self._free - now, 0) / self._ns_per_byte

    def full(self, now: int) -> bool:
        return self._free - now > self._queue_ns

    def depart(self, now: int, wire_bytes: int) -> int:
        free = self._free
        self._free = (free if free > now else now) + int(wire_bytes * self._ns_per_byte)
        return self._free


class RateTrace(Queue):
    """A recorded line: each line of the trace sends up to 1504 bytes."""

    __slots__ = ("_left", "_next", "_start", "_times")

    def __init__(self, file: str, queue_bytes: int, start_ns: int) -> None:
        super().__init__(queue_bytes)
        self._times = traces.read_rate(file)
        self._start = start_ns
        self._next = 0  # the opportunity in use, counted over all repetitions of the trace
        self._left = traces.DELIVERY_BYTES

    def _number_at(self, now: int) -> int:
        """Return the first opportunity at `now` or later."""
        rounds, rest = divmod(max(now - self._start, 0), self._times[-1] * _MS)
        return rounds * len(self._times) + bisect.bisect_left(self._times, rest / _MS)

    def _time_of(self, number: int) -> int:
        rounds, index = divmod(number, len(self._times))
        return self._start + (rounds * self._times[-1] + self._times[index]) * _MS

    def waiting_bytes(self, now: int) -> float:
        ahead = self._next - self._number_at(now)
        return max(ahead * traces.DELIVERY_BYTES + traces.DELIVERY_BYTES - self._left, 0)

    def full(self, now: int) -> bool:
        return self.waiting_bytes(now) > self._queue_bytes

    def depart(self, now: int, wire_bytes: int) -> int:
        first = self._number_at(now)
        if first > self._next:
            self._next, self._left = first, traces.DELIVERY_BYTES
        short = wire_bytes - self._left
        if short > 0:
            chances = -(-short // traces.DELIVERY_BYTES)
            self._next += chances
            self._left = chances * traces.DELIVERY_BYTES - short
        else:
            self._left -= wire_bytes
        return max(self._time_of(self._next), now)


def link_seeds(seed: int, place: int) -> tuple[int, int]:
    """Return the seeds of a link's directions up and down.

    Members are places 0, 1, …; the sites' uplinks follow.
    """
    return seed * 10_000 + 2 * place, seed * 10_000 + 2 * place + 1


class LinkModel:
    """One direction of one link, with its state.

    For packets that enter now, call `pause`, then `lost` for each packet, then `due` for the time
    of arrival. Faults use `down` and `set_rate`.
    """

    __slots__ = (
        "_chain", "_delay", "_jitter", "_last", "_packet_ns", "_quiet_since", "_random", "_reorder",
        "_trace", "_wanders", "_way", "corrupts", "down", "dropped", "duplicates", "loses", "lost",
        "passes", "rate",
    )  # fmt: skip

    def __init__(self, way: Direction, seed: int, start_ns: int = 0) -> None:
        rng = random.Random(seed)
        self._way = way
        self._random = rng.random
        self._delay = int(way.delay_ms * _MS)
        self._jitter = Jitter(way, rng) if way.jitter_ms else None
        self._trace = DelayTrace(way.delay_trace, start_ns) if way.delay_trace else None
        self._wanders = self._jitter is not None or self._trace is not None
        self._reorder = way.reorder_percent / 100
        self._last = 0
        self.rate = _rate(way, start_ns)
        self._chain = GilbertElliott(way.burst, rng) if way.burst else None
        self.lost = self._chain or Bernoulli(way.loss_percent, rng)
        rate_mbit = way.mean_rate_mbit
        self._packet_ns = int(_FULL_FRAME * 8000 / rate_mbit) if rate_mbit else 0
        self._quiet_since = start_ns
        self.loses = way.mean_loss_percent > 0
        self.passes = way.is_plain  # does not change traffic, unless there is a fault
        self.duplicates = way.duplicate_percent / 100
        self.corrupts = way.corrupt_percent / 100
        self.down = False
        self.dropped = 0  # packets dropped because the queue was full

    def set_rate(self, factor: float) -> None:
        """Set the rate to this share of the profile's rate; 1 restores it."""
        if isinstance(self.rate, Rate):
            self.rate.scale(self._way.rate_mbit * factor)

    def pause(self, now: int) -> None:
        """Let a burst of loss end while the line was idle. Call this before `lost`.

        A burst is some milliseconds of fading. If only packets moved it on, it would last until the
        retransmissions of one lost segment, each twice as late as the one before, got through.
        """
        if self._chain is None or not self._packet_ns:
            return
        # A lost packet has moved the chain on but did not use the line. If its time counted as
        # idle too, bursts would end twice as fast and lose too little.
        self._quiet_since += self._chain.lost * self._packet_ns
        self._chain.lost = 0
        packets = (now - self._quiet_since) // self._packet_ns
        if packets > 0:
            self._chain.rest(packets)
        self._quiet_since = max(self._quiet_since, now)

    def duplicated(self) -> bool:
        return self.duplicates > 0 and self._random() < self.duplicates

    def corrupted(self) -> bool:
        return self.corrupts > 0 and self._random() < self.corrupts

    def choose(self, count: int) -> int:
        """Draw a number below `count`, for the bit of a packet that is corrupted."""
        return int(self._random() * count)

    def delay(self, now: int) -> int:
        """Return the propagation delay of a packet that leaves the queue at `now`."""
        if self._trace is not None:
            return self._trace.at(now)
        if self._jitter is not None:
            return max(self._delay + self._jitter.at(now), 0)
        return self._delay

    def due(self, now: int, ip_bytes: int, packets: int = 1) -> int | None:
        """Return when these packets arrive, or None if they are dropped by a full queue.

        `ip_bytes` includes IP headers but not Ethernet's. Times of arrival never decrease, except
        for packets that overtake (`reorder_percent`).
        """
        rate = self.rate
        if rate is not None and rate.full(now):
            self.dropped += packets
            return None
        return self.arrival(now, ip_bytes, packets)

    def arrival(self, now: int, ip_bytes: int, packets: int = 1) -> int:
        """Return the same as `due` for a queue without a limit."""
        rate = self.rate
        left = now if rate is None else rate.depart(now, ip_bytes + packets * ETHERNET_BYTES)
        self._quiet_since = left
        if self._reorder and self._random() < self._reorder:
            return left
        arrives = left + (self.delay(left) if self._wanders else self._delay)
        if arrives < self._last:
            return self._last
        self._last = arrives
        return arrives


def _rate(way: Direction, start_ns: int) -> Queue | None:
    if way.rate_trace:
        return RateTrace(way.rate_trace, way.queue_bytes, start_ns)
    return Rate(way.rate_mbit, way.queue_bytes) if way.rate_mbit else None
