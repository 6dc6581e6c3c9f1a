"""Who computes which slice of a batch, and the sum of what came back.

Pure: names, numbers and vectors; the time is an argument. No message, no connection. What is done
with the sum, and who may get slices at all, is decided in `dealing`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgetrain.strategies.lbfgs import UNUSABLE
from edgetrain.vectors.vector import Vector

AT_ONCE = 2
"""Slices that a member has: one that it computes and one that waits, so that it need not wait for
the next one to travel."""


LATE = 1.5
"""A slice is late that has been out this many times as long as others take."""


@dataclass(frozen=True)
class BatchMean:
    """The end of a round of slices: the batch's mean loss and gradient at the base."""

    loss: float
    vector: Vector | None
    """The gradient, float32 [elements]; None: the loss alone was wanted."""
    reason: str = ""


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


class Deal:
    """The slices of one batch after the other: given out lowest first, one after the other as
    members answer.

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
        """Of the batch; -1: none has begun."""
        self.began = 0.0
        self.dealt = self.copies = 0
        """Slices given out for this batch, and how many of them were copies."""
        self.sums = SliceSums()
        self._left: list[int] = []
        self._out: dict[int, dict[str, float]] = {}
        """Of each slice that is out, in the order in which they went out: who has it since when."""
        self._took: dict[str, float] = {}
        """Seconds of each member's slowest answer for this batch."""

    def begin(self, round: int, now: float) -> None:
        """A batch begins; what is still out of the last one does not count any more."""
        self.round, self.began = round, now
        self.dealt = self.copies = 0
        self.sums = SliceSums()
        self._left = [-slice for slice in reversed(range(self.slices))]
        self._out, self._took = {}, {}

    @property
    def is_whole(self) -> bool:
        """Whether every slice has an answer."""
        return self.round >= 0 and not self._left and not self._out

    @property
    def wasted(self) -> int:
        """Slices that were given out more often than once, whose other answers do not count."""
        return self.dealt - self.slices

    def holds(self, name: str, slice: int) -> bool:
        """Whether this member has this slice, and its answer would be the first."""
        return name in self._out.get(slice, ())

    def load(self, name: str) -> int:
        """Slices that this member has."""
        return sum(name in holders for holders in self._out.values())

    def give(self, name: str, now: float) -> int | None:
        """The next slice for this member, which is its own from now on; None: there is none."""
        if self._left:
            slice = -self._left.pop()
        elif (found := self._slowest(name, now)) is not None:
            slice = found
            self.copies += 1
        else:
            return None
        self._out.setdefault(slice, {})[name] = now
        self.dealt += 1
        return slice

    def _slowest(self, name: str, now: float) -> int | None:
        """The slice that a member without one may copy."""
        if name not in self._took or self.load(name):
            return None
        for slice, holders in self._out.items():
            if now - min(holders.values()) < LATE * self._took[name]:
                return None  # those behind it went out later
            if len(holders) <= self.copies_at_once:
                return slice
        return None

    def accept(self, name: str, slice: int, now: float) -> None:
        """This member's answer is the first one for the slice."""
        seconds = now - self._out.pop(slice)[name]
        self._took[name] = max(seconds, self._took.get(name, 0.0))

    def keep_only(self, names: Container[str]) -> None:
        """Members but these have gone: what only they had is given out again."""
        for slice, holders in [*self._out.items()]:
            for name in [name for name in holders if name not in names]:
                del holders[name]
            if not holders:
                del self._out[slice]
                insort(self._left, -slice)

    def release(self, name: str) -> None:
        """This member does not know what it has: give that out again."""
        self.keep_only({other for held in self._out.values() for other in held} - {name})
