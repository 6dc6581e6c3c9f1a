"""Vectors whose memory is used again once nobody looks at them any more.

A vector of many megabytes that is made and dropped in every round costs a page fault for each 4 KiB
of it, each time; that is more than the arithmetic done on it. No strategy, no message here.
"""

from __future__ import annotations

import weakref

import numpy as np

from edgetrain.vectors.vector import Vector


class Vectors:
    """Gives out float32 vectors [elements] with whatever is in them.

    Whoever takes one never gives it back: when the vector and the last view, buffer or message
    made of it are gone (a socket may hold one longer than the code that sent it), its memory is
    there for the next `take`. So there is never more of it than was in use at the same time. One
    thread takes; the last reference may go in any.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._spare: list[Vector] = []
        self._lent: dict[int, tuple[weakref.ref[Vector], Vector]] = {}

    def take(self) -> Vector:
        """A vector that nobody else looks at."""
        spare = self.take_spare()
        return self._lend(np.empty(self._elements, np.float32)) if spare is None else spare

    def take_spare(self) -> Vector | None:
        """The same, but only if it takes no new memory."""
        return self._lend(self._spare.pop()) if self._spare else None

    def _lend(self, memory: Vector) -> Vector:
        # Views of an array refer to the array that owns the memory. Through a memoryview that is
        # the one made here, and so it lives as long as they do.
        vector: Vector = np.frombuffer(memory.data, np.float32)
        loan = weakref.ref(vector, self._back)
        self._lent[id(loan)] = loan, memory
        return vector

    def _back(self, loan: weakref.ref[Vector]) -> None:
        self._spare.append(self._lent.pop(id(loan))[1])
