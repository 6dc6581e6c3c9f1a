"""What an exchange costs a member whose rounds touch few rows of a large embedding.

    python benchmarks/untouched.py
    python benchmarks/untouched.py --rows 500000 --width 64 --delay 0

A step touches a few thousand rows of the parameters; the member submits what it did, encoded with
a sparse codec, and takes a reply of as many rows, all without a network: the strategy's half, the
codec, the pool. Time is this thread's CPU time and is told as a multiple of `r += g` over a vector
of that length, measured in between; the goal is at most 10.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from edgetrain import codecs
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.strategies.displacement import Displacement
from edgetrain.vectors.pool import VectorPool
from edgetrain.vectors.vector import Buffer, Vector, zeros

GOAL = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--touched", type=int, default=3000, help="rows that training changes")
    parser.add_argument("--delay", type=int, default=1, help="rounds in flight")
    parser.add_argument("--codec", default="topk(0.01) | q2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    elements, rng = args.rows * args.width, np.random.default_rng(0)
    codec, pool = codecs.parse(args.codec), VectorPool(elements)
    params, gradient = zeros(elements), zeros(elements)
    params[:] = rng.standard_normal(elements, np.float32)
    half = Displacement(params, 1, args.delay, pool)
    seconds: dict[str, list[float]] = defaultdict(list)
    rows = rng.choice(args.rows, args.touched, replace=False)
    for round in range(args.rounds + args.delay):
        step = 0.01 * rng.standard_normal((args.touched, args.width)).astype(np.float32)
        params.reshape(-1, args.width)[rows] += step
        spent: dict[str, float] = {}
        own = timed(spent, "displacement", half.after_step)
        assert own is not None
        payloads = timed(spent, "encode", codec.encode, own)
        sent = timed(spent, "what was sent", decoded, codec, payloads, pool)
        timed(spent, "noted as sent", half.sent, sent)
        if half.due() is not None:
            reply = timed(spent, "reply decoded", decoded, codec, payloads, pool)
            timed(spent, "reply applied", half.apply, [reply])
            del reply
        timed(spent, "r += g", kernels.current().stream_add, own, gradient)
        del own, sent
        if round >= args.delay + 1:
            for what, s in spent.items():
                seconds[what].append(s)
    middle = {what: statistics.median(s) for what, s in seconds.items()}
    unit = middle.pop("r += g")
    for what, s in middle.items():
        print(f"{what:<16}{1000 * s:9.1f} ms {s / unit:7.2f} x r += g")
    total = sum(middle.values()) / unit
    verdict = "met" if total <= GOAL else "MISSED"
    print(f"{'an exchange':<16}{1000 * total * unit:9.1f} ms {total:7.2f} x r += g  {verdict}")
    return 0


def timed(spent: dict[str, float], what: str, work: Callable[..., Any], *given: object) -> Any:
    before = time.thread_time()
    result = work(*given)
    spent[what] = time.thread_time() - before
    return result


def decoded(codec: codecs.Codec, payloads: list[Buffer], pool: VectorPool) -> Vector:
    out = pool.borrow_vector()
    for i, payload in enumerate(payloads):
        codec.decode(payload, out[i * codec.part_elements : (i + 1) * codec.part_elements])
    return out


if __name__ == "__main__":
    sys.exit(main())
