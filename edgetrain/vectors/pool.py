"""A pool of float32 vectors: memory is used again as soon as no view of a vector is left.

Allocating a vector of many megabytes in every round costs a page fault for each 4 KiB of it, which
is more than the arithmetic done on it. This module knows no strategy and no message.
"""

from __future__ import annotations

import weakref

import numpy as np

from edgetrain.vectors.vector import Vector


class VectorPool:
    """Lends float32 vectors [elements]; their content is whatever was last written to the memory.

    There is no method to return a vector: its memory is used again once the vector and every view,
    buffer or message made of it are gone (a socket may keep one longer than the code that sent it).
    So the pool never holds more memory than was in use at one time. Only one thread may borrow; the
    last reference may disappear in any thread.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._spare: list[Vector] = []
        self._lent: dict[int, tuple[weakref.ref[Vector], Vector]] = {}

    def borrow_vector(self) -> Vector:
        spare = self.borrow_spare()
        return self._lend(np.empty(self._elements, np.float32)) if spare is None else spare

    def borrow_spare(self) -> Vector | None:
        """A vector from memory that the pool already has; None if all of it is in use."""
        return self._lend(self._spare.pop()) if self._spare else None

    def _lend(self, memory: Vector) -> Vector:
        # A view of an array keeps the array alive that owns the memory. Because of the memoryview
        # that owner is the array made here, so it lives as long as its views do.
        vector: Vector = np.frombuffer(memory.data, np.float32)
        loan = weakref.ref(vector, self._return)
        self._lent[id(loan)] = loan, memory
        return vector

    def _return(self, loan: weakref.ref[Vector]) -> None:
        self._spare.append(self._lent.pop(id(loan))[1])
