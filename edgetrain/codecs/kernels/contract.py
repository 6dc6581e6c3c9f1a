"""The contract of every implementation of the inner loops: protocol, its constants and types.

No implementation belongs here and none is imported; native.py and numpy_twin.py import this module.
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
"""Neighbouring elements that are sampled together."""


GAP_BLOCK = 32
"""Gaps that share a Rice parameter."""


ESCAPE = 24
"""The quotient after which the whole gap follows."""


MAX_RICE = 30


LEVEL_BLOCK = 128
"""Values that share a mean excess."""


SIGN_BLOCK = 512
"""Elements that share a scale in the sign codec."""


LIMIT = 2.0**100
"""Lossy codecs refuse magnitudes of LIMIT and more: training has diverged long before."""


TINY = 2.0**-100
"""A block whose magnitudes are all below TINY is sent as zeros."""


ENTRIES = 4096
"""Entries decoded at a time where there is no memory for all; a multiple of every block size."""


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
        whole, rest = divmod(elements, self.block)
        return whole * self._bytes(self.block) + self._bytes(rest)

    def scale_bytes(self, elements: int) -> int:
        return 4 * -(-elements // self.block)

    def _bytes(self, m: int) -> int:
        return {8: m, 4: (m + 1) // 2, 5: (m + 4) // 5}[self.width]


class Gaps(Protocol):
    """Ascending positions in block Rice code, some at a time, in memory for ENTRIES of them."""

    def next_positions(self) -> Indices:
        """The next ENTRIES positions, fewer at the end; valid until the next call.

        Raises BadPayload.
        """

    def finish(self) -> int:
        """Number of bytes read; call it after the last position. Raises BadPayload."""


class Kernels(Protocol):
    """The inner loops. Arrays are flat and contiguous, and are only read unless stated."""

    name: str

    def few(self, elements: int) -> int:
        """The most entries that may be decoded at once for a part of `elements` elements.

        Decoded entries and scratch then take no more memory than the part itself, or about 32 KiB
        for a small part.
        """

    def stream_add(self, r: Vector, g: Vector) -> None:
        """r += g: twelve bytes an element, the yardstick of the benchmarks."""

    def threshold(
        self, r: Vector, g: Vector | None, rank: int, stride: int, seed: int
    ) -> tuple[int, int]:
        """(bits, hits): the rank-th largest magnitude of a sample of r + g, as float32 bits.

        One chunk of 64 elements in `stride` chunks is sampled. `hits` is the number of sampled
        magnitudes that are at least as large.
        """

    def threshold_of(self, r: Vector, g: Vector | None, rank: int) -> tuple[int, int]:
        """The threshold for the rank-th largest magnitude of all of r + g, exactly."""

    def select(
        self, r: Vector, g: Vector | None, bound: int, zero: bool, room: int = 0
    ) -> tuple[Indices, Vector, int]:
        """r += g, then (positions, values, stopped) of the magnitudes of at least `bound`.

        `bound` is float32 bits. If `zero`, set the selected elements of r to 0. If `room` > 0, stop
        after about that many entries; `stopped` is the first element not searched. The arrays are
        valid until this thread's next call.
        """

    def trim(
        self, r: Vector | None, positions: Indices, values: Vector, bound: int, wanted: int
    ) -> tuple[Indices, Vector]:
        """The `wanted` largest entries; `bound` is the smallest magnitude among them.

        If r is given, write the dropped values back to it. May reuse the arrays.
        """

    def gaps_encode(self, positions: Indices, elements: int) -> Bytes:
        """Encode ascending positions below `elements`, at least one, as gaps in block Rice code."""

    def gaps_decode(self, payload: Bytes, count: int, elements: int) -> tuple[Indices, int]:
        """(positions, bytes read). Raises BadPayload."""

    def gaps(self, payload: Bytes, count: int, elements: int) -> Gaps:
        """A reader of the same positions, some at a time. Raises BadPayload."""

    def levels_encode(self, values: Vector, anchor: float, bits: int) -> tuple[Bytes, Vector]:
        """(bytes, decoded values): sign and level planes. Raises EdgetrainError."""

    def levels_check(self, payload: Bytes, count: int, bits: int) -> int:
        """Bytes that `count` values take at the start of a payload. Raises BadPayload."""

    def levels_read(
        self, payload: Bytes, count: int, first: int, bits: int, out: Vector, weight: float | None
    ) -> None:
        """out = the values from `first` on, or += weight * these, of `count` checked values.

        `first` is a multiple of LEVEL_BLOCK.
        """

    def write_residual(self, r: Vector, positions: Indices, values: Vector, sent: Vector) -> None:
        """r[positions] = values - sent."""

    def scatter(self, r: Vector, positions: Indices, values: Vector, weight: float | None) -> None:
        """r[positions] = values, or += weight * values."""

    def sparse_encode(
        self, r: Vector | None, positions: Indices, values: Vector, elements: int, bits: int
    ) -> bytes:
        """A whole sparse payload, values as 1..4 planes or raw (32).

        If r is given, write the residual to it: values - decoded at the positions.

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
        """Raise BadPayload for bytes that no encoder writes. The caller has checked the length."""

    def blocks_read(
        self,
        payload: Bytes,
        elements: int,
        first: int,
        code: Blocks,
        out: Vector,
        weight: float | None,
    ) -> None:
        """out = decoded from element `first` on, or += weight * that, of a checked payload.

        `first` is a multiple of the block.
        """

    def signs_encode(self, r: Vector, g: Vector | None, out: Bytes) -> None:
        """Scales and sign bits of r to `out`. With g: r += g first, r -= decoded after.

        Raises EdgetrainError.
        """

    def signs_check(self, payload: Bytes, elements: int) -> None:
        """Raise BadPayload for bytes that no encoder writes. The caller has checked the length."""

    def signs_read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        """out = decoded from element `first` on, or += weight * that, of a checked payload.

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
        """out = decoded from element `first` on, or += weight * that, of the right length."""

    def momentum(self, u: Vector, g: Vector, m: float, scale: float) -> None:
        """u = m * u + scale * g."""
