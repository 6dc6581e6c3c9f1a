"""`edgetrain doctor`: what this machine can do, and the way out where it cannot."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from edgetrain.cli import common
from edgetrain.training.readiness import PURPOSES, checks

HELP = "check this machine: torch, codecs, emulation, memory, disk, keys, network, sensors"
ABOUT = "Say what this machine can do, and the way out where it cannot."
EXAMPLES = """\
examples:
  edgetrain doctor                     everything
  edgetrain doctor --for member        what a device of a fleet needs
  edgetrain doctor --for hub --json

Each line says yes, no or limited, and what to do. The exit status is 1 if something is missing that
--for needs (without --for: that any of them needs to run at all). Nothing is changed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for", dest="purpose", choices=PURPOSES, default="", help="look at what this needs"
    )
    common.add_keys(parser)
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.runs.environment import capture

    machine, found, is_lacking = capture(), [], False
    if not arguments.json:
        parts = [machine.get("board") or machine.get("cpu") or machine.get("machine") or "machine"]
        parts.append(f"{machine.get('usable_cores')} of {machine.get('cores')} cores")
        if machine.get("memory_bytes"):
            parts.append(f"{machine['memory_bytes'] / 1e9:.1f} GB")
        parts += [f"Python {machine.get('python')}", f"edgetrain {machine.get('edgetrain')}"]
        common.say(", ".join(map(str, parts)))
    for check in checks(arguments.runs, keys_folder(arguments.keys), arguments.purpose):
        found.append(asdict(check))
        # Without --for, what only private runs need is no fault of a machine.
        matters = arguments.purpose or check.purposes != ("private",)
        is_lacking |= check.verdict == "no" and bool(matters)
        if not arguments.json:
            line = f"{check.verdict:8} {check.name:13} {check.said}"
            common.say(line + (f"\n{'':22} {check.way_out}" if check.way_out else ""))
    if arguments.json:
        common.say(json.dumps({"machine": machine, "checks": found}))
    return int(is_lacking)
