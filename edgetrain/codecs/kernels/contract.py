"""What every implementation of the inner loops offers: the protocol, its constants and types.

Nothing is implemented here, and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from edgetrain.vectors.vector import Vector

Indices: TypeAlias = npt.NDArray[np.uint32]


Bytes: TypeAlias = npt.NDArray[np.uint8]


CHUNK = 64
"""Neighbours that are sampled together."""


GAP_BLOCK = 32
"""Gaps that share a Rice parameter."""


ESCAPE = 24
"""The quotient that says: the gap follows in full."""


MAX_RICE = 30


LEVEL_BLOCK = 128
"""Kept values that share a mean excess."""


SIGN_BLOCK = 512
"""Elements that share a scale in the sign codec."""


LIMIT = 2.0**100
"""Magnitudes from here on are refused by lossy codecs: training has diverged long before."""


TINY = 2.0**-100
"""A block of values that are all below this is sent as zeros."""


ENTRIES = 4096
"""Entries that are decoded at a time where there is no room for all; a multiple of every block."""


@dataclass(frozen=True)
class Blocks:
    """A blockwise code: a scale for every block, integer levels -levels..levels.

    `width` is the layout: 8 bits, 4 bits (two to a byte) or 5 (five trits to a byte, always
    stochastic).
    """

    levels: int
    width: int
    stochastic: bool = False

    @property
    def block(self) -> int:
        return 512 if self.width == 5 else 256

    def code_bytes(self, elements: int) -> int:
        """Bytes of the codes of that many elements."""
        whole, rest = divmod(elements, self.block)
        return whole * self._bytes(self.block) + self._bytes(rest)

    def scale_bytes(self, elements: int) -> int:
        """Bytes of the scales of that many elements."""
        return 4 * -(-elements // self.block)

    def _bytes(self, m: int) -> int:
        return {8: m, 4: (m + 1) // 2, 5: (m + 4) // 5}[self.width]


class Gaps(Protocol):
    """Ascending positions in block Rice code, some at a time, in memory for ENTRIES of them."""

    def next_positions(self) -> Indices:
        """The next ENTRIES positions, or those that are left; valid until the next call.

        Raises BadPayload.
        """

    def finish(self) -> int:
        """Bytes read, once all positions have been taken. Raises BadPayload."""


class Kernels(Protocol):
    """The inner loops. Arrays are flat, contiguous, and only written where it is said."""

    name: str

    def few(self, elements: int) -> int:
        """Entries of a part of that many elements for which `sparse_decode` has enough memory.

        With what it takes meanwhile they fill no more than the part itself, or, in a small one,
        some 32 KiB.
        """

    def stream_add(self, r: Vector, g: Vector) -> None:
        """r += g: twelve bytes an element, the yardstick of the benchmarks."""

    def threshold(
        self, r: Vector, g: Vector | None, rank: int, stride: int, seed: int
    ) -> tuple[int, int]:
        """(bits, hits): the rank-th largest magnitude of a sample of r + g, as float32 bits.

        One chunk of 64 of every `stride` is sampled. `hits` counts the sampled magnitudes that are
        at least as large.
        """

    def threshold_of(self, r: Vector, g: Vector | None, rank: int) -> tuple[int, int]:
        """The same for the rank-th largest magnitude of all of r + g, exactly."""

    def select(
        self, r: Vector, g: Vector | None, bound: int, zero: bool, room: int = 0
    ) -> tuple[Indices, Vector, int]:
        """r += g, then (positions, values, stopped) of what has at least the magnitude `bound`.

        `bound` is float32 bits. What is found is zeroed in r on demand. With `room` for so many
        entries it may stop early, before element `stopped`. The arrays are valid until this
        thread's next call.
        """

    def trim(
        self, r: Vector | None, positions: Indices, values: Vector, bound: int, wanted: int
    ) -> tuple[Indices, Vector]:
        """The `wanted` largest, `bound` being the smallest magnitude of these; may reuse arrays.

        What is dropped goes back to r, where r is given.
        """

    def gaps_encode(self, positions: Indices, elements: int) -> Bytes:
        """Ascending positions below `elements`, at least one, as gaps in block Rice code."""

    def gaps_decode(self, payload: Bytes, count: int, elements: int) -> tuple[Indices, int]:
        """(positions, bytes read). Raises BadPayload."""

    def gaps(self, payload: Bytes, count: int, elements: int) -> Gaps:
        """The same, some at a time. Raises BadPayload."""

    def levels_encode(self, values: Vector, anchor: float, bits: int) -> tuple[Bytes, Vector]:
        """(bytes, what they decode to): sign and level planes. Raises EdgetrainError."""

    def levels_check(self, payload: Bytes, count: int, bits: int) -> int:
        """Bytes that so many values take at the start of a payload. Raises BadPayload."""

    def levels_read(
        self, payload: Bytes, count: int, first: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        """out = the values from `first` on, or += weight * these, of `count` that were checked.

        `first` is a multiple of LEVEL_BLOCK.
        """

    def write_residual(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        """r[positions] = values - sent."""

    def scatter(self, r: Vector, positions: Indices, values: Vector, weight: float | None) -> None:
        """r[positions] = values, or += weight * values."""

    def sparse_encode(
        self, r: Vector | None, positions: Indices, values: Vector, elements: int, bits: int
    ) -> bytes:
        """A whole sparse payload, values as 1..4 planes or raw (32); settles r where it is given.

        Raises EdgetrainError.
        """

    def sparse_head(self, payload: Bytes, elements: int) -> tuple[int, int]:
        """(entries that a sparse payload announces, bytes of that number). Raises BadPayload."""

    def sparse_decode(self, payload: Bytes, elements: int, bits: int) -> tuple[Indices, Vector]:
        """(positions, values) of a sparse payload, 8 bytes an entry. Raises BadPayload."""

    def sparse_check(self, payload: Bytes, elements: int, bits: int) -> None:
        """Raise BadPayload where `sparse_decode` would, in memory for ENTRIES."""

    def sparse_apply(self, payload: Bytes, bits: int, out: Vector, weight: float | None) -> None:
        """out[positions] = values, or += weight * values, of a checked payload.

        Takes memory for ENTRIES.
        """

    def sparse_set(self, payload: Bytes, bits: int, out: Vector) -> None:
        """out = what a payload decodes to. BadPayload leaves `out` as it was.

        Entries are kept until all are known to be valid where they are `few`; else the payload is
        read twice, in memory for ENTRIES.
        """

    def sparse_add(
        self, payloads: Sequence[Bytes], weights: Sequence[float], bits: int, out: Vector
    ) -> None:
        """out += weight * decoded of each payload, in order. BadPayload leaves `out` as it was.

        Takes memory as `sparse_set` does; what counts are the entries of all payloads together.
        """

    def blocks_encode(
        self, r: Vector, g: Vector | None, code: Blocks, noise: int, out: Bytes
    ) -> None:
        """Scales and codes of r to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """

    def blocks_check(self, payload: Bytes, elements: int, code: Blocks) -> None:
        """Raises BadPayload for what no encoder writes. The length is right."""

    def blocks_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        code: Blocks,
        out: Vector,
        weight: float | None,
    ) -> None:
        """out = decoded from element `first` on, or += weight * that; it has been checked.

        `first` is a multiple of the block.
        """

    def signs_encode(self, r: Vector, g: Vector | None, out: Bytes) -> None:
        """Scales and sign bits of r to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """

    def signs_check(self, payload: Bytes, elements: int) -> None:
        """Raises BadPayload for what no encoder writes. The length is right."""

    def signs_read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        """out = decoded from element `first` on, or += weight * that; it has been checked.

        `first` is a multiple of SIGN_BLOCK.
        """

    def planes_encode(self, r: Vector, g: Vector | None, bits: int, out: Bytes) -> None:
        """`levels_encode` of r against zero to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """

    def halves_encode(self, r: Vector, g: Vector | None, brain: bool, out: Bytes) -> None:
        """binary16 or (brain) bfloat16 of r to `out`. With g: r += g first, r -= decoded after."""

    def halves_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        brain: bool,
        out: Vector,
        weight: float | None,
    ) -> None:
        """out = decoded from element `first` on, or += weight * that. The length is right."""

    def momentum(self, u: Vector, g: Vector, m: float, scale: float) -> None:
        """u = m * u + scale * g."""
