"""edgetrain against the tools its users would otherwise pick, on the same emulated links.

    python benchmarks/peers.py                              edgetrain and PyTorch's own
    python benchmarks/peers.py --network 4g-good --systems ddp,dga
    python benchmarks/peers.py --python flower=~/flower/bin/python

Each system trains the same model (digits) with the same batches and optimizer in eight hosts of
their own, `pace` seconds a step, and its hub (if it has one) in a ninth. All traffic goes through
the network that is emulated, packet by packet; bytes are those of the hosts' interfaces, headers
and acknowledgements included. Each host has the network's round trip to the hub: two members are
two links apart, and systems without a hub see twice that. Time begins when all have met. What is
said is when the first member's model reached the target, and how much sooner than DDP's, where that
did within the limit.

Flower is not installed beside edgetrain by anything here, for it wants other versions of what both
need: make an environment for it (`pip install edgetrain flwr==1.11.1`) and name its Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.fleet import networks
from edgetrain.fleet.networks.emulation import lab
from edgetrain.runs.reports import units

HERE = Path(__file__).resolve().parent
OURS = {
    "sync-sgd": ("strategy=sync-sgd",),
    "fedavg": ("strategy=fedavg", "every={every}"),
    "dga": ("strategy=dga", "every={every}", "delay=auto"),
    "dga topk": ("strategy=dga", "every={every}", "delay=auto", "codec=topk(0.05) | q2"),
}
TORCH = ("ddp", "post-local")
OTHERS = ("flower",)
NAMES = {
    "ddp": "DDP, gloo",
    "post-local": "post-local SGD, gloo",
    "flower": "Flower, FedAvg",
}
LOGGED = ["sh", "-c", 'exec "$@" >"$0/$EDGETRAIN_HOST.log" 2>&1']
"""Followed by a folder and a command: what that says goes into a file of its own."""


@dataclass(frozen=True)
class Found:
    """How one system fared."""

    system: str
    step_s: float | None
    """Seconds per step of the first member, its own time included; None: it did not begin."""
    target_s: float | None
    accuracy: float | None
    sent: float
    """Bytes of each member, a step."""
    received: float
    problem: str = ""


def command(system: str, python: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What a member's host runs."""
    return [
        *LOGGED, str(folder), python, str(HERE / "peer.py"), system, "--folder", str(folder),
        "--steps", str(arguments.steps), "--every", str(arguments.every),
        "--pace", str(arguments.pace), "--seed", str(arguments.seed),
    ]  # fmt: skip


def hub_command(system: str, python: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What the hub's host runs, if anything."""
    if system in OURS:
        keys = [key.format(every=arguments.every) for key in OURS[system]]
        return [
            *LOGGED, str(folder), python, "-m", "edgetrain", "hub", f"members={arguments.members}",
            *keys, "--any-job", "--insecure", "--no-journal", "--bind", "tcp://*:5555", "--runs",
            str(folder),
        ]  # fmt: skip
    if system == "flower":
        return [*command(system, python, folder, arguments), "--hub"]
    return []


def train(system: str, python: str, arguments: argparse.Namespace) -> Found:
    """One system, from start to end."""
    profile = networks.load(arguments.network)
    with tempfile.TemporaryDirectory() as folder:
        member = "edgetrain" if system in OURS else system
        with limit(arguments.limit):
            lab.run(
                [profile] * arguments.members,
                command(member, python, Path(folder), arguments),
                hub_command(system, python, Path(folder), arguments),
                seed=arguments.seed,
            )
        diaries = [read(path) for path in sorted(Path(folder).glob("[0-9]*.jsonl"))]
        if arguments.logs:
            shutil.copytree(folder, arguments.logs / system, dirs_exist_ok=True)
    return judge(system, diaries, arguments)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Whatever runs in it is interrupted then, and ends what it has started."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with suppress(TimeoutError):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(path: Path) -> list[dict[str, Any]]:
    """A member's diary."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def judge(system: str, diaries: list[list[dict[str, Any]]], arguments: argparse.Namespace) -> Found:
    """What the diaries say."""
    problem = ""
    begins = [line["t"] for diary in diaries for line in diary if "begins" in line]
    last = [diary[-1] for diary in diaries if diary and "step" in diary[-1]]
    looks = [line for diary in diaries for line in diary if "accuracy" in line]
    if not looks or len(last) < arguments.members:
        return Found(system, None, None, None, 0.0, 0.0, problem or "it did not begin")
    began, steps = min(begins), looks[-1]["step"]
    reached = [line["t"] - began for line in looks if line["accuracy"] >= arguments.target]
    if not problem and steps < arguments.steps:
        problem = f"stopped after {steps} steps"
    return Found(
        system,
        (looks[-1]["t"] - began) / steps,
        min(reached, default=None),
        looks[-1]["accuracy"],
        sum(line["sent"] / line["step"] for line in last) / len(last),
        sum(line["received"] / line["step"] for line in last) / len(last),
        problem,
    )


def row(found: Found, ddp: Found | None, pace_s: float) -> str:
    """A line of the table."""
    name = NAMES.get(found.system, f"edgetrain {found.system}")
    if found.step_s is None or found.accuracy is None:
        return f"{name:26} {found.problem}"
    at = "never" if found.target_s is None else units.duration(found.target_s)
    sooner = ""
    if ddp is not None and ddp.target_s and found.target_s:
        sooner = f"{ddp.target_s / found.target_s:7.2f}"
    return (
        f"{name:26} {units.duration(found.step_s):>9} {found.step_s / pace_s:6.2f} "
        f"{found.accuracy:8.1%} {at:>8} {sooner:>7} {units.size(found.sent):>9} "
        f"{units.size(found.received):>9}  {found.problem}"
    )


def main() -> None:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--systems", help="separated by ';' (default: all that have a Python)")
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PYTHON")
    parser.add_argument("--network", default="wan-200ms")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=5, help="local steps in a round")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--limit", type=int, default=240, help="seconds for a system, at most")
    parser.add_argument("--logs", type=Path, help="keep what all hosts said in this folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    usual = [*TORCH, *(name for name in OTHERS if name in pythons), *OURS]
    systems = arguments.systems.split(";") if arguments.systems else usual

    def say(text: str) -> None:
        if not arguments.json:
            print(text, flush=True)

    say(
        f"digits, {arguments.members} members, {arguments.network}, {arguments.steps} steps of "
        f"{units.duration(arguments.pace)}; target {arguments.target:.0%}\n"
        f"{'':26} {'a step':>9} {'x pace':>6} {'accuracy':>8} {'target':>8} {'x DDP':>7} "
        f"{'sent':>9} {'received':>9}"
    )
    rows: list[Found] = []
    for system in systems:
        python = str(Path(pythons.get(system, sys.executable)).expanduser())
        rows.append(train(system, python, arguments))
        ddp = next((found for found in rows if found.system == "ddp"), None)
        say(row(rows[-1], ddp, arguments.pace))
    if arguments.json:
        print(json.dumps([found.__dict__ for found in rows]))


if __name__ == "__main__":
    main()
