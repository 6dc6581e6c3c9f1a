"""`edgetrain devices bench`: how fast a device trains, measured on it."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.cli.parser import AddVerb
from edgetrain.cli.remote import add_devices, add_ways, reach
from edgetrain.errors import ConfigError

if TYPE_CHECKING:
    from edgetrain.fleet.cluster import DeviceEntry
    from edgetrain.fleet.ssh import SshHost
    from edgetrain.training.bench import MeasuredSpeed

_EXAMPLES = """\
examples:
  edgetrain devices bench                              this machine, in 20 seconds
  edgetrain devices bench cluster.toml                 each device of a cluster
  edgetrain devices bench cluster.toml pi-0 --save     and simulate and plan with what it measured

Times steps of four sizes, copies memory, and reads the power of the whole board where that can be
read. --save keeps the medians of each kind of device as a profile that is taken in place of the
catalog's from then on, by simulations, emulated devices and plans, which say so; the file is named,
and deleting it brings the catalog's back. A device whose member trains is not measured.
"""
_CALL = """\
units="edgetrain-member.service edgetrain-hub.service"
case $(systemctl show $units --property=ActiveState 2> /dev/null) in
  *=active*|*=activating*|*=reloading*)
    echo "its member or hub is at work, and a measurement beside that would be wrong: stop it" \\
      "(there: sudo systemctl stop $units)" >&2
    exit 1;;
esac
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/edgetrain/current \\
  exec python3 -P -m edgetrain devices bench --json --seconds "$1"
"""
_BEFORE_S = 120.0
"""Seconds for the start of a slow device's Python and torch."""


def add_verb(add: AddVerb) -> None:
    bench = add("bench", _bench, "measure how fast devices train", _EXAMPLES)
    add_devices(bench, optional=True)
    bench.add_argument(
        "--seconds", type=float, default=20.0, metavar="S",
        help="that a measurement takes (default: %(default)s)",
    )  # fmt: skip
    bench.add_argument("--save", action="store_true", help="take it in place of the catalog's")
    add_ways(bench)


def _bench(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.seconds <= 3600:
        raise ConfigError(f"--seconds {arguments.seconds:g}: allowed are 1 to 3600")
    if arguments.cluster is None:
        return _here(arguments)
    from edgetrain.files.reading import parse_json
    from edgetrain.fleet import cluster
    from edgetrain.fleet.ssh import on_each
    from edgetrain.training.bench import MeasuredSpeed

    found = cluster.load(arguments.cluster)
    words = ["sh", "-c", _CALL, "sh", f"{arguments.seconds:g}"]

    def work(item: tuple[DeviceEntry, SshHost]) -> tuple[MeasuredSpeed | None, str]:
        answer = remote.run(item[1], words, seconds=_BEFORE_S + 3 * arguments.seconds)
        try:
            speed = MeasuredSpeed(**parse_json(answer.stdout or b"{}"))
            return speed, _line(speed)
        except (ValueError, TypeError):
            return None, f"FAILED   {answer.why or 'its worker has no bench: update it'}"

    with reach(arguments, found, keeps=False) as (remote, devices):
        answers = on_each(devices, work, lambda _, why: (None, f"FAILED   {why}"))
    shown: list[str] = []
    plain: list[dict[str, Any]] = []
    kinds: dict[str, list[tuple[str, MeasuredSpeed]]] = {}
    for (device, _), (speed, line) in zip(devices, answers, strict=True):
        shown.append(f"{device.name:16} {line}")
        plain.append({"name": device.name, "profile": device.profile, "why": line})
        if speed is not None:
            plain[-1] |= {"why": "", **dataclasses.asdict(speed)}
            kinds.setdefault(device.profile, []).append((device.name, speed))
    if arguments.save:
        shown += [_save(kind, each) for kind, each in kinds.items()]
    common.answer(arguments, plain, "\n".join(shown))
    return int(not all(speed for speed, _ in answers))


def _here(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet import devices
    from edgetrain.training.bench import measure

    board = devices.here()
    if arguments.save and not board:
        raise ConfigError(
            "--save: this machine is not a board of the catalog",
            "write its figures into a file (docs/reference/devices.md), and name that as device",
        )
    speed = measure(arguments.seconds)
    lines = [_line(speed)] + ([_save(board, [("this machine", speed)])] if arguments.save else [])
    return common.answer(arguments, dataclasses.asdict(speed), "\n".join(lines))


def _line(speed: MeasuredSpeed) -> str:
    watts = [speed.idle_watts, speed.load_watts]
    idle, load = ("-" if value is None else f"{value:.1f}" for value in watts)
    return (
        f"{speed.dispatch_s * 1e6:6.0f} us a call  {speed.train_gflops:8.1f} Gflop/s  "
        f"{speed.memory_gbyte_s:6.1f} GB/s  {idle:>6} W idle  {load:>6} W busy"
    )


def _save(kind: str, measured: list[tuple[str, MeasuredSpeed]]) -> str:
    from edgetrain.files.toml import parse_toml, to_toml
    from edgetrain.fleet import devices
    from edgetrain.training.bench import profile

    if kind.endswith(".toml"):
        return f"{kind}: not kept, since it is a file of your own: put them into that"
    base = devices.load(kind)
    path = devices.measured_path(kind)
    who = f"{', '.join(name for name, _ in measured)}, {time.strftime('%Y-%m-%d')}"
    text = to_toml(profile(base, [speed for _, speed in measured], who))
    devices.parse(kind, parse_toml(text), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"{kind}: measured figures are taken in place of the catalog's; they are in {path}"
