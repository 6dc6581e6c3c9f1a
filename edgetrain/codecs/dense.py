"""Dense codecs: every element is sent. fp32 (as it is), fp16 and bf16 (half the bytes).

No scales, no indices: a part's payload is the array itself, little-endian.
"""

from __future__ import annotations

import numpy as np

from edgetrain.codecs.base import Codec, add_scaled, check_vector
from edgetrain.codecs.fixed import FixedSize, Ranged
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.contract import Bytes
from edgetrain.vectors.vector import Buffer, Vector


class Dense(Ranged):
    """fp32: the vector's own bytes. Lossless; encoding copies nothing.

    Wire: 4 bytes an element, IEEE 754 binary32, little-endian.
    """

    name = "fp32"
    lossless = True
    verbatim = True
    nearly_all = True

    def encode_part(self, part: Vector, salt: int = 0) -> Buffer:
        check_vector(part)
        return part.view(np.uint8).data

    def drain(self, residual: Vector, vector: Vector, salt: int = 0) -> list[Buffer]:
        """Sends residual + vector whole; the residual becomes zero."""
        total = residual + vector
        residual[:] = 0
        return self.encode(total)

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        values = np.frombuffer(payload, "<f4", out.size, 4 * first)
        if weight is None:
            out[:] = values
        elif weight == 1:
            out += values
        else:
            add_scaled(values, weight, out)

    def max_bytes(self, elements: int) -> int:
        return 4 * elements


def verbatim(codec: Codec) -> Dense:
    """Full precision in parts of as many elements as this codec's, so that one merge reads both."""
    dense = Dense()
    dense.part_elements = codec.part_elements
    return dense


class Half(FixedSize):
    """fp16: IEEE binary16, round to nearest even; larger finite values become 65504.

    Wire: 2 bytes an element. Bound: |error| <= 2^-11 |x| + 2^-25, for |x| <= 65504.
    """

    name = "fp16"
    nearly_all = True
    _brain = False

    def write(self, r: Vector, g: Vector | None, seed: int, out: Bytes) -> None:
        kernels.current().halves_encode(r, g, self._brain, out)

    def read(
        self, payload: Bytes, elements: int, first: int, out: Vector, weight: float | None
    ) -> None:
        kernels.current().halves_read(payload, elements, first, self._brain, out, weight)

    def max_bytes(self, elements: int) -> int:
        return 2 * elements


class BFloat(Half):
    """bf16: the upper half of binary32, round to nearest even.

    Wire: 2 bytes an element. Bound: |error| <= 2^-8 |x|.
    """

    name = "bf16"
    _brain = True
