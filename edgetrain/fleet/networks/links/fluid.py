"""TCP as a fluid: the effect of one direction of a link on the bytes of a connection. Pure.

Segments are only counted: a chunk of many segments enters the queue and the rate of a link
together. A loss costs what it costs TCP: a smaller window and a stall. The stream proxy uses this
with the wall clock, the simulator with a virtual clock. Times are integer nanoseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from edgetrain.fleet.networks.links.model import LinkModel
from edgetrain.fleet.networks.links.window import MSS, Window
from edgetrain.fleet.networks.profile import Direction

HEADERS = 52  # IPv4 and TCP with timestamps, per segment
_LARGEST_CHUNK = 65_536
_CHUNK_NS = 4_000_000  # of the line's time: the most that a chunk takes
_LOST_ENOUGH = 1 << 62
_LONGEST_TIMEOUT_NS = 60_000_000_000


class Losses:
    """Draws which segments are lost. Independent losses need one draw per loss, not per segment."""

    def __init__(self, way: Direction, model: LinkModel, seed: int) -> None:
        self._model = model
        self._carry = 0
        self._share = way.mean_loss_percent / 100
        self._random = random.Random(seed).random
        self._independent = way.burst is None
        self._gap = self._draw_gap()

    def _draw_gap(self) -> int:
        if self._share <= 0:
            return _LOST_ENOUGH
        if self._share >= 1:
            return 0
        return int(math.log(1 - self._random()) / math.log(1 - self._share))

    def within(self, count: int, now: int) -> int:
        """Return how many segments of `count` bytes are lost; partial segments are carried over."""
        if not self._share:
            return 0
        segments, self._carry = divmod(self._carry + count, MSS)
        return len(self.places(segments, now))

    def places(self, segments: int, now: int) -> list[int]:
        """Return which of `segments` that enter together at `now` are lost, counted from 0."""
        if not self._share:
            return []
        self._model.pause(now)
        if not self._independent:
            return [place for place in range(segments) if self._model.lost()]
        losses, at = [], self._gap
        while at < segments:
            losses.append(at)
            at += 1 + self._draw_gap()
        self._gap = at - segments
        return losses

    def loses_retransmission(self) -> bool:
        return self._random() < self._share


@dataclass
class Way:
    """One direction of one member's link, shared by all connections of the member."""

    figures: Direction
    model: LinkModel
    losses: Losses
    chunk: int
    mean_delay: int
    ns_per_byte: float
    ack_delay: Callable[[int], int]  # drawn separately: acknowledgements run ahead of the clock

    @classmethod
    def make(cls, figures: Direction, seed: int, start_ns: int) -> Way:
        """Build the models of one direction; `start_ns` is the beginning of its traces."""
        model = LinkModel(figures, seed, start_ns)
        rate = figures.mean_rate_mbit
        chunk = int(rate * 1e6 / 8 * _CHUNK_NS / 1e9) if rate else _LARGEST_CHUNK
        chunk = min(max(chunk, MSS), _LARGEST_CHUNK)
        mean = int(figures.mean_delay_ms * 1e6)
        losses = Losses(figures, model, seed + 1)
        per_byte = 8000 / rate if rate else 0.0
        acks = LinkModel(figures, seed + 1, start_ns)
        return cls(figures, model, losses, chunk, mean, per_byte, acks.delay)

    def delay_ns(self, now: int) -> int:
        """Return the delay of an acknowledgement in this direction: it queues behind the data."""
        rate = self.model.rate
        waiting = rate.waiting_bytes(now) if rate else 0.0
        return self.ack_delay(now) + int(waiting * self.ns_per_byte)

    def repair(self, window: Window, lost: int, now: int) -> int:
        """Draw how `lost` segments are repaired, and shrink the window; return the stall in ns.

        By a fast retransmission, or by timeouts if the retransmission is lost too.
        """
        stall = window.rtt
        timeout = window.timeout
        if any(self.losses.loses_retransmission() for _ in range(lost)):
            window.collapse()
            stall += timeout
            while self.losses.loses_retransmission() and timeout < _LONGEST_TIMEOUT_NS:
                timeout *= 2
                stall += timeout
        else:
            window.cut()
        if lost and self.model.rate:
            self.model.rate.depart(now, lost * (MSS + HEADERS))
        return stall
