"""`edgetrain bench`: how fast the parts are on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from edgetrain.cli import common


def add_parser(subparsers: Any) -> None:
    """Add the verb. What it measures brings its own arguments, once it is asked for."""
    parser = common.verb(
        subparsers,
        "bench",
        "measure the codecs on this machine",
        "Measure parts of edgetrain on this machine, as ratios to the speed of memory.",
        "example:\n  edgetrain bench codecs --help",
    )
    parser.add_argument("what", choices=["codecs"], help="what to measure")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments (--help)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Hand over."""
    from edgetrain.codecs import bench

    parser = argparse.ArgumentParser(prog="edgetrain bench")
    bench.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args([arguments.what, *arguments.rest])
    return bench.run(parsed)
