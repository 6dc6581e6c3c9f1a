"""`edgetrain codecs`: the table of codecs."""

from __future__ import annotations

import argparse
import json

from edgetrain import extensions
from edgetrain.cli import common

HELP = "list the ways in which vectors can be compressed, and by how much"
ABOUT = (
    "The codecs that a job can name (strategy.codec, strategy.reply_codec), what each sends,\n"
    "and how many times fewer bytes than float32 that is."
)
EXAMPLES = """\
examples:
  edgetrain codecs --json
  edgetrain run strategy=dga codec="topk(0.01) | q2"

One codec may code what another keeps: "topk(0.01) | q2". Different tensors may have different
codecs: "small(1024): fp32; *.bias: bf16; topk(0.01) | q2". Details: docs/reference/codecs.md;
`python benchmarks/codecs_speed.py`, in the repository, measures speed and error on this machine.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_json(parser, "print the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.codecs import parse, table

    rows = [*table.TABLE.values(), table.CHAIN]
    ratios = [table.ratio(parse(row.example)) for row in rows]
    if arguments.json:
        keys = ("spelling", "example", "summary", "exact")
        listed = [
            {**{key: getattr(row, key) for key in keys}, "ratio": round(ratio, 3)}
            for row, ratio in zip(rows, ratios, strict=True)
        ]
        own = extensions.names("codec")
        common.say(
            json.dumps({"codecs": listed, "ratios_of": table.SAMPLE_WORDS, "installed": own})
        )
        return 0
    common.say(f"{'ratio':>7}  {'for example':15}  codec")
    for row, ratio in zip(rows, ratios, strict=True):
        mark = " " if row.exact else "*"
        common.say(f"{ratio:6.1f}{mark}  {row.example:15}  {row.spelling}: {row.summary}")
    common.say(
        "\nratio: bytes of float32 / bytes sent, each way, of the example, for a vector of\n"
        f"{table.SAMPLE_WORDS}; * measured, else exact"
    )
    if own := extensions.names("codec"):
        common.say(f"\nof installed packages: {', '.join(own)}")
    return 0
