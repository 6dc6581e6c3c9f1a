"""Codecs whose payloads have one length for a number of elements, whatever the values are.

All parts of an encoding share one buffer, because allocating memory costs more than most codecs.
A payload has 1 to 4 MB.
"""

from __future__ import annotations

import zlib

import numpy as np

from edgetrain.codecs.base import Codec, as_bytes, check_length, check_vector
from edgetrain.codecs.kernels.contract import Bytes
from edgetrain.vectors.vector import Buffer, Vector


def sample_seed(r: Vector, g: Vector | None, salt: int = 0) -> int:
    """32 bits from r + g and a salt, so that a stochastic codec needs no state and no clock.

    Equal vectors give equal bytes, which keeps runs reproducible; a change in any of 64 sampled
    elements gives another seed. Where the same seed again and again would do harm: `whole_seed`.
    """
    step = max(1, r.size // 64)
    sample = r[::step] if g is None else r[::step] + g[::step]
    return zlib.crc32(sample.tobytes(), salt)


def whole_seed(vector: Vector, salt: int = 0) -> int:
    """As `sample_seed`, but of all elements: of a sparse vector the sample is zero every time."""
    starts = np.arange(0, vector.size, max(1, vector.size // 64))
    sums = np.add.reduceat(vector.view(np.uint32), starts, dtype=np.uint32)
    return zlib.crc32(sums.tobytes(), salt)


class Ranged(Codec):
    """A dense codec whose payload has `max_bytes` bytes and can be decoded from any block on."""

    def check(self, payload: Buffer, elements: int) -> None:
        check_length(self.name, len(payload), self.max_bytes(elements))

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        """out = the elements from `first` on, or += weight * these, of a checked payload.

        `elements` is the length of the whole part. `first` is a multiple of ENTRIES, or anything
        for codecs without blocks.
        """
        raise NotImplementedError

    def apply(self, payload: Buffer, weight: float | None, out: Vector) -> None:
        self.read(as_bytes(payload), out.size, 0, out, weight)


class FixedSize(Ranged):
    """Writes all parts into one buffer. A codec defines `max_bytes`, `write` and `read`."""

    stochastic = False

    def encode(self, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        return self._encode(vector, None, salt)

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        check_vector(vector)
        return self._encode(residual, vector, salt)

    def encode_part(self, part: Vector, salt: int = 0) -> Buffer:
        check_vector(part)
        out = np.empty(self.max_bytes(part.size), np.uint8)
        self.write(part, None, sample_seed(part, None, salt) if self.stochastic else 0, out)
        return out.data

    def write(self, r: Vector, g: Vector | None, seed: int, out: Bytes) -> None:
        """Write one part to `out`. If g is given, r += g before and r -= decoded after."""
        raise NotImplementedError

    def _encode(self, r: Vector, g: Vector | None, salt: int) -> list[Buffer]:
        step = self.part_elements
        seed = sample_seed(r, g, salt) if self.stochastic else 0
        sizes = [self.max_bytes(part.size) for part in self.parts(r)]
        out = np.empty(sum(sizes), np.uint8)
        payloads: list[Buffer] = []
        at = 0
        for i, size in enumerate(sizes):
            start, stop = i * step, (i + 1) * step
            here = None if g is None else g[start:stop]
            self.write(r[start:stop], here, (seed + i) % 2**32, out[at : at + size])
            payloads.append(out[at : at + size].data)
            at += size
        return payloads
