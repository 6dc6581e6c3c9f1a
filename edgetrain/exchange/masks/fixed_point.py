"""Float32 vectors as integers modulo 2^32: sums are exact, and a mask hides them completely."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError, Diverged
from edgetrain.vectors.vector import Vector, all_finite, tiles

Words: TypeAlias = NDArray[np.uint32]
"""A flat array of integers modulo 2^32."""

LARGEST = 2**31 - 1


class FixedPoint:
    """x as round(x * scale) modulo 2^32, for x in [-clip_range, clip_range].

    `scale` is the largest power of two with which the numbers of `members` members, each at the end
    of the range, add up to less than 2^31. So no sum overflows, and the sum of the integers is
    exactly the integer of the sum. Rounding costs at most half a step of 1 / scale for each element
    and member (see `error`). Elements outside the range are moved to its end.
    """

    def __init__(self, clip_range: float, members: int) -> None:
        if not (2.0**-20 <= clip_range <= 2.0**20 and 1 <= members <= 2**20):
            raise ConfigError(
                f"fixed point numbers up to {clip_range:g} of {members} members",
                "allowed are ranges from 2^-20 to 2^20 and at most 2^20 members",
            )
        self.clip_range = clip_range
        self.members = members
        self.scale = 2.0 ** math.floor(math.log2(LARGEST / (members * clip_range)))
        if members * round(clip_range * self.scale) > LARGEST:
            self.scale /= 2
        self._end = round(clip_range * self.scale)
        self._most = max(float(np.float32(clip_range)), clip_range) * self.scale

    def encode(self, vector: Vector, out: Words, factor: float = 1.0) -> int:
        """Overwrite `out` with factor * vector; returns how many were cut. Raises Diverged."""
        cut = 0
        for here in tiles(vector.size):
            if not all_finite(vector[here]):
                raise Diverged("a contribution is not finite", "lower the learning rate")
            scaled = vector[here].astype(np.float64) * (factor * self.scale)
            cut += int(np.count_nonzero(np.abs(scaled) > self._most))
            np.clip(np.rint(scaled), -self._end, self._end, out=scaled)
            out[here] = scaled.astype(np.int32).view(np.uint32)
        return cut

    def decode(self, total: Words, weight: float, out: Vector) -> None:
        """Overwrite `out` with the sum that `total` represents, divided by `weight`."""
        unit = 1.0 / (self.scale * weight)
        for here in tiles(total.size):
            out[here] = total[here].view(np.int32) * unit

    def error(self, counted: int, weight: float) -> float:
        """Largest error of an element of the mean of `counted` members, before it is rounded."""
        return counted * 0.5 / (self.scale * weight)
