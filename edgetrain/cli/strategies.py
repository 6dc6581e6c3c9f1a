"""`edgetrain strategies`: print the tables of strategies, merge rules and outer rules."""

from __future__ import annotations

import argparse
import json

from edgetrain import extensions
from edgetrain.cli import common
from edgetrain.jobs import choosing
from edgetrain.strategies import TABLE, merging

HELP = "list the ways in which members can exchange what they learn"
ABOUT = (
    "The strategies, merge rules and outer rules that a job can name, what each does, and "
    "where it comes from."
)
EXAMPLES = "example:\n  edgetrain strategies --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_json(parser, "print the table as JSON")


_OF_STRATEGY = (
    "name", "spelling", "contributes", "delays", "corrections", "outer", "local_steps", "weighted",
    "summary", "source",
)  # fmt: skip
_OF_RULE = ("name", "spelling", "weighs", "elementwise", "summary", "source")
_KINDS = ("strategy", "merge rule", "outer rule")
_OF_OUTER = ("name", "spelling", "summary", "source")


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.strategies import outer

    if arguments.json:
        rows = [{key: getattr(row, key) for key in _OF_STRATEGY} for row in TABLE.values()]
        rules = [{key: getattr(rule, key) for key in _OF_RULE} for rule in merging.TABLE.values()]
        outers = [{key: getattr(rule, key) for key in _OF_OUTER} for rule in outer.TABLE.values()]
        own = {kind: names for kind in _KINDS if (names := extensions.names(kind))}
        common.say(
            json.dumps({"strategies": rows, "merge": rules, "outer": outers, "installed": own})
        )
        return 0
    for row in TABLE.values():
        more = f"outer rule {row.outer}; " if row.outer else ""
        common.say(
            f"{row.spelling:10} {row.summary}\n"
            f"{'':10} exchanges {row.contributes}s; {more}{row.source}"
        )
    common.say(
        "\nstrategy=auto chooses by round trip, data and optimizer (docs/how-to/choosing.md):"
    )
    for advice in choosing.TABLE:
        common.say(f"{advice.strategy:10} {advice.when}: {advice.because}")
    common.say("\nhow the hub makes one contribution of many: strategy.merge =")
    for rule in merging.TABLE.values():
        common.say(f"{rule.spelling}\n{'':10} {rule.summary}; {rule.source}")
    common.say("\nwhat it makes of that before it goes to all: strategy.outer =")
    for each in outer.TABLE.values():
        common.say(f"{each.spelling}\n{'':10} {each.summary}; {each.source}")
    for kind in _KINDS:
        if names := extensions.names(kind):
            common.say(f"\nof installed packages, a {kind} each: {', '.join(names)}")
    return 0
