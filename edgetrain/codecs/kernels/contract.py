"""Constants and types of the inner loops, which C and NumPy have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
