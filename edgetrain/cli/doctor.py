"""`edgetrain doctor`: the software and hardware of this machine, and what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import Any

from edgetrain.cli import common


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = common.verb(
        subparsers,
        "doctor",
        "check this machine: software, network interfaces, emulation, codecs, sensors",
        "Say what edgetrain found on this machine and what is missing for which feature.",
        "example:\n  edgetrain doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine and print the findings."""
    found = examine()
    if arguments.json:
        common.say(json.dumps(found))
        return 0
    for topic, value in found.items():
        common.say(f"{topic:12} {value if isinstance(value, str) else ''}".rstrip())
        if isinstance(value, dict):
            for key, inner in value.items():
                common.say(f"  {key:16} {inner}")
    return 0


def examine() -> dict[str, Any]:
    """Return findings by topic."""
    from edgetrain.codecs.kernels.chosen import backend
    from edgetrain.exchange.addresses import interfaces
    from edgetrain.fleet import devices
    from edgetrain.fleet.networks.emulation import probe
    from edgetrain.runs.environment import capture

    environment = capture()
    extras = {"matplotlib": "pictures", "sklearn": "the digits task"}
    missing = {
        name: f"missing, needed for {what}: pip install 'edgetrain[lab]'"
        for name, what in extras.items()
        if importlib.util.find_spec(name) is None
    }
    packets, why_packets = probe.packets_possible()
    netem, why_netem = probe.netem_possible()
    yes = {True: "yes", False: "no"}
    return {
        "machine": {key: value for key, value in environment.items() if key != "packages"},
        "packages": environment.get("packages", {}) | missing,
        "interfaces": {i.address: i.name for i in interfaces() if i.up},
        "emulation": {
            "packet": f"{yes[packets]}: {why_packets}",
            "tc": f"{yes[netem]}: {why_netem}",
            "stream": "yes: needs nothing (approximate)",
        },
        "codecs": {"kernels": backend().sentence},
        "device": {"here": devices.here(), "joules": devices.joules_source("host") or "no sensor"},
    }
