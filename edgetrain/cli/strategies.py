"""`edgetrain strategies`: the table of strategies."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from edgetrain.cli import common
from edgetrain.strategies import TABLE


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "strategies",
        "list the ways in which members can exchange what they learn",
        "The strategies a job can name, what each does, and where it comes from.",
        "example:\n  edgetrain strategies --json",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.json:
        common.say(json.dumps([dataclasses.asdict(row) for row in TABLE.values()]))
        return 0
    for row in TABLE.values():
        common.say(
            f"{row.name:10} {row.summary}\n{'':10} exchanges {row.contributes}s; {row.source}"
        )
    return 0
