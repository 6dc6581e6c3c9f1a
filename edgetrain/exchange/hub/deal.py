"""Who computes which slice of a batch, and the sum of what came back.

Pure: names, numbers and vectors; the time is an argument. No message, no connection. What is done
with the sum, and who may get slices at all, is decided in `dealing`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgetrain.exchange.further_messages import MOST_AT_ONCE
from edgetrain.exchange.hub.contributions import BatchMean
from edgetrain.strategies.lbfgs import UNUSABLE
from edgetrain.vectors.vector import Vector

AT_ONCE = 2
"""Slices that a member has at first, and at least: one that it computes and one that waits."""

LEAST_S = 1e-6
"""Seconds between answers, at least: they may come at once."""

LATE = 1.5
"""A slice is late that has been out this many times as long as others take; so is a batch."""

SOONER = 0.7
"""Of the seconds that a member took when it last had slices, those that are believed after each
batch of which it had none: so it is tried again."""


class SliceSums:
    """The weighted means over slices, added in the order of their numbers, in float64: the bits do
    not depend on who computed a slice, nor on when it came. Keeps those that came too early."""

    def __init__(self) -> None:
        self._early: dict[int, tuple[int, float, Vector | None]] = {}
        self._added = self._samples = 0
        self._loss = 0.0
        self._gradient: NDArray[np.float64] | None = None
        self._usable = True

    def add(self, slice: int, samples: int, loss: float, gradient: Vector | None) -> None:
        """Add a slice's means over its `samples`. Keeps `gradient`, float32 [elements]."""
        self._early[slice] = samples, loss, gradient
        while self._added in self._early:
            count, mean, vector = self._early.pop(self._added)
            self._added += 1
            self._samples += count
            self._usable = self._usable and mean < UNUSABLE
            self._loss += count * mean
            if vector is not None:
                if self._gradient is None:
                    self._gradient = np.zeros(vector.size)
                self._gradient += np.multiply(vector, count, dtype=np.float64)

    def mean(self) -> BatchMean:
        """All slices were added: the means over all samples."""
        loss = self._loss / self._samples if self._usable else UNUSABLE
        if self._gradient is None:
            return BatchMean(loss, None)
        return BatchMean(loss, (self._gradient / self._samples).astype(np.float32))


@dataclass
class _Hand:
    """A member's slices and response times, in seconds."""

    room: int = AT_ONCE
    """Slices that it may have at a time."""
    trip: float = 0.0
    """From a slice that goes out to a member without one to its answer; 0: not known."""
    between: float = 0.0
    """From one answer to the next."""
    held: set[int] = field(default_factory=set)
    answers: int = 0
    first: float = 0.0
    last: float = 0.0
    """When its first answer for this batch came, and its newest."""
    quickest: float = 0.0
    slowest: float = 0.0
    """From a slice that went out to its answer."""

    def note_answer(self, seconds: float, now: float) -> None:
        if not self.answers:
            self.first, self.quickest = now, seconds
        self.answers, self.last = self.answers + 1, now
        self.quickest, self.slowest = min(self.quickest, seconds), max(self.slowest, seconds)

    @property
    def expected(self) -> float:
        """Seconds from the batch's begin to the answer of one slice more than it has had."""
        return self.trip + (self.answers + len(self.held)) * self.between

    def for_next_batch(self, took: float) -> _Hand:
        """A hand with room for the slices that this one answers while one of them travels out, is
        computed and travels back, and for one more (Little's law: they are on the way). A member
        that waited for slices looks slower than it is: so the room is found in a few batches, and
        at most doubles in each. `took`: of the batch."""
        trip, between = self.quickest, min(self.between or self.quickest, self.quickest)
        if not self.answers:
            trip = max(self.trip, took) if self.held else SOONER * self.trip
            between = SOONER * self.between
        elif self.answers > 1:
            between = max((self.last - self.first) / (self.answers - 1), LEAST_S)
        room = 1 + round(trip / between) if between else AT_ONCE
        return _Hand(max(AT_ONCE, min(room, 2 * self.room, MOST_AT_ONCE)), trip, between)


class Deal:
    """The slices of one batch after the other: given out lowest first, one after the other as
    members answer. A member has as many at a time as keep it busy over its link.

    A member that would answer a slice when the batch should long be over, by what it answered
    before, gets it only then.

    When none is left, a member without one gets a copy of the slice that has been out longest, if
    that is LATE times as long as any of its own of this batch took: so members of about equal speed
    compute nothing twice, and one that is slow, or lost, keeps nobody waiting. A slice has at most
    `copies` copies at a time. The first answer counts.

    Backup tasks: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2, after
    MapReduce; they give out copies of the slowest slices only at the end of a batch, too.
    """

    def __init__(self, slices: int, copies: int) -> None:
        self.slices, self.copies_at_once = slices, copies
        self.round = -1
        """Round of the batch; -1: none has begun."""
        self.began = 0.0
        self.dealt = self.copies = 0
        """Slices given out for this batch, and how many of them were copies."""
        self.sums = SliceSums()
        self._left: list[int] = []
        self._out: dict[int, dict[str, float]] = {}
        """Slices handed out, in order: the holders of each, with the time."""
        self._hands: dict[str, _Hand] = {}
        self._due = 0.0
        """When the batch is late, if that can be predicted."""

    def begin(self, round: int, now: float) -> None:
        """A batch begins; what is still out of the last one does not count any more."""
        took = now - self.began
        self._hands = {name: hand.for_next_batch(took) for name, hand in self._hands.items()}
        self.round, self.began = round, now
        self._due = now + LATE * self._predicted_s()
        self.dealt = self.copies = 0
        self.sums = SliceSums()
        self._left = [-slice for slice in reversed(range(self.slices))]
        self._out = {}

    def _predicted_s(self) -> float:
        """Seconds that a batch takes, as its members have answered so far; 0: not known."""
        known = [(hand.trip, hand.between) for hand in self._hands.values() if hand.trip]
        if not known:
            return 0.0
        heapq.heapify(known)
        for _ in range(self.slices - 1):
            soonest, between = known[0]
            heapq.heapreplace(known, (soonest + between, between))
        return known[0][0]

    @property
    def is_whole(self) -> bool:
        return self.round >= 0 and not self._left and not self._out

    @property
    def wasted(self) -> int:
        """Slices that were given out more often than once, whose other answers do not count."""
        return max(0, self.dealt - self.slices)

    def lacks(self, slice: int) -> bool:
        """Whether this slice has no answer."""
        return slice in self._out or -slice in self._left

    def holds(self, name: str, slice: int) -> bool:
        """Whether this member has this slice, and its answer would be the first."""
        return name in self._out.get(slice, ())

    def give_all(self, names: Iterable[str], now: float) -> dict[str, list[int]]:
        """Give these members slices until none has room, the next one to the first of those that
        have fewest. Returns what each gets."""
        given: dict[str, list[int]] = {}
        waiting = [
            (len(self._hands[name].held) if name in self._hands else 0, place, name)
            for place, name in enumerate(names)
        ]
        heapq.heapify(waiting)
        while waiting:
            held, place, name = waiting[0]
            if (slice := self.give(name, now)) is None:
                heapq.heappop(waiting)
            else:
                given.setdefault(name, []).append(slice)
                heapq.heapreplace(waiting, (held + 1, place, name))
        return given

    def give(self, name: str, now: float) -> int | None:
        """The next slice for this member, which is its own from now on; None: there is none for it,
        or it has no room."""
        hand = self._hands.setdefault(name, _Hand())
        if len(hand.held) >= hand.room:
            return None
        if self._left:
            if now < self._due < self.began + hand.expected:
                return None
            slice = -self._left.pop()
        elif (found := self._slowest(hand, now)) is not None:
            slice = found
            self.copies += 1
        else:
            return None
        self._out.setdefault(slice, {})[name] = now
        hand.held.add(slice)
        self.dealt += 1
        return slice

    def _slowest(self, hand: _Hand, now: float) -> int | None:
        if hand.held or not hand.answers:
            return None
        for slice, holders in self._out.items():
            if now - min(holders.values()) < LATE * hand.slowest:
                return None  # those behind it went out later
            if len(holders) <= self.copies_at_once:
                return slice
        return None

    def accept(self, name: str, slice: int, now: float) -> None:
        """This member's answer is the first one for the slice, which another hub may have given
        out."""
        holders = self._out.pop(slice, {})
        if not holders:
            self._left.remove(-slice)
        for each in holders:
            self._hands[each].held.discard(slice)
        if name in holders:
            self._hands[name].note_answer(now - holders[name], now)
        else:
            self.dealt += 1

    def keep_only(self, names: Container[str]) -> None:
        """Members but these have gone: what only they had is given out again."""
        for name in [name for name in self._hands if name not in names]:
            self.release(name)

    def release(self, name: str) -> None:
        """This member does not know what it has: give that out again."""
        hand = self._hands.pop(name, _Hand())
        for slice in hand.held:
            holders = self._out[slice]
            del holders[name]
            if not holders:
                del self._out[slice]
                insort(self._left, -slice)
