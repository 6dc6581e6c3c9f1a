"""`edgetrain bench codecs`: how fast the codecs are, and how small.

Speed is told as a ratio to `r += g`, the stream of twelve bytes an element that error feedback
cannot do without, measured between the repetitions of the same run; time is this thread's CPU time,
so that neighbours on the machine disturb little. A ratio of 1 is the speed of memory. Nothing
here is a timed test: what is missed is printed as missed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgetrain.codecs.blocks import Planes
from edgetrain.codecs.feedback import Feedback
from edgetrain.codecs.kernels import chosen as kernels
from edgetrain.codecs.kernels.contract import LEVEL_BLOCK
from edgetrain.codecs.sparse import TopK
from edgetrain.codecs.spec import parse
from edgetrain.errors import ConfigError
from edgetrain.vectors.vector import Vector, zeros

DENSITIES = (0.001, 0.01, 0.1)
DENSE = ("fp16", "bf16", "int8", "int4", "qsgd(7)", "ternary", "sign", "q2")
COMPARED = (
    *("bf16", "int8", "int4", "ternary", "sign", "q2", "randk(0.01)", "topk(0.1) | q2"),
    *("topk(0.01)", "topk(0.01) | q1", "topk(0.01) | q2", "topk(0.01) | q4", "topk(0.001) | q2"),
)
MESSAGES = 16
LARGE = 100_000
"""Elements from which a payload's few bytes of header say nothing about its positions."""

GOALS = {
    "select": {0.001: 0.85, 0.01: 0.85, 0.1: 0.5},
    "encode": {0.001: 0.7, 0.01: 0.55, 0.1: 0.28},
    "numpy": {0.001: 0.3, 0.01: 0.2, 0.1: 0.05},
    "index": {0.001: 1.02, 0.01: 1.02, 0.1: 1.03},
    "gradients": 0.92,
    "hub_ns": 4.0,
    "sign": 0.9,
    "int8": 0.8,
}
"""What is aimed at: ratios to r += g at least, bits and nanoseconds at most."""
GOAL_AVX512_SELECT = 0.7


@dataclass(frozen=True)
class Row:
    """One measured figure and, where there is one, what it should be."""

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

    def line(self) -> str:
        """The row as it is printed."""
        verdict = ""
        if self.goal is not None:
            sign = "<=" if self.at_most else ">="
            verdict = f"  goal {sign} {self.goal:g}  {'met' if self.met else 'MISSED'}"
        return f"{self.what:<44} {self.value:9.3f} {self.unit:<9}{verdict:<26} {self.note}".rstrip()


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
    """(entries, bytes that say where they are, the count included) of a part's payload."""
    count = codec.entries(payload, elements)[0].size
    values = 4 * count
    if isinstance(codec.values.codec, Planes):
        planes = codec.values.codec.bits * -(-count // 8)
        values = 4 + 2 * -(-count // LEVEL_BLOCK) + planes if count else 0
    return count, len(payload) - values


def bits_per_index(x: Vector, density: float) -> tuple[float, float]:
    """(bits per index as sent, log2 C(n, k) / k: the price of k positions that may be any)."""
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
    """Top-k with feedback, without and with the coding of what is selected."""
    backend = kernels.backend()
    for density in DENSITIES:
        codec = TopK(density)

        def select(codec: TopK = codec) -> int:
            picked = codec.pick(stage.residual, stage.gradient, zero=True)
            return sum(positions.size for _, positions, _ in picked)

        ratio, ms = stage.ratio(select)
        goal = None if backend.name == "numpy" else GOALS["select"][density]  # type: ignore[index]
        if density == 0.1 and backend.instructions == "avx512":
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
        goals = GOALS["numpy" if backend.name == "numpy" else "encode"]
        note = f"{ms:.2f} ms"
        yield Row(f"whole encode, {density:.1%}", ratio, "of r += g", goals[density], note=note)  # type: ignore[index]


def dense(stage: Stage) -> Iterator[Row]:
    """Each dense codec: encoding alone, and with feedback."""
    for spec in DENSE:
        codec = parse(spec)
        ratio, ms = stage.ratio(lambda codec=codec: codec.encode(stage.gradient))  # type: ignore[misc]
        goal = GOALS.get(spec)
        assert goal is None or isinstance(goal, float)
        if kernels.backend().name == "numpy":
            goal = None
        yield Row(f"{spec} encode", ratio, "of r += g", goal, note=f"{ms:.2f} ms")
        ratio, ms = stage.ratio(
            lambda codec=codec: codec.drain(stage.residual, stage.gradient)  # type: ignore[misc]
        )
        yield Row(f"{spec} encode + feedback", ratio, "of r += g", goal, note=f"{ms:.2f} ms")


def positions(stage: Stage) -> Iterator[Row]:
    """Bits per index on positions that may be anywhere."""
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
    entries = 0
    for message in messages:
        for i, payload in enumerate(message):
            elements = min(codec.part_elements, stage.elements - i * codec.part_elements)
            entries += codec.entries(payload, elements)[0].size  # type: ignore[attr-defined]
    weights, total = [1 / MESSAGES] * MESSAGES, stage.residual

    def merge() -> None:
        for i in range(len(messages[0])):
            part = total[i * codec.part_elements : (i + 1) * codec.part_elements]
            codec.add_many([message[i] for message in messages], weights, part)

    _, ms = stage.ratio(merge)
    goal = GOALS["hub_ns"] if kernels.backend().name == "c" else None
    assert goal is None or isinstance(goal, float)
    note = f"{ms:.1f} ms, {entries / 1e6:.2f} M entries of {MESSAGES} messages"
    yield Row("hub: decode + add", 1e6 * ms / entries, "ns/entry", goal, True, note)


def gradients(path: Path) -> Iterator[Row]:
    """Bits per index on gradients that a script made (benchmarks/codecs_gradients.py)."""
    with np.load(path) as arrays:
        names = [name for name in arrays.files if arrays[name].dtype == np.float32]
        for name in sorted(names):
            x = np.ascontiguousarray(arrays[name])
            density = _density_of(name)
            for share in [density] if density else DENSITIES:
                bits, bound = bits_per_index(x, share)
                goal = GOALS["gradients"] if density and x.size >= LARGE else None
                assert goal is None or isinstance(goal, float)
                note = f"{bits:.3f} bits, log2 C(n,k)/k = {bound:.3f}"
                what = f"index, {path.stem} {name}, {share:.1%}"
                yield Row(what, bits / bound, "of bound", goal, True, note)


def _density_of(name: str) -> float | None:
    """The density that an array of error feedback was made with: `feedback_0.01`."""
    return float(name.removeprefix("feedback_")) if name.startswith("feedback_") else None


@dataclass(frozen=True)
class Size:
    """What a codec makes of one vector: how many times smaller, how far off, at what speed."""

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


def add_parser(subparsers: Any) -> None:
    """The arguments of `edgetrain bench codecs`."""
    parser = subparsers.add_parser(
        "codecs",
        help="how fast the codecs are, and how small",
        description=__doc__,
        epilog="example: edgetrain bench codecs --elements 1000000 --picture codecs.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments, for a parser of one's own."""
    parser.add_argument("--elements", type=int, default=25_000_000, help="floats in the vector")
    parser.add_argument("--repeats", type=int, default=9, help="rounds that medians are taken of")
    parser.add_argument("--only", choices=[*PARTS, "sizes"], help="one part of it")
    parser.add_argument("--kernels", default="", help="numpy, portable, avx2, avx512, neon")
    parser.add_argument("--gradients", type=Path, action="append", default=[], help=".npz files")
    parser.add_argument("--picture", type=Path, help="write size against error and speed here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and, where asked, draws. Returns 0: a missed goal is no error."""
    if args.elements < 4096 or args.repeats < 1:
        raise ConfigError(
            f"{args.elements} elements in {args.repeats} repeats say nothing",
            "take at least 4096 elements and 1 repeat",
        )
    if args.kernels:
        with kernels.using(args.kernels):
            return _run(args)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    stage = Stage(args.elements, args.repeats)
    backend, say = kernels.backend(), (lambda _: None) if args.json else print
    say(f"kernels: {backend.name} {backend.instructions} ({backend.reason}) {backend.path}")
    say(f"{args.elements / 1e6:g} M float32, one thread, medians of {args.repeats}\n")
    rows = []
    sources = [part(stage) for name, part in PARTS.items() if args.only in (None, name)]
    for source in [*sources, *(gradients(path) for path in args.gradients)]:
        for row in source:
            rows.append(row)
            say(row.line())
    table = list(sizes(stage)) if args.only in (None, "sizes") else []
    if table:
        say(f"\n{'codec':<20} {'times smaller':>14} {'error':>8} {'of r += g':>10}")
    for entry in table:
        say(f"{entry.codec:<20} {entry.times_smaller:14.1f} {entry.error:8.4f} {entry.ratio:10.2f}")
    if args.json:
        result = {"backend": asdict(backend), "elements": args.elements}
        result["rows"] = [{**asdict(row), "met": row.met} for row in rows]
        result["sizes"] = [asdict(entry) for entry in table]
        print(json.dumps(result, indent=2))
    if args.picture and table:
        draw(table, args.picture)
        say(f"\nwrote {args.picture}")
    return 0


def draw(table: list[Size], path: Path) -> None:
    """Error against size, each point labelled with its codec, the colour being the speed."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    points = axes.scatter(
        [entry.times_smaller for entry in table],
        [entry.error for entry in table],
        c=[entry.ratio for entry in table],
        cmap="viridis",
        s=60,
    )
    for entry in table:
        where = (entry.times_smaller, entry.error)
        axes.annotate(entry.codec, where, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("times smaller than float32")
    axes.set_ylabel("relative error of one payload (feedback brings the rest later)")
    axes.margins(x=0.15)
    figure.colorbar(points, label="speed with feedback, as a share of r += g")
    figure.savefig(path, dpi=150)
