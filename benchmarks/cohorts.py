"""Federated learning at scale: a cohort of many users a round, in edgetrain and in others.

    python benchmarks/peers.py --install pfl,flower          once: their environments
    python benchmarks/cohorts.py                             users and cohort as pfl's CIFAR-10
    python benchmarks/cohorts.py --shapes logistic --rounds 20
    python benchmarks/cohorts.py --shapes million --systems edgetrain --rounds 1000
    python benchmarks/cohorts.py --python flower=~/flower/bin/python

FedAvg of users with 50 made-up pictures of CIFAR's format each: a round is one local epoch of
batches of 10 with plain SGD, and no network. `cnn`: 1,000 users, 50 a round, pfl-research's
two-layer CNN without dropout; `logistic`: 100,000 users, 100 a round, logistic regression;
`million`: 1,000,000 of these. --users and --cohort have others. Beside the simulators stand the
bare gradients of the same batches: `naive` one user after the other, `threads` on two cores,
`batched` by torch.func.vmap on two cores.

Each system runs twice, for one round and for one more than --rounds, all as a process of its own; a
round is the difference divided by --rounds. CPU seconds and memory are those of all processes.
Systems take turns, --repeats times; a figure is the median, with its range. Of the bare gradients
the ratio is that of those with the fewest CPU seconds.

Exit status 1 if a final model is not that of `naive` within 1e-3 of how far it moved; Flower draws
its own cohorts, and is not compared.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environments
import simulations
from harness import code_lines, machine, ranged

from edgetrain.errors import EdgetrainError

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
BARE = "naive", "threads", "batched"
"""The gradients alone."""
MOST_AWAY = 1e-3


@dataclass(frozen=True)
class System:
    """Who trains: a function of `cohort_jobs`, with those that are a user's code besides."""

    function: str
    environment: str = ""
    packages: tuple[str, ...] = ("torch",)
    besides: tuple[str, ...] = ()


SYSTEMS = {
    "edgetrain": System("edgetrain_simulation", packages=("edgetrain", "torch")),
    "pfl": System("pfl_simulation", "pfl", ("pfl", "torch")),
    "flower": System("flower_simulation", "flower", ("flwr", "ray", "torch"), ("flower_client",)),
    **{name: System(name) for name in BARE},
}


Turn = dict[str, Any]


def train(system: str, arguments: argparse.Namespace, shape: str, rounds: int) -> Turn:
    """One run in a process of its own. SubprocessError."""
    words = ["--systems", system, "--shapes", shape, "--rounds", str(rounds)]
    words += ["--users", str(arguments.users), "--cohort", str(arguments.cohort)]
    environment = SYSTEMS[system].environment
    script = str(HERE / "cohorts.py")
    found, answer = simulations.watched(
        environment, [script, *words], f"cohorts-{system}", arguments.limit
    )
    return {**found, "model": answer}


def compare(system: str, arguments: argparse.Namespace, shape: str) -> Turn:
    """The figures of one turn: of a short run and of a long one."""
    rounds = arguments.rounds
    short, long = (train(system, arguments, shape, count) for count in (1, rounds + 1))
    wall, cpu = ((long[key] - short[key]) / rounds for key in ("seconds", "cpu_s"))
    return {
        "start and end, s": short["seconds"] - wall,
        "rounds a second": 1 / max(wall, 1e-9),
        "CPU a round, s": cpu,
        "memory, MB": long["memory"] / 1e6,
        "model": long["model"],
    }


def away(model: Tensor, right: Tensor, first: Tensor) -> float:
    """How far a model is from the right one, as a share of how far that one moved."""
    return float((model - right).norm() / (right - first).norm())


def ratios(turns: dict[str, list[Turn]]) -> list[str]:
    """Lines on how fast the others are beside edgetrain, the best of the bare gradients last: in
    CPU seconds and in rounds. What other work on a machine does to the second, it hardly does to
    the first."""
    speed, cpu_s = (
        {
            name: statistics.median(turn[what] for turn in each)
            for name, each in turns.items()
            if each
        }
        for what in ("rounds a second", "CPU a round, s")
    )
    own, best = "edgetrain", min(speed.keys() & {*BARE}, key=lambda each: cpu_s[each], default="")
    others = [name for name in speed if name not in (*BARE, own)] + [best] * bool(best)
    return [
        f"{name}: {cpu_s[name] / cpu_s[own]:.2f} times edgetrain's CPU seconds, "
        f"{speed[name] / speed[own]:.2f} times its rounds a second"
        for name in others
        if own in speed
    ]


def table(shape: str, arguments: argparse.Namespace) -> tuple[dict[str, list[Turn]], bool]:
    """Print the figures of all systems for this shape; they, and whether all are right."""
    import cohort_jobs

    job = shaped(shape, arguments)
    print(f"\n{job.users:,} users, {job.cohort} a round, {job.model}, {arguments.rounds} rounds")
    found: dict[str, list[Turn]] = {system: [] for system in arguments.systems}
    problem: dict[str, str] = {}
    for _ in range(arguments.repeats):
        for system in [each for each in arguments.systems if each not in problem]:
            try:
                found[system].append(compare(system, arguments, shape))
            except subprocess.TimeoutExpired:
                problem[system] = f"it took more than {arguments.limit:g} s"
            except subprocess.SubprocessError:
                problem[system] = f"it failed, see {environments.log_of(f'cohorts-{system}')}"
    first, is_right = cohort_jobs.vector_of(cohort_jobs.model_of(job.model)), not problem
    right = _loaded(found["naive"][0]["model"]) if found.get("naive") else None
    for system, turns in found.items():
        print(title(system), flush=True)
        if system in problem:
            print(f"  {problem[system]}")
        models = [_loaded(turn.pop("model")) for turn in turns]
        for what in turns[0] if turns else ():
            print(f"  {what:18} {ranged([turn[what] for turn in turns])}")
        if right is not None and system != "flower" and models:
            far = max(away(model, right, first) for model in models)
            is_right &= far <= MOST_AWAY
            print(f"  {'away from naive':18} {far:.1e}")
    print("\n".join(ratios(found)), flush=True)
    return found, is_right


def title(system: str) -> str:
    """A system's name, its lines of code and its versions."""
    import cohort_jobs

    row = SYSTEMS[system]
    functions: list[Callable[..., Any]] = [
        getattr(cohort_jobs, name) for name in (row.function, *row.besides)
    ]
    versions = environments.versions(row.environment, row.packages)
    return f"{system}, {code_lines(functions)} lines of code, {versions}"


def shaped(name: str, arguments: argparse.Namespace) -> Any:
    """A shape, with the numbers that the command line has instead of its own."""
    import cohort_jobs

    shape = cohort_jobs.SHAPES[name]
    users, cohort = arguments.users or shape.users, arguments.cohort or shape.cohort
    return replace(shape, users=users, cohort=cohort)


def _loaded(model: bytes) -> Tensor:
    import torch

    found: Tensor = torch.load(io.BytesIO(model))
    return found


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The flags. ConfigError for a name that is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="cnn", help="separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas")
    parser.add_argument("--users", type=int, default=0)
    parser.add_argument("--cohort", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one run")
    parser.add_argument("--python", action="append", default=[], help="NAME=PYTHON")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.systems, arguments.shapes = (
        each.split(",") for each in (arguments.systems, arguments.shapes)
    )
    environments.check(arguments.systems, SYSTEMS)
    environments.check(arguments.shapes, ("cnn", "logistic", "million"), "shape")
    for each in arguments.python:
        environments.use(*each.split("=", 1))
    return arguments


def main() -> int:
    """The command."""
    try:
        arguments = parsed()
        for system in arguments.systems if not arguments.answer else ():
            environments.python_of(SYSTEMS[system].environment)
    except EdgetrainError as refused:
        print(f"cohorts.py: {refused}", file=sys.stderr)
        return 2
    if arguments.answer:
        import cohort_jobs
        import torch

        simulate = getattr(cohort_jobs, SYSTEMS[arguments.systems[0]].function)
        torch.save(simulate(shaped(arguments.shapes[0], arguments), arguments.rounds),
                   arguments.answer)  # fmt: skip
        return 0
    simulations.adopt_orphans()
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        print(machine(), flush=True)
        tables = {shape: table(shape, arguments) for shape in arguments.shapes}
    if arguments.json:
        print(json.dumps({shape: found for shape, (found, _) in tables.items()}))
    return 0 if all(good for _, good in tables.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
