"""The Gaussian mechanism on flat vectors: clip to a length, add noise. And where noise comes from.

Pure but for the source of random bits, which is passed in. No torch, no accountant, no socket.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Vector

Source = Callable[[int], bytes]
"""So many random bytes."""

Doubles = NDArray[np.float64]

TILE = 1 << 16
"""Elements that are clipped and noised at a time: as float64, half a megabyte."""

SHY = 1.0 - 2.0**-20
"""What is shortened is shortened to this much of the limit: each element is rounded to 24 bits, and
all roundings together must not carry the vector past it."""

system: Source = os.urandom
"""The operating system's cryptographic generator: what real members and hubs use."""


def seeded(*words: int | str) -> Source:
    """A stream of bytes that the words decide, for tests and simulations: SHAKE-256 in counter
    mode. Who knows the words can take the noise away again."""
    key = hashlib.sha256(repr(words).encode()).digest()
    turn = 0

    def more(count: int) -> bytes:
        nonlocal turn
        turn += 1
        return hashlib.shake_256(key + turn.to_bytes(8, "little")).digest(count)

    return more


def normal(count: int, source: Source) -> Doubles:
    """float64 [count] from N(0, 1): Box and Muller 1958, on uniforms of 53 random bits.

    The largest value there is, 8.57, is passed by a true normal variable once in 10^17 draws.
    """
    pairs = -(-count // 2)
    bits = np.frombuffer(source(16 * pairs), "<u8") >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))
    angle = (2.0 * np.pi * 2.0**-53) * bits[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def chosen(count: int, rate: float, source: Source) -> NDArray[np.int64]:
    """Which of `count` are in a Poisson sample: each with probability `rate`, independently."""
    bits = np.frombuffer(source(8 * count), "<u8") >> np.uint64(11)
    found: NDArray[np.int64] = np.flatnonzero(bits * 2.0**-53 < rate)
    return found


def length(vector: Vector) -> float:
    """The Euclidean norm, added up in float64; nan or inf if an element is."""
    total = 0.0
    for start in range(0, vector.size, TILE):
        tile = vector[start : start + TILE].astype(np.float64)
        total += float(np.dot(tile, tile))
    return math.sqrt(total)


def share(norm: float, clip: float) -> float:
    """What a vector of that length is to be multiplied with so that it is no longer than `clip`.

    1.0 exactly if it is not; 0.0 for one that is not finite: who sends it counts as who sends
    nothing.
    """
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clip else SHY * clip / norm


@dataclass(frozen=True)
class Gaussian:
    """`clip` is the length (L2) that one unit's part is cut to; noise has `deviation` = noise
    multiplier x clip in each element of the sum. ConfigError for values that cannot be."""

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

        Without noise, and if it is not longer than clip, these are the vector's own bits. The sum
        is made in float64 and rounded to float32 once.
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
