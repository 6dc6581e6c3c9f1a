"""edgetrain against the tools its users would otherwise pick, on the same emulated links.

    python benchmarks/peers.py --install all                torchft, Hivemind, Flower: environments
    python benchmarks/peers.py                              every system that is installed
    python benchmarks/peers.py --task char_lm --network 4g-medium --systems ddp,powersgd,dga-topk
    python benchmarks/peers.py --seeds 0,1,2 --keep results.jsonl --systems ddp
    python benchmarks/peers.py --show results.jsonl         what was kept, as tables

Each system trains the same model with the same batches and optimizer in eight hosts of their own,
`pace` seconds a step at least, and its hub (if it has one) in a ninth. All traffic goes through the
network that is emulated, packet by packet. There are two topologies. In a star every host has the
network's round trip to the hub. Systems without a hub are in a mesh: each host's link has half the
delay, jitter and loss, so that any two are the same round trip apart; with --star they are in the
star, where two members are two links apart.

Figures are medians of the seeds, with the range. A step: seconds of the first member, its own time
included. Target: seconds until the first member's model reached it; time begins when all have met.
Bytes: a member's, at its interface, a step, headers and acknowledgements included. CPU: seconds of
all processes of the second member (the first evaluates), a step. Memory: anonymous and shared pages
of all of its processes at most, less those of `import torch`. Processes: of a member and of the
hub. Lines: a user's code in peer.py, a statement each, and the job's keys. A system that had not
taken all steps within --limit seconds says how many it had taken.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import environments
import lab
import peer
from harness import code_lines, machine
from processes import Peak, memory_bytes

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.fleet import networks
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.runs.reports import units

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class System:
    """One row."""

    title: str
    environment: str = ""
    """Its environment; "": edgetrain's own."""
    packages: tuple[str, ...] = ("torch",)
    keys: tuple[str, ...] = ()
    """Of the hub's job: a system of ours."""
    has_hub: bool = True


SYSTEMS = {
    "ddp": System("DDP, gloo", has_hub=False),
    "ddp-fp16": System("DDP, fp16 hook", has_hub=False),
    "powersgd": System("DDP, PowerSGD hook, rank 1", has_hub=False),
    "post-local": System("post-local SGD, gloo", has_hub=False),
    "torchft": System("torchft, LocalSGD", "torchft", ("torchft", "torch"), has_hub=False),
    "hivemind": System("Hivemind, averaging", "hivemind", ("hivemind", "torch"), has_hub=False),
    "flower": System("Flower, FedAvg", "flower", ("flwr", "torch")),
    "sync-sgd": System("ours: sync-sgd", keys=("strategy=sync-sgd",)),
    "fedavg": System("ours: fedavg", keys=("strategy=fedavg", "local_steps={local_steps}")),
    "dga": System("ours: dga", keys=("strategy=dga", "local_steps={local_steps}", "delay=auto")),
    "dga-topk": System(
        "ours: dga, topk",
        keys=("strategy=dga", "local_steps={local_steps}", "delay=auto", "codec=topk(0.05) | q2"),
    ),
}
SYNCHRONOUS = ("ddp", "ddp-fp16", "powersgd")
OTHERS = ("post-local", "torchft", "hivemind", "flower")
NEVER = math.inf
START_S = 120
"""Seconds that a system may take until its members have met."""
TARGETS = {"digits": 0.97, "char_lm": 2.7}
LOGGED = ["sh", "-c", 'exec "$@" >"$0/$EDGETRAIN_HOST.log" 2>&1']
"""Followed by a folder and a command: what that says goes into a file of its own."""
SETTINGS = ("task", "network", "members", "steps", "local_steps", "pace", "target", "limit", "star")
"""What results have in common that stand in one table."""


@dataclass(frozen=True)
class Found:
    """How one system fared with one seed. A step's figures are None if it did not begin."""

    system: str
    seed: int
    step_s: float | None = None
    target_s: float | None = None
    final: float | None = None
    sent: float | None = None
    received: float | None = None
    cpu_s: float | None = None
    memory_mb: float | None = None
    processes: str = ""
    problem: str = ""


def meshed(profile: Profile) -> Profile:
    """Half a link: two of them, one after the other, are one of the network's."""

    def half(way: Direction) -> Direction:
        burst = way.burst and replace(way.burst, enter_percent=way.burst.enter_percent / 2)
        return replace(
            way, delay_ms=way.delay_ms / 2, jitter_ms=way.jitter_ms / 2,
            loss_percent=way.loss_percent / 2, burst=burst,
        )  # fmt: skip

    if profile.up.delay_trace or profile.down.delay_trace:
        raise ConfigError(f"{profile.name} has a trace of delays, which has no half", "--star")
    return replace(profile, up=half(profile.up), down=half(profile.down))


def command(name: str, folder: Path, arguments: argparse.Namespace, seed: int) -> list[str]:
    """What a member's host runs."""
    system = SYSTEMS[name]
    return [
        *LOGGED, str(folder), environments.python_of(system.environment), str(HERE / "peer.py"),
        "edgetrain" if system.keys else name, "--folder", str(folder), "--task", arguments.task,
        "--steps", str(arguments.steps), "--local-steps", str(arguments.local_steps),
        "--pace", str(arguments.pace), "--seed", str(seed),
    ]  # fmt: skip


def hub_command(name: str, folder: Path, arguments: argparse.Namespace, seed: int) -> list[str]:
    """What the hub's host runs, if anything."""
    if SYSTEMS[name].keys:
        keys = [key.format(local_steps=arguments.local_steps) for key in SYSTEMS[name].keys]
        return [
            *LOGGED, str(folder), sys.executable, "-m", "edgetrain", "hub",
            f"members={arguments.members}", *keys, "--any-job", "--insecure", "--no-journal",
            "--bind", "tcp://*:5555", "--runs", str(folder),
        ]  # fmt: skip
    if name in peer.HUBS:
        return [*command(name, folder, arguments, seed), "--hub"]
    return []


def train(name: str, arguments: argparse.Namespace, seed: int, torch_bytes: int) -> Found:
    """One system, from start to end."""
    profile = networks.load(arguments.network)
    if not (SYSTEMS[name].has_hub or arguments.star):
        profile = meshed(profile)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hub = hub_command(name, folder, arguments, seed)
        mark = {"EDGETRAIN_PEERS": str(folder)}  # in the environment of every host's processes
        with (
            limit(arguments.limit, folder),
            Peak(mark | {"EDGETRAIN_HOST": "2"}) as member,
            Peak(mark | {"EDGETRAIN_HOST": "0"}) as hubs,
        ):
            peer.mark(mark)
            lab.run(
                [profile] * arguments.members, command(name, folder, arguments, seed), hub,
                seed=seed,
            )  # fmt: skip
        diaries = [read(path) for path in sorted(folder.glob("[0-9]*.jsonl"))]
        found = judge(name, seed, diaries, arguments)
        kept = arguments.logs
        if found.step_s is None and kept is None:
            kept = Path(tempfile.mkdtemp(prefix="edgetrain-peers-"))
        if kept:
            shutil.copytree(folder, kept / f"{name}-{seed}", dirs_exist_ok=True)
    if found.step_s is None:
        return replace(found, problem=f"it did not begin, see {kept / f'{name}-{seed}'}")
    return replace(
        found,
        memory_mb=(member.memory_bytes - torch_bytes) / 1e6,
        processes=f"{member.processes}+{hubs.processes}",
    )


@contextmanager
def limit(seconds: int, folder: Path) -> Iterator[None]:
    """Whatever runs in it is interrupted, and ends what it has started: this long after the first
    member's diary begins, or when none has begun after START_S."""
    end, begun = time.monotonic() + START_S, False

    def look(*_: object) -> None:
        nonlocal end, begun
        if not begun and (diary := folder / "0.jsonl").exists() and diary.stat().st_size:
            end, begun = time.monotonic() + seconds, True
        if time.monotonic() > end:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        with suppress(TimeoutError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read(path: Path) -> list[dict[str, Any]]:
    """A member's diary; a last line that is not whole is left out."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def judge(
    name: str, seed: int, diaries: list[list[dict[str, Any]]], arguments: argparse.Namespace
) -> Found:
    """What the diaries say."""
    begins = [line["t"] for diary in diaries for line in diary if "begins" in line]
    last = [diary[-1] for diary in diaries if diary and "step" in diary[-1]]
    looks = [line for diary in diaries for line in diary if "figure" in line]
    if not looks or len(last) < arguments.members:
        return Found(name, seed)
    began, steps = min(begins), looks[-1]["step"]
    wanted = arguments.target
    reached = [
        line["t"] - began
        for line in looks
        if (line["figure"] >= wanted if arguments.task == "digits" else line["figure"] <= wanted)
    ]
    second = diaries[1][-1] if len(diaries) > 1 else diaries[0][-1]
    return Found(
        name,
        seed,
        (looks[-1]["t"] - began) / steps,
        min(reached, default=None),
        looks[-1]["figure"],
        statistics.fmean(line["sent"] / line["step"] for line in last),
        statistics.fmean(line["received"] / line["step"] for line in last),
        second["cpu_s"] / second["step"],
        problem="" if steps >= arguments.steps else f"after {steps} steps",
    )


def heading(settings: dict[str, Any]) -> str:
    """What stands above a table."""
    where = "star (members are two links apart)" if settings["star"] else "mesh"
    return (
        f"\n{settings['task']}, {settings['members']} members, {settings['network']}, "
        f"{settings['steps']} steps of {units.duration(settings['pace'])}, rounds of "
        f"{settings['local_steps']}; target {settings['target']:g}, at most {settings['limit']} s\n"
        f"hub in a star, a round trip from each member; without a hub (*): {where}\n"
        f"{'':28} {'a step':>18} {'to target':>22} {'final':>7} {'sent':>8} {'received':>8} "
        f"{'CPU':>7} {'memory':>7} {'processes':>9} {'lines':>5}"
    )


def row(name: str, found: Sequence[Found]) -> str:
    """A line of the table."""
    system = SYSTEMS[name]
    title = system.title + ("" if system.has_hub else " *")
    good = [each for each in found if each.step_s is not None]
    problems = "; ".join(dict.fromkeys(each.problem for each in found if each.problem))
    if not good:
        return f"{title:28} {problems}"

    def median(key: str) -> float:
        return float(statistics.median(getattr(each, key) for each in good))

    steps = [each.step_s for each in good if each.step_s is not None]
    reached = [each.target_s for each in good if each.target_s is not None]
    at = spread(reached) if len(reached) == len(good) else f"{len(reached)} of {len(good)} did"
    functions = peer.CODE["edgetrain" if system.keys else name]
    return (
        f"{title:28} {spread(steps):>18} {at:>22} {median('final'):7.3f} "
        f"{units.size(median('sent')):>8} {units.size(median('received')):>8} "
        f"{1000 * median('cpu_s'):4.0f} ms {median('memory_mb'):4.0f} MB "
        f"{good[0].processes:>9} {code_lines(functions) + len(system.keys):5}  {problems}"
    )


def spread(seconds: Sequence[float]) -> str:
    """The median of some seconds, and their range."""
    text = units.duration(statistics.median(seconds))
    if len(seconds) < 2:
        return text
    return f"{text} ({units.duration(min(seconds))}-{units.duration(max(seconds))})"


def torch_bytes() -> int:
    """Memory of its own of a process that has imported torch and psutil."""
    code = "import psutil, torch, sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return memory_bytes([process.pid])


def show(path: Path) -> None:
    """Print what was kept: a table for each of the settings."""
    tables: dict[str, dict[str, list[Found]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        rows = tables.setdefault(json.dumps(entry["settings"]), {})
        rows.setdefault(entry["found"]["system"], []).append(Found(**entry["found"]))
    for settings, rows in tables.items():
        print(heading(json.loads(settings)))
        for name in [each for each in SYSTEMS if each in rows]:
            print(row(name, rows[name]))
        print(verdict([each for found in rows.values() for each in found], json.loads(settings)))


def verdict(found: Sequence[Found], settings: dict[str, Any]) -> str:
    """How much sooner than others each dga was at the target: medians, of systems that began."""
    at: dict[str, float] = {}
    for name in dict.fromkeys(each.system for each in found if each.step_s is not None):
        reached = [each.target_s for each in found if each.system == name and each.step_s]
        at[name] = statistics.median(NEVER if each is None else each for each in reached)
    lines = []
    for ours in [name for name in at if name.startswith("dga") and at[name] < NEVER]:
        for what, others in (("synchronous peer", SYNCHRONOUS), ("other peer", OTHERS)):
            best = min((name for name in others if name in at), key=at.__getitem__, default=None)
            if best is None:
                continue
            bound = "" if at[best] < NEVER else "more than "
            times = min(at[best], settings["limit"]) / at[ours]
            lines.append(
                f"{SYSTEMS[ours].title}: {bound}{times:.1f} times sooner than the first {what}"
                + ("" if bound else f", {SYSTEMS[best].title}")
            )
    return "\n".join(lines)


def usual() -> list[str]:
    """The systems whose environment is there."""
    there = {"", *(name for name in environments.known() if environments.is_there(name))}
    return [name for name, system in SYSTEMS.items() if system.environment in there]


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says; ConfigError for what is wrong."""
    parser.add_argument("--systems", help="separated by commas (default: all that are installed)")
    parser.add_argument("--install", metavar="NAMES", help="make environments for these, or all")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--task", choices=list(TARGETS), default="digits")
    parser.add_argument("--network", default="wan-200ms")
    parser.add_argument("--star", action="store_true", help="no mesh for systems without a hub")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--local-steps", type=int, default=5, help="local steps in a round")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--target", type=float, help="an accuracy, or a loss of char_lm")
    parser.add_argument("--limit", type=int, default=120, help="seconds of training, at most")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--logs", type=Path, help="keep what all hosts said in this folder")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add the results to this file")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what was kept there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for pair in arguments.python:
        environments.use(*pair.partition("=")[::2])
    arguments.systems = arguments.systems.split(",") if arguments.systems else usual()
    environments.check(arguments.systems, SYSTEMS)
    for name in arguments.systems:
        environments.python_of(SYSTEMS[name].environment)
    try:
        arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {arguments.seeds}", "whole numbers: 0,1,2") from None
    if arguments.members < 2:
        raise ConfigError(f"--members {arguments.members}", "two or more")
    if arguments.target is None:
        arguments.target = TARGETS[arguments.task]
    networks.load(arguments.network)
    return arguments


def main() -> int:
    """The command; 1 if a system did not begin."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    try:
        arguments = arguments_of(parser)
        if arguments.install:
            environments.install_all(arguments.install.split(","))
            return 0
        if arguments.show:
            show(arguments.show)
            return 0
    except (EdgetrainError, OSError) as refused:
        print(f"peers.py: {refused}", file=sys.stderr)
        return 2
    settings = {key: getattr(arguments, key) for key in SETTINGS}

    def say(text: str) -> None:
        if not arguments.json:
            print(text, flush=True)

    say(machine())
    say(heading(settings))
    base, rows = torch_bytes(), []
    for name in arguments.systems:
        turns = []
        for seed in arguments.seeds:
            turns.append(train(name, arguments, seed, base))
            if arguments.keep:
                entry = {"at": time.time(), "settings": settings, "found": asdict(turns[-1])}
                with arguments.keep.open("a") as file:
                    print(json.dumps(entry), file=file)
        say(row(name, turns))
        rows += turns
    say(verdict(rows, settings))
    for environment, packages in dict.fromkeys(
        (SYSTEMS[name].environment, SYSTEMS[name].packages) for name in arguments.systems
    ):
        say(environments.versions(environment, packages))
    if arguments.json:
        print(json.dumps([asdict(found) for found in rows]))
    return 1 if any(found.step_s is None for found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
