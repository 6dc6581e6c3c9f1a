"""What an exchange costs a member whose rounds touch few rows of a large embedding.

A step touches a few thousand rows of the parameters; the member submits what it did, encoded with
a sparse codec, and takes a reply of as many rows, all without a network: the strategy's half, the
codec, the pool. Time is this thread's CPU time and is told as a multiple of `r += g` over a vector
of that length, measured in between; the goal is at most 10.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from harness import Measured, measure

from edgetrain import codecs
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector, zeros

ROWS, WIDTH, TOUCHED = 2_000_000, 16, 3000
ROUNDS = 7


class Exchange:
    """A member's half and what it exchanges with nobody."""

    def __init__(self, delay: int) -> None:
        """`delay`: rounds in flight."""
        elements, self.rng = ROWS * WIDTH, np.random.default_rng(0)
        self.codec, self.pool = codecs.parse("topk(0.01) | q2"), VectorPool(elements)
        self.params, self.gradient = zeros(elements), zeros(elements)
        self.params[:] = self.rng.standard_normal(elements, np.float32)
        self.half = Displacement(self.params, 1, delay, self.pool)
        self.rows = self.rng.choice(ROWS, TOUCHED, replace=False)
        for _ in range(delay + 1):  # until every round has a reply, and memory is warm
            self.round()

    def round(self) -> dict[str, float]:
        """Train, submit, take the oldest reply; what each part of it cost."""
        step = 0.01 * self.rng.standard_normal((TOUCHED, WIDTH)).astype(np.float32)
        self.params.reshape(-1, WIDTH)[self.rows] += step
        spent: dict[str, float] = {}
        own = timed(spent, "displacement", self.half.after_step)
        payloads = timed(spent, "encode", self.codec.encode, own)
        sent = timed(spent, "what was sent", self.decoded, payloads)
        timed(spent, "noted as sent", self.half.sent, sent)
        if self.half.due() is not None:
            reply = timed(spent, "reply decoded", self.decoded, payloads)
            timed(spent, "reply applied", self.half.apply, [reply])
            del reply
        timed(spent, "r += g", kernels.current().stream_add, own, self.gradient)
        unit = spent.pop("r += g")
        parts = {f"{what}, ms": 1000 * seconds for what, seconds in spent.items()}
        return {**parts, "an exchange, times r += g": sum(spent.values()) / unit}

    def decoded(self, payloads: list[Buffer]) -> Vector:
        """What the others see of it."""
        out = self.pool.borrow_vector()
        part = self.codec.part_elements
        for i, payload in enumerate(payloads):
            self.codec.decode(payload, out[i * part : (i + 1) * part])
        return out


def timed(spent: dict[str, float], what: str, work: Callable[..., Any], *given: object) -> Any:
    """Note the CPU seconds of a call."""
    before = time.thread_time()
    result = work(*given)
    spent[what] = time.thread_time() - before
    return result


def measured() -> Iterator[Measured]:
    """With no round in flight, and with four."""
    for delay in (0, 4):
        yield measure(f"{ROWS:,} x {WIDTH}, delay {delay}", Exchange(delay).round, ROUNDS)
