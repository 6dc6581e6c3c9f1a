"""`edgetrain bench`: how fast the parts are on this machine."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.codecs.bench import Row, Size

_CODECS = """\
`edgetrain bench codecs`: how fast the codecs are, and how small.

Speed is told as a ratio to `r += g`, the stream of twelve bytes an element that error feedback
cannot do without, measured between the repetitions of the same run; time is this thread's CPU time,
so that neighbours on the machine disturb little. A ratio of 1 is the speed of memory. Nothing
here is a timed test: what is missed is printed as missed.
"""
PARTS = ("select", "dense", "index", "hub")
"""What can be measured on its own; "sizes" is the table at the end."""


def add_parser(subparsers: Any) -> None:
    """Add the verb. What it measures brings its own arguments, once it is asked for."""
    parser = common.verb(
        subparsers,
        "bench",
        "measure the codecs on this machine",
        "Measure parts of edgetrain on this machine, as ratios to the speed of memory.",
        "examples:\n  edgetrain bench codecs --help\n"
        "  edgetrain bench codecs --elements 1000000 --picture codecs.png\n",
    )
    parser.add_argument("what", choices=["codecs"], help="what to measure")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments (--help)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Parse the arguments of what is to be measured, and measure it."""
    parser = argparse.ArgumentParser(prog="edgetrain bench")
    codecs = parser.add_subparsers(required=True).add_parser(
        "codecs",
        help="how fast the codecs are, and how small",
        description=_CODECS,
        epilog="example:\n  edgetrain bench codecs --elements 1000000 --picture codecs.png\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_codecs_arguments(codecs)
    return bench_codecs(parser.parse_args([arguments.what, *arguments.rest]))


def add_codecs_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `edgetrain bench codecs`."""
    parser.add_argument("--elements", type=int, default=25_000_000, help="floats in the vector")
    parser.add_argument("--repeats", type=int, default=9, help="rounds that medians are taken of")
    parser.add_argument("--only", choices=[*PARTS, "sizes"], help="one part of it")
    parser.add_argument("--kernels", default="", help="numpy, portable, avx2, avx512, neon")
    parser.add_argument("--gradients", type=Path, action="append", default=[], help=".npz files")
    parser.add_argument("--picture", type=Path, help="write size against error and speed here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def bench_codecs(arguments: argparse.Namespace) -> int:
    """Measure, print and, where asked, draw. Returns 0: a missed goal is no error."""
    from edgetrain.codecs.kernels import chosen as kernels

    if arguments.elements < 4096 or arguments.repeats < 1:
        raise ConfigError(
            f"{arguments.elements} elements in {arguments.repeats} repeats say nothing",
            "take at least 4096 elements and 1 repeat",
        )
    with kernels.using(arguments.kernels) if arguments.kernels else nullcontext():
        return _bench_codecs(arguments)


def _bench_codecs(arguments: argparse.Namespace) -> int:
    from edgetrain.codecs import backend, bench

    stage, used = bench.Stage(arguments.elements, arguments.repeats), backend()
    say = (lambda _: None) if arguments.json else common.say
    say(f"kernels: {used.name} {used.instructions} ({used.reason}) {used.path}")
    say(f"{arguments.elements / 1e6:g} M float32, one thread, medians of {arguments.repeats}\n")
    parts = [bench.PARTS[name](stage) for name in PARTS if arguments.only in (None, name)]
    rows = []
    timed = ((bench.judged(row, arguments.elements) for row in part) for part in parts)
    for measured in [*timed, *(bench.gradients(path) for path in arguments.gradients)]:
        for row in measured:
            rows.append(row)
            say(line_of(row))
    if parts and arguments.elements < bench.GOALS_FROM:
        say(f"goals of speed hold from {bench.GOALS_FROM / 1e6:g} M elements: not shown")
    sizes = list(bench.sizes(stage)) if arguments.only in (None, "sizes") else []
    if sizes:
        say(f"\n{'codec':<20} {'times smaller':>14} {'error':>8} {'of r += g':>10}")
    for size in sizes:
        say(f"{size.codec:<20} {size.times_smaller:14.1f} {size.error:8.4f} {size.ratio:10.2f}")
    if arguments.json:
        result = {
            "backend": asdict(used),
            "elements": arguments.elements,
            "rows": [{**asdict(row), "met": row.met} for row in rows],
            "sizes": [asdict(size) for size in sizes],
        }
        common.say(json.dumps(result, indent=2))
    if arguments.picture and sizes:
        _draw(sizes, arguments.picture)
        say(f"\nwrote {arguments.picture}")
    return 0


def line_of(row: Row) -> str:
    """One figure as it is printed, with its goal and whether that is met."""
    verdict = ""
    if row.goal is not None:
        sign = "<=" if row.at_most else ">="
        verdict = f"  goal {sign} {row.goal:g}  {'met' if row.met else 'MISSED'}"
    return f"{row.what:<44} {row.value:9.3f} {row.unit:<9}{verdict:<26} {row.note}".rstrip()


def _draw(sizes: list[Size], path: Path) -> None:
    from edgetrain.runs.reports.plot.codecs import draw_codecs

    draw_codecs([(size.codec, size.times_smaller, size.error, size.ratio) for size in sizes], path)
