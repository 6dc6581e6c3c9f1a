"""`edgetrain devices`: the catalog of devices whose speed and power are emulated."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from edgetrain.cli import common


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "devices",
        "device profiles: list, show",
        "The boards whose speed and power a job can emulate, each figure with its source.",
        "examples:\n  edgetrain devices list\n  edgetrain devices show raspberry-pi-4b --json",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="all profiles, one a line")
    show = verbs.add_parser("show", help="one profile, with the source of each figure")
    show.add_argument("name", help="a profile's name, or the path of a .toml file of your own")
    for each in (listing, show):
        each.add_argument("--json", action="store_true", help="print JSON")
        each.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for."""
    from edgetrain.fleet import devices

    names = devices.names() if arguments.verb == "list" else [arguments.name]
    found = [devices.load(name) for name in names]
    tables = [dataclasses.asdict(device) for device in found]
    if arguments.json:
        common.say(json.dumps(tables if arguments.verb == "list" else tables[0], default=str))
        return 0
    for device in found:
        common.say(
            f"{device.name:18} {device.cores:3} cores  {device.memory_bytes / 1e9:6.1f} GB  "
            f"{device.train_gflops:7.1f} Gflop/s  {device.load_watts:6.1f} W  {device.title}"
        )
    if arguments.verb == "show":
        for key, source in tables[0].get("source", {}).items():
            common.say(f"  {key}: {source}")
    return 0
