"""`edgetrain networks list | show | check | apply | clear`: emulated networks.

Pure functions make the text; the verbs print it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgetrain.cli import common
from edgetrain.cli.parser import add_verbs
from edgetrain.errors import ConfigError, NetworkError

if TYPE_CHECKING:
    from edgetrain.fleet.networks.emulation.check import Finding
    from edgetrain.fleet.networks.profile import Direction, Profile

_BACKENDS = ("auto", "packet", "tc", "stream")
HELP = "emulated networks: list, show, check, apply, clear"
ABOUT = "Emulated networks: their profiles, how true they are here, and on a real interface."
EXAMPLES = """\
examples:
  edgetrain networks list
  edgetrain networks show starlink
  edgetrain networks check wan-200ms 4g-bad
  edgetrain networks apply wan-200ms --dev eth0 --port 5555 --for 10m
  edgetrain networks clear --dev eth0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_verbs(parser)

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser:
        about = f"{text[0].upper()}{text[1:]}."
        return add(name, run, text, f"example:\n  edgetrain networks {example}", about)

    text = "show a profile and the source of each figure"
    listing = verb("list", _run_list, "list the network profiles", "list --json")
    show = verb("show", _run_show, text, "show starlink")
    show.add_argument("name", help="a profile, rtt-<ms>ms, or the path of a .toml file")
    text = "measure profiles on this machine: target, measured, error"
    check = verb("check", _run_check, text, "check wan-200ms 4g-bad --backend packet")
    check.add_argument("names", nargs="*", metavar="NAME", help="profiles (default: all)")
    check.add_argument("--backend", choices=_BACKENDS, default="auto")
    check.add_argument("--seconds", type=float, default=4.0, help="per figure (default: 4)")
    for each in (listing, show, check):
        common.add_json(each, "answer in JSON")
    text = "shape a real interface, only the job's ports, with a dead man's switch"
    example = "apply wan-200ms --dev eth0 --port 5555 --for 10m --dry-run"
    apply = verb("apply", _run_apply, text, example)
    apply.add_argument("name", help="a profile")
    apply.add_argument("--dev", required=True, help="the interface")
    apply.add_argument("--port", type=int, action="append", default=[], help="a TCP port to shape")
    apply.add_argument("--for", dest="time", default="10m", help="how long: 90s, 10m, 2h")
    apply.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    apply.add_argument("--hold", action="store_true", help="stay, and put back when this ends")
    clear = verb("clear", _run_clear, "put a shaped interface back now", "clear --dev eth0")
    clear.add_argument("--dev", required=True, help="the interface")


def _run_list(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet.networks import profile
    from edgetrain.fleet.networks.emulation import probe

    profiles = [profile.load(name) for name in profile.names()]
    if arguments.json:
        common.say(json.dumps([summary(p) for p in profiles], indent=2))
    else:
        headings = ("network", "rtt ms", "jitter", "up Mbit/s", "down", "loss %", "what it is")
        rows: list[tuple[str, ...]] = [headings]
        for p in profiles:
            rates = (f"{w.mean_rate_mbit:g}" if w.mean_rate_mbit else "-" for w in (p.up, p.down))
            figures = (f"{p.rtt_ms:g}", f"{p.up.jitter_ms:g}", *rates)
            rows.append((p.name, *figures, f"{p.up.mean_loss_percent:.2g}", p.title))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            common.say("  ".join(cells).rstrip())
        common.say("Any round trip: rtt-<ms>ms, as rtt-120ms. No emulation: none.")
        possible, how = probe.packets_possible()
        common.say(f"Here: {'packet' if possible else 'stream'} ({how}).")
    return 0


def summary(p: Profile) -> dict[str, Any]:
    return {
        "name": p.name,
        "title": p.title,
        "rtt_ms": p.rtt_ms,
        "up": dataclasses.asdict(p.up),
        "down": dataclasses.asdict(p.down),
        "source": dict(p.source),
    }


def _run_show(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet.networks import profile

    shown = profile.load(arguments.name)
    text = json.dumps(summary(shown), indent=2) if arguments.json else "\n".join(describe(shown))
    common.say(text)
    return 0


def describe(p: Profile) -> list[str]:
    lines = [f"{p.name}: {p.title}", f"  round trip {p.rtt_ms:g} ms"]
    lines += [f"  {name:5}{_figures(way)}" for name, way in (("up", p.up), ("down", p.down))]
    return lines + [f"  source of {key}: {text}" for key, text in p.source.items()]


def _figures(way: Direction) -> str:
    words = [f"delay {way.mean_delay_ms:g} ms"]
    if way.jitter_ms:
        words[0] += f" ± {way.jitter_ms:g} ms ({way.distribution})"
    if way.mean_rate_mbit:
        traced = " (mean of a trace)" if way.rate_trace else ""
        words.append(f"rate {way.mean_rate_mbit:g} Mbit/s{traced}")
        words.append(f"queue {way.queue_bytes / 1000:g} kB")
    if way.mean_loss_percent:
        kind = " in bursts" if way.burst else ""
        words.append(f"loss {way.mean_loss_percent:.3g} %{kind}")
    for key in ("reorder_percent", "duplicate_percent", "corrupt_percent"):
        if getattr(way, key):
            words.append(f"{key.removesuffix('_percent')} {getattr(way, key):g} %")
    if not way.slow_start_after_idle:
        words.append("windows kept over pauses")
    if way.first_window:
        words.append(f"first window {way.first_window} segments")
    if way.receive_kb:
        words.append(f"receive buffer {way.receive_kb:g} kB")
    return ", ".join(words)


def _run_check(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet.networks import profile
    from edgetrain.fleet.networks.emulation import probe
    from edgetrain.fleet.networks.emulation.check import as_json, check

    names = arguments.names or profile.names()
    chosen = [profile.load(name) for name in names]
    backend, reason = probe.choose(arguments.backend, chosen)
    if not arguments.json:
        common.say(f"backend {backend}: {reason}")
    found: list[Finding] = []
    for p in chosen:
        for finding in check(p, backend, arguments.seconds):
            found.append(finding)
            if not arguments.json:
                common.say(finding_line(finding))
    if arguments.json:
        facts = {"backend": backend, "reason": reason}
        common.say(json.dumps({**facts, "findings": [as_json(f) for f in found]}, indent=2))
    return 0 if all(f.good for f in found) else 1


def finding_line(f: Finding) -> str:
    mark = ("ok " if f.good else "OFF") if f.judged else "?  "
    note = f"  ({f.note})" if f.note else ""
    return (
        f"{mark} {f.network:20} {f.figure:11} target {f.target:9.3f} {f.unit:6} "
        f"measured {f.measured:9.3f}  error {f.error}{note}"
    )


def _run_apply(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet.networks.emulation import guard

    seconds = parse_time(arguments.time)
    shaping = guard.shaping(arguments.dev, arguments.name, arguments.port)
    if arguments.dry_run:
        common.say("\n".join(shlex.join(command) for command in shaping.commands()))
        common.say("# to restore it:")
        common.say("\n".join(shlex.join(command) for command in shaping.undo()))
        return 0
    if not shaping.commands():
        raise NetworkError(f"network '{arguments.name}' does not change traffic", "choose another")
    owner = os.getpid() if arguments.hold else 0
    pid = guard.apply(shaping, guard.ShapingLimits(seconds, owner=owner))
    ports = ", ".join(map(str, shaping.ports))
    common.say(
        f"{arguments.dev}: TCP port {ports} is on {arguments.name} for {seconds:g} s; process "
        f"{pid} restores it, or `edgetrain networks clear --dev {arguments.dev}`"
    )
    if arguments.hold:  # until the time is over or Ctrl-C, and also after an error
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            common.say("")
        finally:
            guard.clear(arguments.dev)
        common.say(f"{arguments.dev} is restored")
    return 0


def _run_clear(arguments: argparse.Namespace) -> int:
    from edgetrain.fleet.networks.emulation import guard

    if guard.clear(arguments.dev):
        common.say(f"{arguments.dev} is restored")
    else:
        common.say(f"edgetrain has not shaped {arguments.dev}")
    return 0


def parse_time(text: str) -> float:
    """Return the seconds of "90s", "10m", "2h" or "90". ConfigError outside 1 s to 24 h.

    >>> parse_time("10m")
    600.0
    """
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"time '{text}' is out of range", "allowed: 1s to 24h, as 90s, 10m, 2h")
    return seconds
