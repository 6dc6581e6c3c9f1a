"""The planner against layers that sleep: seconds of a step predicted and measured.

Every schedule with eight micro-batches on two ranks, then placements on four, and how far the
planner's choice is from the fastest of them. Sleeping layers measure schedules and not the machine;
on a busy machine ranks wake up late all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Measured, measure, on_ranks
from torch import Tensor, nn

from edgetrain.jobs.placement.formulas import Kept, RankLink
from edgetrain.jobs.placement.machines import Server, Servers
from edgetrain.jobs.placement.search import Found, Work, evaluate, search
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.reading import load
from edgetrain.tasks.layers import Layer, Model
from edgetrain.training.servers.mesh import open_group
from edgetrain.training.servers.rank import prepare_rank

SLOWER = 3.0
MS = (2.0, 1.0, 3.0, 1.5, 2.5, 1.0, 2.0, 3.0)
"""Of each layer's forward pass for one sample, times SLOWER; backward takes twice as long."""
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

    def model(self) -> nn.Module:
        return nn.Sequential(*(Sleeping(SLOWER * ms / 1e3) for ms in MS))

    def samples(self, member: int, members: int) -> int:
        return 100

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[Any]:
        while True:
            yield (torch.ones(batch, 4),)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch[0]).square().mean()
        return found


def question() -> tuple[Model, Servers, Work]:
    """The same as the planner sees it: a machine that does 1 Gflop/s, and layers of as many."""
    layers = tuple(
        Layer(f"{i}", 1, SLOWER * ms * 1e6, 2 * SLOWER * ms * 1e6, 0, 0, 16.0, 16.0)
        for i, ms in enumerate(MS)
    )
    link = RankLink(3e-4, 1e9)
    machine = Server("here", 4, 1e11, 1e9, 0.0, link)
    return Model(layers), Servers((machine,), link), Work(MEMBERS, SAMPLES, Kept(4.0, 0))


def serve(rank: int, count: int, port: int, words: list[str], out: str) -> None:
    """Measure placements, one after the other; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    device = open_group(rank, count, port)
    job = load(None, [f"members={MEMBERS}", f"batch={SAMPLES}", "optimizer=sgd"])
    seconds = []
    for each in words:
        found = prepare_rank(job, SleepingTask(), parse(each), device)  # type: ignore[arg-type]
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


def timed(count: int, words: list[str]) -> list[float]:
    """Seconds of a step of each placement, all of `count` ranks."""
    found: list[float] = on_ranks(serve, count, words)
    return found


def predicted(words: Iterable[str]) -> list[Found]:
    """What the planner says of these placements, of those that it can judge."""
    judged = [evaluate(*question(), parse(each)) for each in words]
    return [each for each in judged if isinstance(each, Found)]


def beside(found: list[Found], taken: list[float], names: list[str]) -> dict[str, float]:
    """Predicted and measured seconds of each."""
    figures: dict[str, float] = {}
    for each, seconds, name in zip(found, taken, names, strict=True):
        figures |= {f"{name}, predicted s": each.seconds, f"{name}, measured s": seconds}
        figures[f"{name}, off by, %"] = 100 * (each.seconds / seconds - 1)
    return figures


def schedules() -> dict[str, float]:
    """Every schedule, on two ranks."""
    found = predicted(f"pipeline=2 schedule={name} microbatches=8" for name in SCHEDULES)
    taken = timed(2, [str(each.placement) for each in found])
    return beside(found, taken, [each.placement.schedule for each in found])


def choice() -> dict[str, float]:
    """All placements of four ranks, and the planner's own, which is the first."""
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
    ranked, _ = search(*question())
    tried = [ranked[0], *predicted(words)]
    taken = timed(4, [str(each.placement) for each in tried])
    figures = beside(tried, taken, ["the choice", *(str(each.placement) for each in tried[1:])])
    return {**figures, "the choice, from the best, %": 100 * (taken[0] / min(taken) - 1)}


def measured() -> Iterator[Measured]:
    """Both."""
    yield measure("a step on two ranks", schedules, 1)
    yield measure("a step on four ranks", choice, 1)
