"""Codecs: a flat float32 vector to few bytes and back. NumPy only; no torch, no socket.

    codec = parse("topk(0.01) | q2")
    feedback = Feedback(codec, vector.size)
    payloads = feedback.encode(vector)              # one buffer per part, the rest is remembered
    codec.decode(payloads[0], out[: codec.part_elements])

Codecs that depend on the tensors' shapes are bound first: `codec.bind(layout)`. What `memory`
makes is the state that belongs around a codec: feedback, or Deep Gradient Compression. The bytes of
payloads are in docs/codecs.md; `kernels.backend()` says whether C or NumPy does the work.

Doors: auto, base, kernels.chosen, table.
"""

from edgetrain.codecs.auto import Auto, OnRungs
from edgetrain.codecs.base import Codec
from edgetrain.codecs.blocks import Blockwise, Planes, Sign
from edgetrain.codecs.dense import BFloat, Dense, Half, verbatim
from edgetrain.codecs.feedback import Deep, DeepGradient, Feedback
from edgetrain.codecs.kernels.chosen import Backend, backend
from edgetrain.codecs.lowrank import BoundTwoTrips, LowRank, PowerSGD, TwoTrips
from edgetrain.codecs.memories import memory
from edgetrain.codecs.pieces import check_pieces, in_pieces
from edgetrain.codecs.rules import Rules, bound, check_ranges
from edgetrain.codecs.sparse import RandK, TopK
from edgetrain.codecs.spec import parse
from edgetrain.codecs.table import TABLE

__all__ = [
    "TABLE",
    "Auto",
    "BFloat",
    "Backend",
    "Blockwise",
    "BoundTwoTrips",
    "Codec",
    "Deep",
    "DeepGradient",
    "Dense",
    "Feedback",
    "Half",
    "LowRank",
    "OnRungs",
    "Planes",
    "PowerSGD",
    "RandK",
    "Rules",
    "Sign",
    "TopK",
    "TwoTrips",
    "backend",
    "bound",
    "check_pieces",
    "check_ranges",
    "in_pieces",
    "memory",
    "parse",
    "verbatim",
]
