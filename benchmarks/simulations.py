"""One federated job in edgetrain's simulator and in Flower's, on this machine.

    python benchmarks/peers.py --install flower             once: an environment for Flower and Ray
    python benchmarks/simulations.py                        100 and 1,000 members
    python benchmarks/simulations.py --members 100 --systems edgetrain,flower

FedAvg of digits: all members take part in each of --rounds rounds of --local-steps steps of plain
SGD, with the same batches, and no network. Each system runs twice, for one round and for one more
than --rounds, all as a process of its own that this one waits for: a round is the difference
divided by --rounds, start and end are the rest of the shorter run. CPU seconds are those of all
processes, also of daemons. Memory is the most that all of them had at a time (processes.py). Lines
are those of SYSTEMS' functions, a statement each. Systems take turns, --repeats times; a figure is
the median, with its range.

Exit status 1 if the final accuracies differ by more than one held-out image: then the systems did
not train the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments
import flower_simulation
from flower_simulation import BATCH, RATE, SEED, SHARD
from harness import code_lines, machine, ranged
from processes import Marked, Peak

from edgetrain.errors import EdgetrainError

HERE = Path(__file__).resolve().parent
LIMIT_S = 400
"""For one run."""
HELD_OUT = 359
"""Images of digits that are held out."""
_SUBREAPER = 36
"""prctl's number for: orphans among my descendants are my children, so that I can wait for them."""


def edgetrain_simulation(members: int, rounds: int, local_steps: int) -> float:
    """The final accuracy, by edgetrain."""
    import edgetrain

    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, Any] = {"data.partition": f"shared({SHARD})", "optimizer.momentum": 0.0}
        run = edgetrain.simulate(
            runs=folder, progress=False, members=members, network="none", pace_s=1.0,
            strategy="fedavg", local_steps=local_steps, steps=rounds * local_steps, batch=BATCH,
            seed=SEED, evaluate_every=rounds * local_steps,
            lr=RATE, **keys,
        )  # fmt: skip
        return float(run.summary["final"]["accuracy"])


@dataclass(frozen=True)
class System:
    """One simulator."""

    environment: str
    packages: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    """A user's code; the first is called."""


SYSTEMS = {
    "edgetrain": System("", ("edgetrain", "torch"), (edgetrain_simulation,)),
    "flower": System(
        "flower",
        ("flwr", "ray", "torch"),
        (flower_simulation.simulate, flower_simulation.client, flower_simulation.data),
    ),
}


def train(system: str, members: int, rounds: int, local_steps: int) -> dict[str, float]:
    """One run in a process of its own: seconds, CPU seconds and memory of all its processes.
    SubprocessError if it fails, or takes LIMIT_S."""
    words = [
        system,
        "--members",
        str(members),
        "--rounds",
        str(rounds),
        "--local-steps",
        str(local_steps),
    ]
    environment = SYSTEMS[system].environment
    found, answer = watched(
        environment, [__file__, "--systems", *words], f"simulation-{system}", LIMIT_S
    )
    return {**found, **json.loads(answer)}


def watched(
    environment: str, words: Sequence[str], name: str, limit_s: float
) -> tuple[dict[str, float], bytes]:
    """What a script took, run with `--answer FILE` in an environment: seconds, CPU seconds and
    memory of all its processes; and its answer. SubprocessError if it fails, which the log of this
    `name` explains, or takes `limit_s`."""
    mark = {"EDGETRAIN_PEER": f"{name}-{time.monotonic_ns()}"}
    python = environments.python_of(environment)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        quiet = {
            "FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": str(HERE), "RAY_worker_niceness": "0",
        }  # fmt: skip
        before, began = _children_cpu_s(), time.monotonic()
        log = environments.log_of(name)
        try:
            with log.open("w") as said, Peak(mark) as peak:
                subprocess.run(
                    [python, *words, "--answer", str(answer)], check=True,
                    env={**os.environ, **quiet, **mark}, stdout=said, stderr=said, timeout=limit_s,
                )  # fmt: skip
                seconds = time.monotonic() - began
        finally:
            _wait_for_orphans(Marked(**mark))
        log.unlink()
        return {
            "seconds": seconds,
            "cpu_s": _children_cpu_s() - before,
            "memory": peak.memory_bytes,
            "processes": peak.processes,
        }, answer.read_bytes()


def adopt_orphans() -> None:
    """Be the parent of what is left of the processes that this one starts."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_orphans(marked: Marked, patience_s: float = 20.0) -> None:
    """Daemons end a moment after the process that started them: wait, so that what they used
    counts; end those that stay."""
    end = time.monotonic() + patience_s
    while left := marked():
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def compare(system: str, members: int, rounds: int, local_steps: int) -> dict[str, float]:
    """The figures of one turn: of a short run and of a long one."""
    short, long = (train(system, members, count, local_steps) for count in (1, rounds + 1))
    wall, cpu = ((long[key] - short[key]) / rounds for key in ("seconds", "cpu_s"))
    return {
        "start and end, s": short["seconds"] - wall,
        "round, s": wall,
        "CPU a round, s": cpu,
        "memory, MB": long["memory"] / 1e6,
        "processes": long["processes"],
        "accuracy, %": 100 * long["accuracy"],
    }


Turns = dict[str, list[dict[str, float]]]


def table(members: int, arguments: argparse.Namespace) -> tuple[Turns, bool]:
    """Print the figures of all systems with this fleet; they, and whether all trained the same."""
    print(f"\n{members:,} members, {arguments.rounds} rounds", flush=True)
    found: Turns = {system: [] for system in arguments.systems}
    problem: dict[str, subprocess.SubprocessError] = {}
    for _ in range(arguments.repeats):
        for system in [each for each in arguments.systems if each not in problem]:
            try:
                found[system].append(
                    compare(system, members, arguments.rounds, arguments.local_steps)
                )
            except subprocess.SubprocessError as failed:
                problem[system] = failed
    for system, turns in found.items():
        if system in problem:
            late = isinstance(problem[system], subprocess.TimeoutExpired)
            how = f"took more than {LIMIT_S} s" if late else "failed"
            print(f"{system}: it {how}, see {environments.log_of(f'simulation-{system}')}")
            continue
        row = SYSTEMS[system]
        versions = environments.versions(row.environment, row.packages)
        print(f"{system}, {code_lines(row.functions)} lines of code, {versions}")
        for what in turns[0]:
            print(f"  {what:18} {ranged([turn[what] for turn in turns])}")
    finals = [turn["accuracy, %"] for turns in found.values() for turn in turns]
    same = max(finals, default=0) - min(finals, default=0) <= 100 / HELD_OUT + 1e-9
    if not same:
        print("the final accuracies differ: the systems did not train the same")
    return found, same and not problem


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas")
    parser.add_argument("--members", default="100,1000", help="of the fleets, separated by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=5, help="local steps in a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.systems = arguments.systems.split(",")
    try:
        environments.check(arguments.systems, SYSTEMS)
        fleets = [int(members) for members in arguments.members.split(",")]
        for system in arguments.systems:
            environments.python_of(SYSTEMS[system].environment)
    except (EdgetrainError, ValueError) as refused:
        print(f"simulations.py: {refused}", file=sys.stderr)
        return 2
    if arguments.answer:
        simulate = SYSTEMS[arguments.systems[0]].functions[0]
        accuracy = simulate(fleets[0], arguments.rounds, arguments.local_steps)
        arguments.answer.write_text(json.dumps({"accuracy": accuracy}))
        return 0
    adopt_orphans()
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        print(machine(), flush=True)
        tables = {members: table(members, arguments) for members in fleets}
    if arguments.json:
        print(json.dumps({members: found for members, (found, _) in tables.items()}))
    return 0 if all(good for _, good in tables.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
