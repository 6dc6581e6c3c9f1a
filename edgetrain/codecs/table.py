"""The list of codecs that people read: how each is spelled, what it sends, its compression ratio.

Rows are text; spec.py builds codecs from it. Speed and error: benchmarks/codecs_speed.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgetrain.codecs.base import Codec
from edgetrain.vectors.vector import Layout, Vector

SAMPLE_LAYOUT: Layout = (("sample", 0, (256, 256)),)
SAMPLE_WORDS = "65,536 normally distributed numbers in one matrix of 256 x 256"
"""The vector that ratios are computed for, in words."""


@dataclass(frozen=True)
class CodecRow:
    """One codec: its name, the arguments it takes, what it sends, and one complete spelling."""

    name: str
    arguments: str
    summary: str
    example: str
    exact: bool = True
    """False if the length of its payloads depends on the values, so that its ratio is a sample."""

    @property
    def spelling(self) -> str:
        """Name and arguments, as in "topk(density[, exact][, tensor])"."""
        return self.name + self.arguments


_ROWS = (
    CodecRow("fp32", "", "every element as it is (also: dense)", "fp32"),
    CodecRow("fp16", "", "half precision", "fp16"),
    CodecRow("bf16", "", "bfloat16", "bf16"),
    CodecRow("int8", "", "8 bits an element, blockwise scale", "int8"),
    CodecRow("int4", "", "4 bits an element, blockwise scale", "int4"),
    CodecRow("qsgd", "(levels)", "stochastic levels, 1 to 127", "qsgd(7)"),
    CodecRow("ternary", "", "-1, 0, 1 at random, 1.6 bits an element", "ternary"),
    CodecRow("sign", "", "1 bit an element and a scale", "sign"),
    CodecRow("q1", "", "a sign and the block's mean", "q1"),
    CodecRow("q2", "", "a sign and 2 levels", "q2"),
    CodecRow("q3", "", "a sign and 4 levels", "q3"),
    CodecRow("q4", "", "a sign and 8 levels", "q4"),
    CodecRow(
        "topk", "(density[, exact][, tensor])", "the largest magnitudes", "topk(0.01)", exact=False
    ),
    CodecRow(
        "dgc",
        "(density[, momentum[, warm-up[, clip]]])",
        "topk with Deep Gradient Compression",
        "dgc(0.01)",
        exact=False,
    ),
    CodecRow("randk", "(density)", "random elements, no positions sent", "randk(0.01)"),
    CodecRow("low-rank", "(rank[, iterations])", "factors of each matrix", "low-rank(4)"),
    CodecRow(
        "powersgd",
        "(rank)",
        "the fleet's common factors, in two trips; for sync-sgd",
        "powersgd(4)",
    ),
    CodecRow(
        "auto",
        "[(smallest share)]",
        "as much as the slowest link takes while a round is computed",
        "auto",
        exact=False,
    ),
)

TABLE = {row.name: row for row in _ROWS}

CHAIN = CodecRow(
    "topk",
    "(density) | codec",
    "what topk, dgc or randk keeps, coded by another codec",
    "topk(0.01) | q2",
    exact=False,
)
"""Two codecs chained, as one more row of the list."""


def sample() -> Vector:
    """The vector of which `ratio` is: float32 [65536], the same every time."""
    return np.random.default_rng(0).standard_normal(256 * 256, np.float32)


def ratio(codec: Codec) -> float:
    """Bytes of `sample` as float32 / bytes of its payloads, those of both trips together."""
    vector, bound = sample(), codec.bind(SAMPLE_LAYOUT)
    if bound.two_trips:
        from edgetrain.codecs.lowrank import BoundTwoTrips

        assert isinstance(bound, BoundTwoTrips)
        factors = bound.factors()
        left = factors.left(vector)
        trips = [left, factors.right(left)]
    else:
        trips = [vector]
    return vector.nbytes / sum(len(payload) for trip in trips for payload in bound.encode(trip))
