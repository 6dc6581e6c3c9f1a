"""How fast the codecs are on this machine, and how small what they send.

    python benchmarks/codecs_speed.py                                   25 M elements: minutes
    python benchmarks/codecs_speed.py --elements 1000000 --kernels avx2

Speed is a ratio to `r += g`, the stream of twelve bytes an element that error feedback cannot do
without, measured between the repetitions of the same run; 1 is the speed of memory. Time is this
thread's CPU time, so that neighbours on the machine disturb little. Nothing here is a timed test:
what is missed is printed as missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from edgetrain.codecs import backend
from edgetrain.codecs.blocks import Planes
from edgetrain.codecs.feedback import Feedback
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.contract import LEVEL_BLOCK
from edgetrain.codecs.sparse import TopK
from edgetrain.codecs.spec import parse
from edgetrain.vectors.vector import Vector, zeros

DENSITIES = (0.001, 0.01, 0.1)
DENSE = ("fp16", "bf16", "int8", "int4", "qsgd(7)", "ternary", "sign", "q2")
COMPARED = (
    *("bf16", "int8", "int4", "ternary", "sign", "q2", "randk(0.01)", "topk(0.1) | q2"),
    *("topk(0.01)", "topk(0.01) | q1", "topk(0.01) | q2", "topk(0.01) | q4", "topk(0.001) | q2"),
)
MESSAGES = 16
GOALS_FROM = 25_000_000
"""Elements for which goals of speed were set: a smaller vector may lie in caches."""
LARGE = 100_000
"""From this many elements on, the bytes of a payload's head are negligible."""

GOALS = {
    "select": {0.001: 0.85, 0.01: 0.85, 0.1: 0.5},
    "encode": {0.001: 0.7, 0.01: 0.55, 0.1: 0.28},
    "numpy": {0.001: 0.3, 0.01: 0.2, 0.1: 0.05},
    "index": {0.001: 1.02, 0.01: 1.02, 0.1: 1.03},
    "hub_ns": 4.0,
    "sign": 0.9,
    "int8": 0.8,
}
"""Goals: ratios to r += g are minima, bits and nanoseconds are maxima."""
GOAL_AVX512_SELECT = 0.7


def judged(row: Row, elements: int) -> Row:
    """The row of a vector of this many elements, without a goal that does not hold for its size."""
    timed = row.unit in ("of r += g", "ns/entry")
    small = elements < (GOALS_FROM if timed else LARGE)
    return replace(row, goal=None) if small else row


@dataclass(frozen=True)
class Row:
    """One measured figure and its goal, if it has one."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass
class Stage:
    """The vectors of a benchmark: the residual to start from, the gradient, and the work copy."""

    elements: int
    repeats: int
    start: Vector = field(init=False)
    gradient: Vector = field(init=False)
    residual: Vector = field(init=False)

    def __post_init__(self) -> None:
        # Aligned as torch's tensors are; NumPy's own arrays may straddle cache lines.
        rng = np.random.default_rng(0)
        self.start, self.gradient = zeros(self.elements), zeros(self.elements)
        self.residual = zeros(self.elements)
        for vector, spread in ((self.start, 0.0), (self.gradient, 0.5)):
            for at in range(0, self.elements, 2**20):
                part = vector[at : at + 2**20]
                part[:] = rng.standard_normal(part.size, np.float32)
                part *= np.exp(spread * rng.standard_normal(part.size, np.float32))

    def ratio(self, work: Callable[[], object]) -> tuple[float, float]:
        """(time of r += g over time of `work`, milliseconds of `work`): medians, interleaved."""
        run, own, stream = kernels.current(), [], []
        for _ in range(self.repeats + 1):
            self.residual[:] = self.start
            own.append(_timed(work))
            stream.append(_timed(lambda: run.stream_add(self.residual, self.gradient)))
        middle = statistics.median(own[1:])  # the first round warms caches and memory
        return statistics.median(stream[1:]) / middle, 1000 * middle


def _timed(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def index_bytes(payload: Any, elements: int, codec: TopK) -> tuple[int, int]:
    """(entries, bytes of the count and the positions) of a part's payload."""
    count = codec.entries(payload, elements)[0].size
    values = 4 * count
    if isinstance(codec.values.codec, Planes):
        planes = codec.values.codec.bits * -(-count // 8)
        values = 4 + 2 * -(-count // LEVEL_BLOCK) + planes if count else 0
    return count, len(payload) - values


def bits_per_index(x: Vector, density: float) -> tuple[float, float]:
    """(bits per index as sent, log2 C(n, k) / k: the bound for arbitrary positions)."""
    codec = TopK(density)
    step, count, size = codec.part_elements, 0, 0
    for i, payload in enumerate(codec.encode(x)):
        entries, size_here = index_bytes(payload, min(step, x.size - i * step), codec)
        count, size = count + entries, size + size_here
    return 8 * size / count, combinations_bits(x.size, count) / count


def combinations_bits(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def selection(stage: Stage) -> Iterator[Row]:
    """Top-k with feedback: selection alone, and the whole encoding."""
    used = backend()
    for density in DENSITIES:
        codec = TopK(density)

        def select(codec: TopK = codec) -> int:
            picked = codec.pick(stage.residual, stage.gradient, zero=True)
            return sum(positions.size for _, positions, _ in picked)

        ratio, ms = stage.ratio(select)
        goal = None if used.name == "numpy" else GOALS["select"][density]  # type: ignore[index]
        if density == 0.1 and used.instructions == "avx512":
            goal = GOAL_AVX512_SELECT
        yield Row(
            f"select + feedback, {density:.1%}", ratio, "of r += g", goal, note=f"{ms:.2f} ms"
        )
    for density in DENSITIES:
        feedback = Feedback(parse(f"topk({density}) | q2"), stage.elements)
        feedback.residual = stage.residual

        def encode(feedback: Feedback = feedback) -> int:
            return sum(map(len, feedback.encode(stage.gradient)))

        ratio, ms = stage.ratio(encode)
        goals = GOALS["numpy" if used.name == "numpy" else "encode"]
        note = f"{ms:.2f} ms"
        yield Row(f"whole encode, {density:.1%}", ratio, "of r += g", goals[density], note=note)  # type: ignore[index]


def dense(stage: Stage, specs: Sequence[str] = DENSE) -> Iterator[Row]:
    """Each dense codec: encoding alone, and with feedback."""
    for spec in specs:
        codec = parse(spec)
        ratio, ms = stage.ratio(lambda codec=codec: codec.encode(stage.gradient))  # type: ignore[misc]
        goal = GOALS.get(spec)
        assert goal is None or isinstance(goal, float)
        if backend().name == "numpy":
            goal = None
        yield Row(f"{spec} encode", ratio, "of r += g", goal, note=f"{ms:.2f} ms")
        ratio, ms = stage.ratio(
            lambda codec=codec: codec.drain(stage.residual, stage.gradient)  # type: ignore[misc]
        )
        yield Row(f"{spec} encode + feedback", ratio, "of r += g", goal, note=f"{ms:.2f} ms")


def positions(stage: Stage) -> Iterator[Row]:
    """Bits per index of uniformly distributed positions."""
    for density in DENSITIES:
        bits, bound = bits_per_index(stage.gradient, density)
        goal = GOALS["index"][density]  # type: ignore[index]
        note = f"{bits:.3f} bits, log2 C(n,k)/k = {bound:.3f}"
        yield Row(f"index, uniform, {density:.1%}", bits / bound, "of bound", goal, True, note)


def hub(stage: Stage) -> Iterator[Row]:
    """Sixteen messages decoded and added up, part by part."""
    codec = parse("topk(0.01) | q2")
    rng = np.random.default_rng(1)
    messages = []
    for _ in range(MESSAGES):
        shift = int(rng.integers(stage.elements))
        messages.append(codec.encode(np.ascontiguousarray(np.roll(stage.gradient, shift))))
    weights, total = [1 / MESSAGES] * MESSAGES, stage.residual
    decoded, entries = [], 0
    for i in range(len(messages[0])):
        part = total[i * codec.part_elements : (i + 1) * codec.part_elements]
        found = [codec.entries(message[i], part.size) for message in messages]  # type: ignore[attr-defined]
        positions = np.concatenate([positions for positions, _ in found])
        order = np.argsort(positions, kind="stable")  # the cheapest: memory is walked once
        values = np.concatenate([values for _, values in found])
        decoded.append((part, positions[order], values[order]))
        entries += positions.size

    def merge() -> None:
        for i in range(len(messages[0])):
            part = total[i * codec.part_elements : (i + 1) * codec.part_elements]
            codec.add_many([message[i] for message in messages], weights, part)

    def add() -> None:
        run = kernels.current()
        for part, positions, values in decoded:
            run.scatter(part, positions, values, weights[0])

    ratio, ms = stage.ratio(merge)
    bound, _ = stage.ratio(add)
    yield Row("hub: decode + add / the add alone", bound / ratio, "times", None, True)
    goal = GOALS["hub_ns"] if backend().name == "c" else None
    assert goal is None or isinstance(goal, float)
    note = f"{ms:.1f} ms, {entries / 1e6:.2f} M entries of {MESSAGES} messages"
    yield Row("hub: decode + add", 1e6 * ms / entries, "ns/entry", goal, True, note)


@dataclass(frozen=True)
class Size:
    """A codec on one vector: times smaller than float32, relative error, speed."""

    codec: str
    times_smaller: float
    error: float
    ratio: float


def sizes(stage: Stage) -> Iterator[Size]:
    """Each codec on the benchmark's gradient, alone for size and error, with feedback for speed."""
    for spec in COMPARED:
        codec = parse(spec)
        payloads = codec.encode(stage.gradient)
        size = sum(map(len, payloads))
        lost, total = 0.0, 0.0
        for i, payload in enumerate(payloads):
            part = stage.gradient[i * codec.part_elements : (i + 1) * codec.part_elements]
            decoded = np.empty_like(part)
            codec.decode(payload, decoded)
            decoded -= part
            lost += float(np.dot(decoded, decoded))
            total += float(np.dot(part, part))
        ratio, _ = stage.ratio(
            lambda codec=codec: codec.drain(stage.residual, stage.gradient)  # type: ignore[misc]
        )
        yield Size(codec.name, 4 * stage.elements / size, math.sqrt(lost / total), ratio)


PARTS: dict[str, Callable[[Stage], Iterator[Row]]] = {
    "select": selection,
    "dense": dense,
    "index": positions,
    "hub": hub,
}

# -- printing ------------------------------------------------------------------------------------


def main() -> int:
    """Measure and print. Returns 0: a missed goal is no error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=25_000_000, help="floats in the vector")
    parser.add_argument("--repeats", type=int, default=9, help="rounds that medians are taken of")
    parser.add_argument("--only", choices=[*PARTS, "sizes"], help="one part of it")
    parser.add_argument("--kernels", default="", help="numpy, portable, avx2, avx512, neon")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    if arguments.elements < 4096 or arguments.repeats < 1:
        parser.error("take at least 4096 elements and 1 repeat")
    with kernels.using(arguments.kernels) if arguments.kernels else nullcontext():
        measure(arguments)
    return 0


def measure(arguments: argparse.Namespace) -> None:
    """Measure what was asked for, and print it."""
    stage, used = Stage(arguments.elements, arguments.repeats), backend()
    say: Callable[[str], None] = (lambda _: None) if arguments.json else print
    say(f"kernels: {used.name} {used.instructions} ({used.reason}) {used.path}")
    say(f"{arguments.elements / 1e6:g} M float32, one thread, medians of {arguments.repeats}\n")
    parts = [PARTS[name](stage) for name in PARTS if arguments.only in (None, name)]
    rows = []
    timed = ((judged(row, arguments.elements) for row in part) for part in parts)
    for part in timed:
        for row in part:
            rows.append(row)
            say(line_of(row))
    if parts and arguments.elements < GOALS_FROM:
        say(f"goals of speed hold from {GOALS_FROM / 1e6:g} M elements: not shown")
    found = list(sizes(stage)) if arguments.only in (None, "sizes") else []
    if found:
        say(f"\n{'codec':<20} {'times smaller':>14} {'error':>8} {'of r += g':>10}")
    for size in found:
        say(f"{size.codec:<20} {size.times_smaller:14.1f} {size.error:8.4f} {size.ratio:10.2f}")
    if arguments.json:
        result = {
            "backend": asdict(used),
            "elements": arguments.elements,
            "rows": [{**asdict(row), "met": row.met} for row in rows],
            "sizes": [asdict(size) for size in found],
        }
        print(json.dumps(result, indent=2))


def line_of(row: Row) -> str:
    """One figure as it is printed, with its goal and whether that is met."""
    verdict = ""
    if row.goal is not None:
        sign = "<=" if row.at_most else ">="
        verdict = f"  goal {sign} {row.goal:g}  {'met' if row.met else 'MISSED'}"
    return f"{row.what:<44} {row.value:9.3f} {row.unit:<9}{verdict:<26} {row.note}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
