"""The planner against layers that sleep: seconds of a step predicted and measured.

    python benchmarks/placements.py [--choice]

First every schedule with eight micro-batches or more. With `--choice` all placements on four ranks
that are tried, and how far the planner's choice is from the fastest of them. Sleeping layers
measure schedules and not the machine; on a busy machine ranks wake up late all the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgetrain.jobs.placement.formulas import Kept, Link
from edgetrain.jobs.placement.layers import Layer, Model
from edgetrain.jobs.placement.machines import Server, Servers
from edgetrain.jobs.placement.search import Found, Work, evaluate, search
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.reading import load
from edgetrain.training import processes
from edgetrain.training.servers.mesh import open_group, open_store
from edgetrain.training.servers.rank import prepare_rank

MS = (2.0, 1.0, 3.0, 1.5, 2.5, 1.0, 2.0, 3.0)
"""Of each layer's forward pass for one sample; backward takes twice as long."""
SAMPLES, MEMBERS = 8, 4
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
)  # fmt: skip


class _Input(torch.autograd.Function):
    """Sleeps in the forward pass, and as long for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * len(x)
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _Weight(torch.autograd.Function):
    """Sleeps for the gradient of the weight: schedules may put it off."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Input.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = _Weight.apply(self.weight, self.seconds * len(x))  # type: ignore[no-untyped-call]
        return scaled * weight


class SleepingTask:
    """A task whose model sleeps."""

    name, metric, better, target = "sleeping", "loss", "lower", None

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower

    def model(self) -> nn.Module:
        return nn.Sequential(*(Sleeping(self.slower * ms / 1e3) for ms in MS))

    def samples(self, member: int, members: int) -> int:
        return 100

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Any]:
        while True:
            yield (torch.ones(batch, 4),)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch[0]).square().mean()
        return found


def question(slower: float) -> tuple[Model, Servers, Work]:
    """The same as the planner sees it: a machine that does 1 Gflop/s, and layers of as many."""
    layers = tuple(
        Layer(f"{i}", 1, slower * ms * 1e6, 2 * slower * ms * 1e6, 0, 0, 16.0, 16.0)
        for i, ms in enumerate(MS)
    )
    link = Link(3e-4, 1e9)
    machine = Server("here", 4, 1e11, 1e9, 0.0, link)
    return Model(layers), Servers((machine,), link), Work(MEMBERS, SAMPLES, Kept(4.0, 0))


def serve(rank: int, count: int, port: int, words: list[str], slower: float, out: str) -> None:
    """Measure placements, one after the other; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    device = open_group(rank, count, port)
    job = load(None, [f"members={MEMBERS}", f"batch={SAMPLES}", "optimizer=sgd"])
    seconds = []
    for each in words:
        found = prepare_rank(job, SleepingTask(slower), parse(each), device)  # type: ignore[arg-type]
        taken = []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            loss = found.steps.backward()
            found.steps.step()
            loss()
            dist.barrier()
            taken.append(time.perf_counter() - began)
        seconds.append(min(taken[1:]))
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))


def measure(count: int, words: list[str], slower: float) -> list[float]:
    """Seconds of a step of each placement, all of `count` ranks."""
    context, store = processes.fork_server([]), open_store()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "seconds.json")
        given = functools.partial(processes.start, context)
        ranks = [
            given(f"r{rank}", serve, rank, count, store.port, words, slower, out)
            for rank in range(count)
        ]
        for each in ranks:
            each.process.join()
            if each.exit_code:
                raise SystemExit(each.error)
        found: list[float] = json.loads(Path(out).read_text())
    return found


def schedules(slower: float) -> None:
    """Every schedule, on two ranks."""
    asked = [f"pipeline=2 schedule={name} microbatches=8" for name in SCHEDULES]
    planned = [evaluate(*question(slower), parse(words)) for words in asked]
    assert all(isinstance(each, Found) for each in planned)
    found = [each for each in planned if isinstance(each, Found)]
    taken = measure(2, [str(each.placement) for each in found], slower)
    for each, seconds in zip(found, taken, strict=True):
        print(
            f"{each.placement.schedule:12} predicted {each.seconds:6.3f} s, measured "
            f"{seconds:6.3f} s: {100 * (each.seconds / seconds - 1):+5.1f} %"
        )


def choice(slower: float) -> None:
    """All placements of four ranks, and the planner's own."""
    model, servers, work = question(slower)
    words = ["data=4", "data=4 microbatches=2"]
    for parts in (1, 2, 4, 8):
        words += [f"data=2 pipeline=2 microbatches={parts}", f"pipeline=4 microbatches={parts}"]
    words += [
        f"data=2 pipeline=2 schedule={name} microbatches={parts}"
        for name in ("interleaved", "zero-bubble", "zbv")
        for parts in (4, 8)
    ]
    words += [f"pipeline=4 schedule={name} microbatches=8" for name in ("interleaved", "zbv")]
    words += ["pipeline=4 microbatches=16", "pipeline=4 microbatches=32"]
    ranked, _ = search(model, servers, work)
    judged = [evaluate(model, servers, work, parse(each)) for each in words]
    tried = [ranked[0], *(each for each in judged if isinstance(each, Found))]
    taken = measure(4, [str(each.placement) for each in tried], slower)
    for each, seconds in zip(tried, taken, strict=True):
        print(
            f"{each.placement!s:70} predicted {each.seconds:6.3f} s, measured {seconds:6.3f} s: "
            f"{100 * (each.seconds / seconds - 1):+5.1f} %"
        )
    away = 100 * (taken[0] / min(taken) - 1)
    print(f"the planner's choice, the first, is {away:.1f} % from the best of {len(taken)}")


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--choice", action="store_true", help="also all placements on four ranks")
    parser.add_argument("--slower", type=float, default=4.0, help="times the sleeps")
    arguments = parser.parse_args()
    schedules(arguments.slower)
    if arguments.choice:
        choice(arguments.slower)
    return 0


if __name__ == "__main__":
    sys.exit(main())
