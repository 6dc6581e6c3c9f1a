"""The Gaussian mechanism on flat vectors: clip to a length and add noise; sources of randomness.

Pure except for the source of random bits, which is an argument. No torch, no accountant, no socket.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Vector

Source = Callable[[int], bytes]
"""A function that returns that many random bytes."""

Doubles = NDArray[np.float64]

TILE = 1 << 16
"""Elements clipped and noised at a time: half a megabyte as float64."""

SHY = 1.0 - 2.0**-20
"""Vectors are shortened to this share of the limit: each element is rounded to 24 bits, and all
roundings together must not lengthen the vector beyond the limit."""

system: Source = os.urandom
"""The operating system's cryptographic generator, for real members and hubs."""


def normal(count: int, source: Source) -> Doubles:
    """float64 [count] from N(0, 1), at most 8.57: Box and Muller 1958, on 53 random bits."""
    pairs = -(-count // 2)
    bits = np.frombuffer(source(16 * pairs), "<u8") >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))
    angle = (2.0 * np.pi * 2.0**-53) * bits[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def chosen(count: int, rate: float, source: Source) -> NDArray[np.int64]:
    """Indices of a Poisson sample of `count`: each with probability `rate`, independently."""
    bits = np.frombuffer(source(8 * count), "<u8") >> np.uint64(11)
    indices: NDArray[np.int64] = np.flatnonzero(bits * 2.0**-53 < rate)
    return indices


def length(vector: Vector) -> float:
    """The Euclidean norm, added up in float64; nan or inf if an element is."""
    total = 0.0
    for start in range(0, vector.size, TILE):
        tile = vector[start : start + TILE].astype(np.float64)
        total += float(np.dot(tile, tile))
    return math.sqrt(total)


def share(norm: float, clip: float) -> float:
    """The factor that shortens a vector of length `norm` to `clip`; 0.0 if not finite."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clip else SHY * clip / norm


@dataclass(frozen=True)
class Gaussian:
    """`clip` is the largest length (L2) of one unit's part; each element of the sum gets noise of
    standard deviation `noise` x `clip`. Raises ConfigError for impossible values."""

    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ConfigError(f"privacy.clip = {self.clip:g}", "allowed is more than 0")
        if not (self.noise >= 0 and math.isfinite(self.noise)):
            raise ConfigError(f"privacy.noise = {self.noise:g}", "allowed are 0 and more")
        if self.noise and math.isinf(self.clip):
            raise ConfigError(
                f"privacy.noise = {self.noise:g} with no limit on lengths", "say what clip is"
            )

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on a sum, in the units of the vectors."""
        return self.noise * self.clip if self.noise else 0.0

    def released(self, vector: Vector, source: Source, out: Vector) -> None:
        """out (float32, like `vector`) = vector clipped, plus noise. `vector` is only read.

        Without noise, a vector not longer than clip keeps its bits. The sum is computed in float64
        and rounded to float32 once.
        """
        scale = share(length(vector), self.clip)
        for start in range(0, vector.size, TILE):
            here = slice(start, start + TILE)
            tile = _scaled(vector[here], scale)
            if self.deviation:
                tile = tile + self.deviation * normal(tile.size, source)
            out[here] = tile


def _scaled(tile: Vector, scale: float) -> Vector | Doubles:
    if scale == 1.0:
        return tile
    if scale == 0.0:  # 0 x nan is not 0
        return np.zeros(tile.size)
    return tile.astype(np.float64) * scale
