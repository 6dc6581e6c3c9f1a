"""How much memory a decoder takes."""

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.errors import BadPayload

FIXED = 256 * 1024
"""Bytes that a decoder may take beyond the part's own size, whatever that is."""


def peak_of(choice: str, work: Callable[[], object]) -> int:
    """Bytes allocated at most at a time, what is kept between calls included."""
    with kernels.using(choice):  # nothing is kept yet
        tracemalloc.start()
        try:
            work()
        except BadPayload:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return peak


def decodings(codec: Codec, payload: bytes, elements: int) -> Iterator[Callable[[], object]]:
    """Every way to decode one payload, into a vector that is there already."""
    out = np.zeros(elements, np.float32)
    yield lambda: codec.decode(payload, out)
    yield lambda: codec.add(payload, 0.5, out)
    yield lambda: codec.add_many([payload] * 4, [0.5] * 4, out)


def worst(codec: Codec, payloads: list[bytes], elements: int, choice: str) -> int:
    """The most bytes that decoding any of these takes; the first is valid."""
    with np.errstate(all="ignore"):
        with kernels.using(choice):
            for work in decodings(codec, payloads[0], elements):
                work()  # the first time round, Python itself allocates
        return max(
            peak_of(choice, work) for p in payloads for work in decodings(codec, p, elements)
        )
