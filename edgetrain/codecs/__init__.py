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

from edgetrain.codecs.auto import Auto as Auto
from edgetrain.codecs.auto import OnRungs as OnRungs
from edgetrain.codecs.base import Codec as Codec
from edgetrain.codecs.base import salt_of as salt_of
from edgetrain.codecs.blocks import Blockwise as Blockwise
from edgetrain.codecs.blocks import Planes as Planes
from edgetrain.codecs.blocks import Sign as Sign
from edgetrain.codecs.dense import BFloat as BFloat
from edgetrain.codecs.dense import Dense as Dense
from edgetrain.codecs.dense import Half as Half
from edgetrain.codecs.dense import verbatim as verbatim
from edgetrain.codecs.feedback import Deep as Deep
from edgetrain.codecs.feedback import DeepGradient as DeepGradient
from edgetrain.codecs.feedback import Feedback as Feedback
from edgetrain.codecs.kernels.chosen import Backend as Backend
from edgetrain.codecs.kernels.chosen import backend as backend
from edgetrain.codecs.lowrank import BoundTwoTrips as BoundTwoTrips
from edgetrain.codecs.lowrank import LowRank as LowRank
from edgetrain.codecs.lowrank import PowerSGD as PowerSGD
from edgetrain.codecs.lowrank import TwoTrips as TwoTrips
from edgetrain.codecs.memories import memory as memory
from edgetrain.codecs.pieces import check_pieces as check_pieces
from edgetrain.codecs.pieces import in_pieces as in_pieces
from edgetrain.codecs.rules import Rules as Rules
from edgetrain.codecs.rules import bound as bound
from edgetrain.codecs.rules import check_ranges as check_ranges
from edgetrain.codecs.sparse import RandK as RandK
from edgetrain.codecs.sparse import TopK as TopK
from edgetrain.codecs.spec import parse as parse
from edgetrain.codecs.table import TABLE as TABLE
