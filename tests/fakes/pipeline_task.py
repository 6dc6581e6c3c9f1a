"""Small tasks for pipelines over members: five layers in a row, one with what pipelines refuse."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.tasks.work import optimizer_for
from edgetrain.training.servers.steps import batches_of


class Two(nn.Module):
    """A layer that passes two tensors on."""

    def forward(self, given):
        return (given, given) if isinstance(given, Tensor) else given[0] + given[1]


class Mortal(nn.Module):
    """A layer whose process dies, by SIGKILL, in a forward pass: the first process that gets to
    its `at`-th one, and no other."""

    def __init__(self, marker: str, at: int) -> None:
        super().__init__()
        self.marker, self.at, self.passes = Path(marker), at, [0]  # no number that a plan refuses

    def forward(self, given):
        self.passes[0] += 1
        if self.passes[0] == self.at and given.device.type != "meta" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return given


@dataclass(frozen=True)
class Rows:
    """Rows of noise, mapped to noise; `odd` is what the model has that no pipeline takes."""

    odd: str = ""
    width: int = 12
    dies: str = ""
    at: int = 0
    name: str = "rows"
    metric: str = "loss"
    better: str = "lower"
    target: float | None = None

    def model(self) -> nn.Module:
        first, last = nn.Linear(6, self.width), nn.Linear(self.width, 6)
        layers: list[nn.Module] = [
            first, nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh(), last
        ]  # fmt: skip
        if self.dies:
            layers.insert(3, Mortal(self.dies, self.at))
        if self.odd == "tied":
            layers = [nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Linear(6, 6)]
            layers[3].weight = layers[0].weight
        if self.odd == "two":
            layers[1], layers[2] = Two(), Two()
        return nn.Sequential(*layers)

    def samples(self, member: int, members: int) -> int:
        return 1000

    def batches(self, member: int, members: int, batch: int, seed: int) -> Iterator[tuple]:
        drawn = torch.Generator().manual_seed(100 * seed + member)
        while True:
            yield tuple(torch.randn(batch, 6, generator=drawn) for _ in range(2))

    def loss(self, model: nn.Module, batch: tuple) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(self.loss(model, next(self.batches(77, 1, 32, 0))))}


def rows(odd: str = "", width: int = 12, dies: str = "", at: int = 0) -> Rows:
    """The factory that jobs name."""
    return Rows(odd, width, dies, at)


def one_process(job: Job, microbatches: int) -> dict[str, Tensor]:
    """What one process trains in the same steps, its micro-batches added up in their order."""
    task = task_of(job)
    torch.manual_seed(job.seed)
    model, batches = task.model(), batches_of(task, job, 1, 0)
    optimizer = optimizer_for(model, job.train.optimizer)
    for _ in range(job.train.steps):
        split = [tensor.tensor_split(microbatches) for tensor in next(batches)]
        for micro in zip(*split, strict=True):
            (task.loss(model, micro) / microbatches).backward()
        if job.train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_trained(folder: Path, job: Job, microbatches: int) -> None:
    """The model in a run folder has the bits of one process."""
    found, expected = load_file(folder / "model.safetensors"), one_process(job, microbatches)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
