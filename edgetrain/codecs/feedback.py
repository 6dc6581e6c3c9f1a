"""State around a codec: what it has not sent yet. The only state that compression has.

Knows codecs and vectors; no socket, no round, no optimizer.
"""

from __future__ import annotations

import numpy as np

from edgetrain.codecs.base import Buffer, Codec, Vector, check_vector
from edgetrain.errors import ConfigError


class Feedback:
    """Error feedback (Seide 2014; Karimireddy 2019): what one payload leaves out, the next carries.

    Law: after any number of rounds, sum(decoded) + residual == sum(inputs), to rounding, because
    the residual is the input minus the payload's own decoding.
    """

    def __init__(self, codec: Codec, elements: int) -> None:
        """`elements` is the length of every vector; a lossless codec costs no memory here."""
        self.codec = codec
        self.residual: Vector = np.zeros(0 if codec.lossless else elements, np.float32)
        self._elements = elements

    def encode(self, vector: Vector) -> list[Buffer]:
        """The payloads of `vector` plus what earlier calls left; `vector` is only read."""
        check_vector(vector)
        if vector.size != self._elements:
            raise ConfigError(
                f"feedback keeps {self._elements} elements, the vector has {vector.size}"
            )
        if self.codec.lossless:
            return self.codec.encode(vector)
        return self.codec.drain(self.residual, vector)
