"""`edgetrain devices`: the catalog of devices, and cards for real ones."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.cli import bench, cards, common, desk, remote
from edgetrain.cli.parser import add_verbs
from edgetrain.errors import ConfigError, explain_os_errors

if TYPE_CHECKING:
    from edgetrain.fleet.devices import Device


HELP = "device profiles: list, show; real devices: init, worker, flash, provision, send, …"
ABOUT = (
    "The boards whose speed and power a job can emulate, each figure with its source; and "
    "cards\nthat make such boards members of a fleet."
)
EXAMPLES = """\
examples:
  edgetrain devices list
  edgetrain devices show raspberry-pi-4b --json
  edgetrain devices init cluster.toml --count 8         a file that describes your machines
  edgetrain devices worker --for raspberry-pi-os-13     what they run, as one file
  edgetrain devices flash cluster.toml                  a card for each
  edgetrain devices send job.toml cluster.toml          their next job, no card touched
  edgetrain devices update cluster.toml --at-once 4     their next version; a bad one goes back
  edgetrain devices status cluster.toml                 how each is
  edgetrain devices provision cluster.toml --check      machines that run: what would change
  edgetrain devices bench cluster.toml --save           how fast each is, for simulations
  edgetrain devices inventory cluster.toml              for Ansible: commands, journals, restarts
  edgetrain devices remove cluster.toml pi-3            nothing of edgetrain is left on it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_verbs(parser)
    listing = add("list", _list, "all profiles, one a line")
    show = add("show", _show, "one profile, with the source of each figure")
    show.add_argument("name", help="a profile's name, or the path of a .toml file of your own")
    init = add("init", _init, "write a cluster file with every key explained")
    init.add_argument("path", type=Path, metavar="FILE", nargs="?", default=Path("cluster.toml"))
    init.add_argument("--count", type=int, default=4, metavar="N", help="devices (default: 4)")
    init.add_argument(
        "--profile", default="raspberry-pi-4b", help="their profile (default: %(default)s)"
    )
    init.add_argument("--force", action="store_true", help="write over a file that is there")
    cards.add_verbs(add)
    desk.add_verbs(add)
    remote.add_verbs(add)
    bench.add_verb(add)
    for each in (listing, show):
        common.add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices

    found = [devices.load(name) for name in devices.names()]
    return common.answer(
        arguments, list(map(dataclasses.asdict, found)), "\n".join(map(line, found))
    )


def _show(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices
    from edgetrain.fleet.devices.energy import joules_source

    device = devices.load(arguments.name)
    lines = [line(device)]
    if device.name == devices.HOST:
        unknown = "unknown: no sensor, and not a board of the catalog"
        lines.append("  speed: its own; steps are not paced")
        lines.append(f"  joules: {joules_source(devices.HOST) or unknown}")
    lines += [f"  {key}: {source}" for key, source in device.source.items()]
    return common.answer(arguments, dataclasses.asdict(device), "\n".join(lines))


def _init(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices
    from edgetrain.provisioning.cards.example import example

    if not 1 <= arguments.count <= 10_000:
        raise ConfigError(f"--count {arguments.count}: allowed are 1 to 10000")
    devices.load(arguments.profile)
    if arguments.path.exists() and not arguments.force:
        raise ConfigError(f"{arguments.path} exists already", "--force overwrites it")
    text = example(arguments.path.name, arguments.count, arguments.profile)
    with explain_os_errors(f"cannot write {arguments.path}"):
        arguments.path.write_text(text, encoding="utf-8")
    common.say(
        f"wrote {arguments.path}; next: edit it, then edgetrain devices flash {arguments.path}"
    )
    return 0


def line(device: Device) -> str:
    gflops = "-" if device.train_gflops is None else f"{device.train_gflops:.1f}"
    watts = "-" if device.load_watts is None else f"{device.load_watts:.1f}"
    return (
        f"{device.name:18} {device.cores:3} cores  {device.memory_bytes / 1e9:6.1f} GB  "
        f"{gflops:>7} Gflop/s  {watts:>6} W  {device.title}"
    )
