"""`edgetrain devices`: the catalog of devices whose speed and power are emulated."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common

if TYPE_CHECKING:
    from edgetrain.fleet.devices import Device


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "devices",
        "device profiles: list, show",
        "The boards whose speed and power a job can emulate, each figure with its source.",
        "examples:\n  edgetrain devices list\n  edgetrain devices show raspberry-pi-4b --json",
    )
    verbs = common.add_verbs(parser)
    listing = verbs.add_parser("list", help="all profiles, one a line")
    listing.set_defaults(run=_list)
    show = verbs.add_parser("show", help="one profile, with the source of each figure")
    show.add_argument("name", help="a profile's name, or the path of a .toml file of your own")
    show.set_defaults(run=_show)
    for each in (listing, show):
        each.add_argument("--json", action="store_true", help="print JSON")


def _list(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices

    found = [devices.load(name) for name in devices.names()]
    if arguments.json:
        common.say(json.dumps([dataclasses.asdict(device) for device in found]))
    else:
        common.say("\n".join(map(line, found)))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices

    device = devices.load(arguments.name)
    if arguments.json:
        common.say(json.dumps(dataclasses.asdict(device)))
        return 0
    common.say(line(device))
    if device.name == devices.HOST:
        unknown = "unknown: no sensor, and not a board of the catalog"
        common.say("  speed: its own; steps are not paced")
        common.say(f"  joules: {devices.joules_source(devices.HOST) or unknown}")
    for key, source in device.source.items():
        common.say(f"  {key}: {source}")
    return 0


def line(device: Device) -> str:
    """Return a device as one line, with "-" for unknown figures."""
    gflops = "-" if device.train_gflops is None else f"{device.train_gflops:.1f}"
    watts = "-" if device.load_watts is None else f"{device.load_watts:.1f}"
    return (
        f"{device.name:18} {device.cores:3} cores  {device.memory_bytes / 1e9:6.1f} GB  "
        f"{gflops:>7} Gflop/s  {watts:>6} W  {device.title}"
    )
