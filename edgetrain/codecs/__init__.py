"""Codecs: a flat float32 vector to few bytes and back. NumPy only; no torch, no socket.

    codec = parse("fp32")
    payloads = Feedback(codec, vector.size).encode(vector)      # one buffer per part
    codec.decode(payloads[0], out[: codec.part_elements])

The payloads' bytes are written down in docs/codecs.md.
"""

from edgetrain.codecs.base import Buffer, Codec, Layout, Vector
from edgetrain.codecs.dense import BFloat, Dense, Half
from edgetrain.codecs.feedback import Feedback
from edgetrain.codecs.spec import parse

__all__ = [
    "BFloat",
    "Buffer",
    "Codec",
    "Dense",
    "Feedback",
    "Half",
    "Layout",
    "Vector",
    "parse",
]
