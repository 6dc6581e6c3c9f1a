"""A codec: one byte an element, in `steps` equal steps of the part's largest magnitude.

[strategy]
codec = "coarse:Coarse(100)"
"""

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.errors import BadPayload, ConfigError


class Coarse(Codec):
    def __init__(self, steps=127):
        if not 1 <= steps <= 127:
            raise ConfigError(f"Coarse: steps = {steps}", "allowed are 1 to 127")
        self.steps = steps

    def encode_part(self, part, salt=0):
        scale = np.float32(np.abs(part).max() / self.steps or 1)
        return np.rint(part / scale).astype(np.int8).tobytes() + scale.tobytes()

    def check(self, payload, elements):
        if len(payload) != elements + 4:
            raise BadPayload(f"Coarse: {len(payload)} bytes for {elements} elements")
        if not np.isfinite(np.frombuffer(payload, np.float32, 1, elements)[0]):
            raise BadPayload("Coarse: a scale that is not finite")

    def apply(self, payload, weight, out):
        values = np.frombuffer(payload, np.int8, out.size)
        scale = np.frombuffer(payload, np.float32, 1, out.size)[0]
        if weight is None:
            np.multiply(values, scale, out=out)
        else:
            out += np.float32(weight) * (values * scale)

    def max_bytes(self, elements):
        return elements + 4
