"""Codecs: a flat float32 vector to few bytes and back. NumPy only; no torch, no socket.

    codec = parse("topk(0.01) | q2")
    feedback = Feedback(codec, vector.size)
    payloads = feedback.encode(vector)              # one buffer per part, the rest is remembered
    codec.decode(payloads[0], out[: codec.part_elements])

Codecs that depend on the tensors' shapes are bound first: `codec.bind(layout)`. What `memory`
makes is the state that belongs around a codec: feedback, or Deep Gradient Compression. The bytes of
payloads are in docs/reference/codecs.md; `kernels.backend()` says whether C or NumPy does the work.

Here is what every job has. A codec that a job names is loaded by `parse`.

Doors: auto, base, kernels.chosen, lowrank, pieces, table.
"""

from edgetrain.codecs.base import Codec as Codec
from edgetrain.codecs.base import bound as bound
from edgetrain.codecs.base import check_ranges as check_ranges
from edgetrain.codecs.base import salt_of as salt_of
from edgetrain.codecs.dense import BFloat as BFloat
from edgetrain.codecs.dense import Dense as Dense
from edgetrain.codecs.dense import Half as Half
from edgetrain.codecs.dense import verbatim as verbatim
from edgetrain.codecs.feedback import Feedback as Feedback
from edgetrain.codecs.kernels.chosen import Backend as Backend
from edgetrain.codecs.kernels.chosen import backend as backend
from edgetrain.codecs.memories import memory as memory
from edgetrain.codecs.spec import load_own as load_own
from edgetrain.codecs.spec import parse as parse
