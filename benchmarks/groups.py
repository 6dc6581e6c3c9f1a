"""Groups of ranks: seconds of a step on each placement, and what they make of odd models.

    python benchmarks/groups.py [--against CHECKOUT] [--turns 5]
    python benchmarks/groups.py --models

The first trains char_lm on placements of two and four ranks of this machine and prints the median
seconds of a step, and those of the check before the first one, in steps; with another checkout both
take turns. `--models` prints the table of docs/reference/placements.md: each model and loss of
tests/fakes/odd_models.py on each of its placements, and why some are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import on_ranks

from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.reading import load
from edgetrain.training.servers.mesh import open_group
from edgetrain.training.servers.rank import prepare_rank

HERE = Path(__file__).resolve().parents[1]
WORDS = (
    "data=2", "data=2 shard=2 zero=1", "data=2 shard=2 zero=2", "data=2 shard=2 zero=3",
    "tensor=2", "tensor=2 norms=split", "sequence=2", "sequence=2 ulysses=2",
    "pipeline=2 microbatches=4", "pipeline=2 schedule=zero-bubble microbatches=4",
    "data=2 pipeline=2 microbatches=4",
)  # fmt: skip
STEPS = 12


def serve(rank: int, count: int, port: int, words: str, out: str) -> None:
    """Seconds of the check and of steps on one rank; the first one writes them."""
    torch.set_num_threads(1)
    device = open_group(rank, count, port)
    job = load(None, ["task=edgetrain.tasks:char_lm", "data.limit_bytes=200000", "data.width=128",
                      "data.layers=4", "members=4", "batch=8", "optimizer=adamw"])  # fmt: skip
    task = task_of(job)
    found = prepare_rank(job, task, parse(words), device)
    began = time.perf_counter()
    with contextlib.suppress(ModuleNotFoundError):  # an older checkout has no check
        importlib.import_module("edgetrain.training.servers.checking").check_group(job, task, found)
    checked, taken = time.perf_counter() - began, []
    for _ in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        loss = found.steps.backward()
        found.steps.step()
        loss()
        taken.append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps([checked, statistics.median(taken[2:])]))


def measure(words: str) -> tuple[float, float]:
    """Seconds of the check and of a step, on fresh ranks."""
    checked, step = on_ranks(serve, parse(words).ranks, words)
    return checked, step


def steps(against: Path | None, turns: int) -> None:
    """Print a line for each placement."""
    for words in WORDS:
        taken: dict[str, list[tuple[float, float]]] = {"here": []}
        for _ in range(turns):
            taken["here"].append(measure(words))
            if against is not None:
                command = [sys.executable, str(Path(__file__).resolve()), "--one", words]
                run = subprocess.run(command, cwd=against, env={"PYTHONPATH": str(against)},
                                     capture_output=True, text=True, check=True)  # fmt: skip
                taken.setdefault("there", []).append(tuple(json.loads(run.stdout)))
        medians = {key: statistics.median(s for _, s in each) for key, each in taken.items()}
        checked = statistics.median(c for c, _ in taken["here"])
        said = f"{words:50} {1e3 * medians['here']:7.1f} ms, check {checked / medians['here']:4.1f}"
        if against is not None:
            said += f" steps; there {1e3 * medians['there']:7.1f} ms, "
            said += f"{100 * (medians['here'] / medians['there'] - 1):+5.1f} %"
        print(said, flush=True)


def models() -> None:
    """Print the table of models and placements, as Markdown."""
    sys.path.insert(0, str(HERE / "tests" / "fakes"))
    odd: Any = importlib.import_module("odd_models")
    ranks: Any = importlib.import_module("ranks")
    worlds: dict[int, Any] = {}

    def world(count: int) -> Any:
        if count not in worlds or worlds[count].is_over:
            worlds[count] = ranks.World(count)
        return worlds[count]

    letters = [chr(ord("a") + place) for place in range(len(odd.PLACEMENTS))]
    for letter, words in zip(letters, odd.PLACEMENTS, strict=True):
        print(f"- {letter}: `{words}`")
    table = odd.Table(letters)
    print(f"\n{table.head}")
    for subject in odd.SUBJECTS:
        found = {words: odd.judge(world, subject, words) for words in odd.PLACEMENTS}
        print(table.row(subject, found), flush=True)
    print(f"\n{table.reasons}")
    for each in worlds.values():
        each.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", action="store_true", help="the table of models x placements")
    parser.add_argument("--against", type=Path, help="another checkout, which takes turns")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", metavar="WORDS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one)))
    elif given.models:
        models()
    else:
        steps(given.against, given.turns)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
