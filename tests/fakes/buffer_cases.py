"""A model with buffers of all kinds, trained by a group and by one process."""

from __future__ import annotations

import torch
from group_cases import job_of
from torch import nn

from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.words import parse
from edgetrain.tasks.protocol import evaluating
from edgetrain.tasks.work import optimizer_for
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.snapshots import Snapshots
from edgetrain.training.servers.steps import batches_of

WIDTH, STEPS = 4, 3


class Block(nn.Module):
    """Takes a running mean away, counts its calls and notes something, if it is `running`."""

    def __init__(self, mask, running):
        super().__init__()
        self.linear, self.running = nn.Linear(WIDTH, WIDTH), running
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.table, self.noted = torch.linspace(-1, 1, WIDTH), torch.zeros(3)

    def forward(self, hidden):
        if self.running and self.training:
            self.mean = (0.9 * self.mean + 0.1 * hidden.mean(0)).detach()
            self.calls += 1
            self.noted = hidden.mean()
        return torch.tanh(self.linear(hidden * self.mask)) + self.table - self.mean


class Keeping(nn.Module):
    """Two blocks with one mask, and a parameter that nothing uses."""

    pieces = (("blocks.0",), ("blocks.1",))

    def __init__(self, running):
        super().__init__()
        mask = torch.tensor([1.0, 0.0, 1.0, 0.5])
        self.blocks = nn.ModuleList(Block(mask, running) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = hidden if block is None else block(hidden)
        return hidden


class Turned(nn.Module):
    """Tensors whose memory is not in order: transposed, slices, expanded; one is an attribute."""

    pieces = (("first",), ("last",))

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.register_buffer("turned", torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("every_second", torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.register_buffer("expanded", torch.randn(WIDTH, 1).expand(WIDTH, WIDTH))
        self.attribute = torch.randn(WIDTH, 2, 3).permute(2, 0, 1)
        self.last.same = self.turned

    def forward(self, hidden):
        if self.first is not None:
            hidden = torch.tanh(self.first(hidden) @ self.turned + self.attribute.sum((0, 2)))
        if self.last is None:
            return hidden
        return self.last(hidden @ (self.every_second * self.expanded + self.last.same)) + (
            self.rows.sum(0)
        )


class Task:
    name, metric, better, target = "keeping", "loss", "lower", None

    def __init__(self, kind="running"):
        self._kind = kind

    def model(self):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            if self._kind == "unordered":
                return Turned()
            return _with_hook() if self._kind == "hooked" else Keeping(self._kind == "running")
        finally:
            torch.set_default_dtype(before)

    def samples(self, member, members):
        return 8

    def batches(self, member, members, batch, seed):
        drawn = torch.Generator().manual_seed(100 * seed + member)
        while True:
            yield (torch.randn(batch, WIDTH, generator=drawn, dtype=torch.float64),)

    def loss(self, model, batch):
        return (model(batch[0]) - 0.3).square().mean()

    def evaluate(self, model):
        with evaluating(model):
            return {"loss": float(self.loss(model, next(self.batches(7, 8, 4, 0))))}


def _with_hook():
    found = Keeping(False)
    found.blocks[0].linear.weight.register_hook(lambda gradient: 0.5 * gradient)
    return found


def job(kind: str) -> Job:
    return job_of("task=buffer_cases:Task", f"data.kind={kind}", "optimizer.weight_decay=0.1")


def found_in(task, model):
    """All that a model keeps, and its evaluation."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.detach().clone() for n, t in tensors} | {
        "evaluation": torch.tensor(task.evaluate(model)["loss"], dtype=torch.float64)
    }


def alone(kind: str, steps: int = STEPS):
    """In one process."""
    task = task_of(job(kind))
    torch.manual_seed(job(kind).seed)
    model = task.model()
    optimizer = optimizer_for(model, job(kind).train.optimizer)
    batches = batches_of(task, job(kind), 1, 0)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()
    return found_in(task, model)


def together(kind: str, words: str, steps: int = STEPS, folder=None, start: int = 0):
    """In a group, from the snapshot after `start` steps in `folder`; {} but on the leader. Memory
    that nobody has filled is NaN. A snapshot is kept at the end if there is a folder."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    task = task_of(job(kind))
    rank = prepare_rank(job(kind), task, parse(words), torch.device("cpu"), start)
    snapshots = Snapshots(rank, folder, 0) if folder is not None else None
    if snapshots is not None and start:
        snapshots.load(start)
    for _ in range(steps - start):
        loss = rank.steps.backward()
        rank.steps.step()
        loss()
    if snapshots is not None:
        snapshots.keep(steps)
        snapshots.wait()
    model = rank.held.gather()
    return {} if model is None else found_in(task, model)
