"""Many members' steps, TCP connections and queues at once, as arrays: the arithmetic of capacity.

Closed forms in place of events: a round of 100,000 members is a few dozen NumPy operations. Nothing
here knows rounds or strategies. All times are float64 seconds, sizes bytes, arrays have one element
a member (or gateway). Neither torch nor greenlet is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks.links.fluid import HEADERS
from edgetrain.fleet.networks.links.loss_recovery import (
    DUPLICATES,
    PROBE_ALONE_NS,
    PROBE_ROUND_TRIPS,
    PROBE_SLACK_NS,
    REORDER_SHARE,
)
from edgetrain.fleet.networks.links.model import ETHERNET_BYTES
from edgetrain.fleet.networks.links.window import FIRST_SEGMENTS, MSS, TURN_BYTES
from edgetrain.fleet.networks.profile import Direction

Array = npt.NDArray[np.float64]
Random = np.random.Generator
T = TypeVar("T")

SEND_LIMIT_BYTES = 4 << 20
"""The most that one connection has unacknowledged: what Linux allows by default (tcp_wmem)."""
RTO_MIN_S = 0.2
_HYSTART_LOW = 16 * MSS
_HYSTART_MARGIN_S = 0.004, 0.016
_CUBIC_BETA, _CUBIC_C = 717 / 1024, 0.4
_FLIGHTS = 24
"""Flights of a message computed one by one; slow start needs fewer for any vector."""
_FRIENDLY = 3 * (1 - _CUBIC_BETA) / (1 + _CUBIC_BETA)


class StepTimesOfMany:
    """How long the steps of all members take: devices.speed.StepTimes, of many at once.

    A single step has the same distribution (a lognormal jitter of mean 1, slow steps, heat); the
    sum of several is drawn as one lognormal of the same mean and variance.
    """

    def __init__(self, devices: Sequence[Device], seconds: Sequence[float], rng: Random) -> None:
        self.seconds = np.asarray(seconds, np.float64)
        self._rng = rng
        self._jitter = column(devices, lambda d: _or(d.step_jitter, 0.0))
        self._chance = column(devices, lambda d: _or(d.slow_chance, 0.0))
        self._factor = column(devices, lambda d: _or(d.slow_factor, 1.0))
        self._hot_after = column(devices, lambda d: _or(d.throttle_after_s, math.inf))
        self._hot_factor = column(devices, lambda d: _or(d.throttle_factor, 1.0))
        self._computed = np.zeros(len(self.seconds))

    def take(self, count: int) -> Array:
        """Seconds of each member's next `count` steps together."""
        members = len(self.seconds)
        spent = count * self.seconds
        if self._jitter.any():
            variance = np.log1p(self._jitter**2 / count)
            draws = self._rng.standard_normal(members)
            spent = spent * np.exp(np.sqrt(variance) * draws - variance / 2)
        if self._chance.any():
            slow = self._rng.binomial(count, self._chance, members)
            spent = spent * (1 + slow / count * (self._factor - 1))
        spent = np.where(self._computed >= self._hot_after, spent * self._hot_factor, spent)
        self._computed += spent
        return spent


class Ports:
    """Servers with a queue each, first come first served; every child of a port sends alike.

    Children are dealt to ports in order, in blocks of nearly equal size, or as `port` says. What
    did not find its port idle in an earlier round stays ahead of what comes later.
    """

    def __init__(
        self,
        children: int,
        ports: int,
        service_s: float | Array,
        port: npt.NDArray[np.intp] | None = None,
    ) -> None:
        """`service_s` of a child, of all ports or of each; `port` of each child."""
        self.service_s = np.broadcast_to(np.asarray(service_s, np.float64), (ports,))
        self.busy_s = 0.0
        """Seconds of the busiest port."""
        if port is None:
            sizes = np.full(ports, children // ports)
            sizes[: children % ports] += 1
            port = np.repeat(np.arange(ports), sizes)
        self.port = port
        self.sizes = sizes = np.bincount(port, minlength=ports)
        order = np.argsort(port, kind="stable")
        self.rank = np.empty(children, np.intp)
        self.rank[order] = np.arange(children) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self._shape = (ports, int(sizes.max()))
        self._free = np.full(ports, -math.inf)
        self._given = np.full(ports, -math.inf)
        self._before = np.empty((ports, 0))
        self._done = np.empty((ports, 0))

    def serve(self, first: Array, last: Array, tail_s: Array | float = 0.0) -> tuple[Array, Array]:
        """(begin, end) of each child's service, whose bytes arrive from `first` to `last`.

        A message is passed on while it arrives: it ends no sooner than `tail_s` after its last
        byte, and no sooner than the queue lets it.
        """
        self.busy_s += float((self.sizes * self.service_s).max())
        if not self.service_s.any():
            return first, last + tail_s
        end = self._queue(self.grid(first))[self.port, self.rank]
        return end - self.service_s[self.port], np.maximum(end, last + tail_s)

    def share(self, first: Array, last: Array, turns: Array) -> tuple[Array, Array]:
        """(begin, end) of each child's message where those of a port are given out together, in so
        many turns each: connections share a port. They arrive at it from `first` to `last`."""
        self.busy_s += float((self.sizes * self.service_s).max())
        start = np.maximum(self.grid(first).min(axis=1), self._given)
        self._given = start + self.sizes * self.service_s
        ahead = self.sizes[self.port] * ((turns - 1) / turns)
        turn = self.rank / turns
        start, each = start[self.port], self.service_s[self.port]
        end = start + (ahead + turn + 1 / turns) * each
        return np.maximum(first, start + turn * each), np.maximum(last, end)

    def grid(self, values: Array) -> Array:
        """[ports, most children]: one row a port, infinity where there is no child."""
        rows: Array = np.full(self._shape, math.inf)
        rows[self.port, self.rank] = values
        return rows

    def _queue(self, arrivals: Array) -> Array:
        """finish_i = max(arrival_i, finish_(i-1)) + service, in the order of arrival."""
        # Earlier rounds' messages that come after the first of this one; the others are served
        after = self._before > arrivals.min(axis=1)[:, None]
        served = np.where(after, -math.inf, self._done)
        if served.size:
            self._free = np.maximum(self._free, served.max(axis=1))
        after &= np.isfinite(self._before)
        width = int(after.sum(axis=1).max(initial=0))
        older = np.sort(np.where(after, self._before, math.inf), axis=1)[:, :width]
        every = np.concatenate([older, arrivals], axis=1)
        order = np.argsort(every, axis=1, kind="stable")
        came = np.take_along_axis(every, order, axis=1)
        service = self.service_s[:, None]
        waiting = np.arange(every.shape[1]) * service
        begin = np.maximum(np.maximum.accumulate(came - waiting, axis=1), self._free[:, None])
        done = begin + waiting + service
        self._before, self._done = came, done
        end: Array = np.empty_like(done)
        np.put_along_axis(end, order, done, axis=1)
        return end[:, older.shape[1] :]


@dataclass
class _Flight:
    """Segments sent together and not acknowledged yet, of all links. Arrays over links."""

    acked_at: Array
    bytes: Array


class AccessStreams:
    """One direction of many access links, with `connections` TCP connections on each.

    A message waits for the one before it, leaves in flights of what the congestion window has room
    for (slow start from 10 segments or the link's own, and again after an idle timeout; RFC 6928,
    RFC 2861), takes its bytes' time on the line, travels, and is repaired where it lost segments.
    Windows are CUBIC's after slow start (RFC 9438; HyStart by ack train). A flight is one array
    operation, so nothing here is as fine as `networks.window`, which looks at each acknowledgement.
    """

    def __init__(
        self,
        ways: Sequence[Direction],
        round_trip_s: Array,
        rng: Random,
        connections: int | Array = 1,
        is_open: bool = False,
    ) -> None:
        """The direction of each link, and the round trip without load that its connection sees.

        Where a link has several connections, of which this one carries a share of the bytes,
        `connections` says how many times as much they carry together. `is_open`: windows are as
        large as they get, and TCP keeps them.
        """
        self.delay_s = column(ways, lambda way: way.mean_delay_ms / 1000)
        self.byte_s = column(ways, byte_s)
        self.busy_s = np.zeros(len(ways))
        self._round_trip = round_trip_s
        self._jitter = column(ways, lambda way: way.jitter_ms / 1000)
        self._share = column(ways, lambda way: way.mean_loss_percent / 100)
        self._strikes = column(ways, _strike_chance)
        self._restarts = (column(ways, lambda way: way.slow_start_after_idle) > 0) & (not is_open)
        self._loses, self._wanders = bool(self._strikes.any()), bool(self._jitter.any())
        self._rng, self._connections, self._is_open = rng, connections, is_open
        self._free = np.zeros(len(ways))
        self._flights: list[_Flight] = []
        self._in_flight = np.zeros(len(ways))
        self._first = column(ways, lambda way: (way.first_window or FIRST_SEGMENTS) * MSS)
        self._window = self._first.copy()
        # As in networks.window: the first round trip counts half of itself as its deviation.
        self._deviation = 2 * round_trip_s
        self._patience = np.maximum(self._deviation, RTO_MIN_S)
        self._threshold = np.full(len(ways), math.inf)
        self._peak = np.zeros(len(ways))
        self._cut = np.zeros(len(ways))
        self._k = np.zeros(len(ways))
        self._epoch = np.full(len(ways), math.nan)
        self._most = np.maximum(_loss_window(self._share, round_trip_s), 2 * MSS)
        if is_open:
            self._window = np.minimum(self._most, float(SEND_LIMIT_BYTES))

    def send(self, at: Array, size: int | Array) -> tuple[Array, Array]:
        """When the first and the last of `size` bytes arrive that are handed over at these times.

        A line that is still at the message before takes this one afterwards.
        """
        begin = np.maximum(at, self._free)
        return self._carry(begin, begin, size)

    @property
    def free(self) -> Array:
        """When the last byte that was handed over has left each link."""
        return self._free

    def forward(self, begin: Array, end: Array, size: int | Array) -> tuple[Array, Array]:
        """As `send`, for a message whose bytes come to this line from `begin` to `end`."""
        return self._carry(np.maximum(begin, self._free), end, size)

    def _carry(self, begin: Array, end: Array, size: int | Array) -> tuple[Array, Array]:
        self._acknowledge(begin)
        self._restart(begin)
        left = np.maximum(self._leave(begin, size / self._connections), end)
        late = self._repair(size, left, left - begin)
        self._free = left
        self.busy_s += wire_bytes(size) * self.byte_s
        arrives = left + late + self.delay_s + self._wander()
        return np.minimum(begin + self.delay_s, arrives), arrives

    def _leave(self, now: Array, size: float | Array) -> Array:
        """When the last byte of a connection's share of a message has left."""
        rest = np.broadcast_to(np.asarray(size, np.float64), now.shape).copy()
        free = now
        line_s = self.byte_s * self._connections * (wire_bytes(size) / size)
        for _ in range(_FLIGHTS):
            room = np.minimum(self._window, SEND_LIMIT_BYTES) - self._in_flight
            count = np.where((room >= MSS) | (self._in_flight <= 0), np.minimum(rest, room), 0.0)
            begin = np.maximum(now, free)
            free = np.where(count > 0, begin + count * line_s, free)
            trip = self._round_trip + np.minimum(count, MSS) * line_s
            self._flights.append(_Flight(begin + trip, count))
            self._in_flight = self._in_flight + count
            rest = rest - count
            waits = rest > 0
            if not waits.any():
                return free
            if (np.minimum(self._window, SEND_LIMIT_BYTES) * line_s >= trip)[waits].all():
                break  # the line never stands still again
            oldest = np.full(len(now), math.inf)
            for flight in self._flights:
                oldest = np.minimum(oldest, np.where(flight.bytes > 0, flight.acked_at, math.inf))
            now = np.where(waits, np.maximum(now, oldest), now)
            self._acknowledge(np.where(waits, now, -math.inf))
        return self._trudge(free, rest, line_s)

    def _trudge(self, free: Array, rest: Array, line_s: Array) -> Array:
        """The rest of a long message, in closed form: a window as it is now every round trip."""
        window = np.minimum(self._window, SEND_LIMIT_BYTES)
        tossed = rest / MSS * self._strikes > 1  # several losses: the average window holds
        window = np.where(tossed, np.minimum(window, self._most), window)
        turn = np.maximum(self._round_trip + MSS * line_s, window * line_s)
        free = free + rest / window * turn
        count = np.minimum(rest, window)
        self._flights.append(_Flight(free + self._round_trip, count))
        self._in_flight = self._in_flight + count
        return free

    def _acknowledge(self, now: Array) -> None:
        for flight in self._flights:
            count = np.where(flight.acked_at <= now, flight.bytes, 0.0)
            if count.any():
                self._grow(count, flight.acked_at)
                self._in_flight = self._in_flight - count
                flight.bytes = flight.bytes - count
                # A round trip like those before: the timeout comes down, as in networks.window
                where = count > 0
                calmer = (self._patience - np.maximum(self._deviation, RTO_MIN_S)) / 4
                self._patience = self._patience - np.where(where, calmer, 0.0)
                self._deviation = np.where(where, 0.4 * self._deviation, self._deviation)
        self._flights = [flight for flight in self._flights if flight.bytes.any()]

    def _grow(self, count: Array, now: Array) -> None:
        """A window grows by what is acknowledged, where the sender fills it."""
        window, flying = self._window, self._in_flight
        slow = (window < self._threshold) & (count > 0)
        # HyStart: acknowledgements for half a round trip, one after the other; the pipe is full.
        line_s = self.byte_s * self._connections
        train = slow & (count * line_s > self._round_trip / 2)
        taken = np.where(train, self._round_trip / 2 / np.where(train, line_s, 1.0), count)
        grown = np.minimum(np.minimum(window + taken, 2 * flying), self._threshold)
        self._window = np.where(slow, np.maximum(grown, window), window)
        # Whether acknowledgements are late by what the link's other connections send at the same
        # time, half of it on average: HyStart takes that for a full pipe
        margin_s = np.clip(self._round_trip / 8, *_HYSTART_MARGIN_S)
        late: npt.NDArray[np.bool_] = (self._connections - 1) / 2 * window * self.byte_s > margin_s
        crowd = slow & (window >= _HYSTART_LOW) & late
        if train.any() or crowd.any():
            self._threshold = np.where(train | crowd, self._window, self._threshold)
        small = (window < SEND_LIMIT_BYTES) & (window * line_s < 2 * self._round_trip)
        steady = ~slow & (count > 0) & (flying >= window - MSS)
        steady &= small | (line_s <= 0)  # a window twice as long as the line matters no more
        if steady.any():
            self._grow_cubic(np.flatnonzero(steady), count, now)

    def _grow_cubic(self, here: npt.NDArray[np.intp], count: Array, now: Array) -> None:
        window, peak, at = self._window[here], self._peak[here], now[here]
        fresh = here[np.isnan(self._epoch[here])]
        if fresh.size:
            self._epoch[fresh], self._cut[fresh] = now[fresh], self._window[fresh]
            gap = np.maximum(self._peak[fresh] - self._cut[fresh], 0) / MSS
            self._k[fresh] = np.cbrt(gap / _CUBIC_C)
        trip = self._round_trip[here]
        passed = at - self._epoch[here] + trip
        rise = passed - self._k[here]
        cut = self._cut[here]
        target = np.maximum(peak, cut) + _CUBIC_C * MSS * (rise * rise * rise)
        target = np.maximum(target, cut + _FRIENDLY * MSS * passed / np.maximum(trip, 1e-6))
        unhurt = window + 0.05 * count[here]  # before the first loss, as Linux has it
        target = np.where(peak > 0, target, np.maximum(target, unhurt))
        target = np.minimum(target, window + count[here] / 2)
        self._window[here] = np.maximum(window, target)

    def _wander(self) -> Array | float:
        if not self._wanders:
            return 0.0
        draws: Array = self._rng.standard_normal(len(self._jitter)).clip(-3, 3)
        wandered: Array = np.maximum(self._jitter * draws, -self.delay_s)
        return wandered

    def _restart(self, now: Array) -> None:
        small = self._window_after(now)
        idle = small < self._window
        if not idle.any():
            return
        high = np.maximum(self._threshold, 0.75 * self._window)
        self._threshold = np.where(idle, high, self._threshold)
        self._window = small
        self._epoch = np.where(idle, math.nan, self._epoch)

    def _window_after(self, now: Array) -> Array:
        """The window with which a message would begin."""
        timeout = self._round_trip + self._patience
        # A pause of just a timeout is one, whatever floating point makes of it.
        timeouts = np.floor(np.maximum(now - self._free, 0) / timeout + 1e-9)
        idle = self._restarts & (timeouts > 0) & (self._free > 0) & (self._in_flight <= 0)
        small = np.maximum(self._window / 2 ** np.minimum(timeouts, 30), self._first)
        return np.where(idle, np.minimum(small, self._window), self._window)

    def turns(self, now: Array, size: int) -> Array:
        """Turns that a message of this size takes at a port before these lines, on one connection:
        what a window lets go at once stays together, up to TURN_BYTES. Open windows share it
        evenly, as an ideal."""
        self._acknowledge(now)
        room = self._first if self._is_open else np.minimum(self._window_after(now), TURN_BYTES)
        return np.maximum(1.0, np.ceil(size / np.minimum(room, size)))

    def _repair(self, size: int | Array, now: Array, span: Array) -> Array | float:
        """What losses add to a message: what it takes to notice the one nearest to its end and to
        send that again (`_notice`), or a timeout where a retransmission is lost as well; and the
        window is cut."""
        if not self._loses:
            return 0.0
        count, rng = len(now), self._rng
        segments = np.ceil(size / self._connections / MSS)
        strikes = rng.binomial(np.ceil(size / MSS).astype(np.int64), self._strikes)
        length = self._share / np.maximum(self._strikes, 1e-12)
        again = rng.random(count) < 1 - (1 - np.minimum(self._share, 0.999)) ** (strikes * length)
        timeout = self._round_trip + self._patience
        place = rng.random(count) ** (1 / np.maximum(strikes, 1))
        # Each further loss doubles the timeout: sum over k of (2 share)^k.
        stall = self._notice(segments, place, rng.geometric(1 / np.maximum(length, 1.0)), timeout)
        stall = stall + again * timeout / (1 - np.minimum(2 * self._share, 0.9))
        hit = strikes > 0
        falling = self._window < self._peak
        peak = np.where(falling, self._window * (1 + _CUBIC_BETA) / 2, self._window)
        cut = np.maximum(self._window * _CUBIC_BETA, 2 * MSS)
        self._peak = np.where(hit, peak, self._peak)
        self._threshold = np.where(hit, cut, self._threshold)
        self._window = np.where(hit, np.where(again, float(MSS), cut), self._window)
        self._epoch = np.where(hit, math.nan, self._epoch)
        return np.where(hit, np.maximum(stall - (1 - place) * span, 0), 0.0)

    def _notice(
        self, segments: Array, place: Array, length: npt.NDArray[np.int64], timeout: Array
    ) -> Array:
        """Extra delay of a message that loses a burst starting at `place` (0 to 1), by the rules of
        `networks.recovery`: one round trip if at least three segments follow, 1.25 if fewer, a tail
        loss probe if none."""
        trip = self._round_trip
        left = segments - np.floor(place * segments)  # of the message, from the burst on
        behind = left - length
        gone = np.minimum(length, left)
        told = trip * np.where(behind < DUPLICATES, 1 + 1 / REORDER_SHARE, 1.0)
        patience = np.where(gone > 1, PROBE_SLACK_NS, PROBE_ALONE_NS) / 1e9
        probe = np.minimum(PROBE_ROUND_TRIPS * trip + patience, timeout)
        probe = probe + trip * (left < segments)  # it counts from the last acknowledgement
        probe = probe + trip * (gone > 1)  # it is of the last segment, and shows the holes
        return np.where(behind > 0, told, probe)


def wire_bytes(size: float | Array) -> Array:
    """Bytes on the line for `size` bytes of a TCP stream: headers of each segment included."""
    return size + np.ceil(np.asarray(size, np.float64) / MSS) * (HEADERS + ETHERNET_BYTES)


def column(items: Sequence[T], figure: Callable[[T], float]) -> Array:
    """A figure of each item; asked for once for an object that stands there many times."""
    known: dict[int, float] = {}
    for item in items:
        if id(item) not in known:
            known[id(item)] = figure(item)
    return np.array([known[id(item)] for item in items], np.float64)


def _or(value: float | None, absent: float) -> float:
    return absent if value is None else value


def byte_s(way: Direction) -> float:
    return 8e-6 / way.mean_rate_mbit if way.mean_rate_mbit else 0.0


def _strike_chance(way: Direction) -> float:
    """Chance of a segment to be lost, or to be the first of a burst of losses."""
    if way.burst is None:
        return way.loss_percent / 100
    enter, leave = way.burst.enter_percent, way.burst.leave_percent
    good = leave / (enter + leave)
    bad_losses = way.burst.lost_in_bad_percent / 100
    return good * (enter / 100 * bad_losses + way.burst.lost_in_good_percent / 100)


def _loss_window(share: Array, round_trip_s: Array) -> Array:
    """The average window under independent loss: CUBIC's, or Reno's where that is larger."""
    loss = np.maximum(share, 1e-12)
    beta = _CUBIC_BETA
    factor = (_CUBIC_C * (3 + beta) / (4 * (1 - beta))) ** 0.25
    cubic = factor * (np.maximum(round_trip_s, 1e-6) / loss) ** 0.75
    return np.asarray(MSS * np.maximum(cubic, np.sqrt(1.5 / loss)))
