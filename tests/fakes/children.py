"""What tests run in processes of their own, and a hub in a thread. Imports no pytest."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import edgetrain.training.member.joining
from edgetrain import codecs, strategies
from edgetrain.exchange.delay import Delay
from edgetrain.exchange.hub.effects import Closed, Note, Observed
from edgetrain.exchange.hub.orders import Order
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.serve import serve
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.member.checkpoint import Keep, Sparing


def model(seed: int = 0) -> nn.Module:
    """Small, with a bias and two layers; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    found = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for p in found.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return found


def batch(member: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels that depend on the member and the step alone."""
    generator = torch.Generator().manual_seed(1000 * member + step)
    x = torch.randn(5, 6, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


class Branches(nn.Module):
    """Layers of which a step uses some: which depends on the step and on who takes it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.body = model(0)
        names = "early", "late", "mine", "never", "dead"
        self.layers = nn.ModuleDict({name: nn.Linear(6, 3) for name in names})
        with torch.no_grad():
            for p in self.layers.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        """The scores. `dead` gets a gradient, which is zero."""
        scores = self.body(x) + 0 * self.layers["dead"](x)
        scores = scores + self.layers["early" if step < 4 else "late"](x)
        return scores + self.layers["mine"](x) if rank == step % 3 else scores


def optimizer(name: str, found: nn.Module) -> torch.optim.Optimizer:
    """The ones that the tests compare."""
    if name == "adam":
        return torch.optim.Adam(found.parameters(), 0.01)
    if name == "adamw":
        return torch.optim.AdamW(found.parameters(), 0.01, weight_decay=0.5)
    if name == "nadam":
        return torch.optim.NAdam(found.parameters(), 0.01)
    if name == "decay":
        return torch.optim.SGD(found.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.SGD(found.parameters(), 0.1, momentum=0.9)


def flat(found: nn.Module) -> np.ndarray:
    """All parameters, copied, as float32 unless they are float64."""
    whole = torch.cat([p.detach().flatten() for p in found.parameters()])
    return (whole if whole.dtype is torch.float64 else whole.float()).numpy().copy()


def backward(found: nn.Module, optim: torch.optim.Optimizer, index: int, number: int) -> None:
    """The gradients of a batch."""
    optim.zero_grad()
    x, y = batch(index, number)
    nn.functional.cross_entropy(found(x), y).backward()


def three_lines(address: str, out: str, index: int, steps: int) -> None:
    """The loop of the documentation, in a process of its own; leaves its parameters in `out`."""
    torch.set_num_threads(1)
    found = model(index)
    optim = optimizer("sgd", found)
    member = edgetrain.training.member.joining.join(address, found, optim, name=f"m{index}")
    for step in range(steps):
        backward(found, optim, index, step)
        optim.step()
    member.close()
    np.save(out, flat(found))


def joined(address: str, index: int, steps: int, job_file: Path | None = None) -> np.ndarray:
    """A loop with a model of 643 parameters; they at the end."""
    found = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    with torch.no_grad():
        for each in found.parameters():
            each.fill_(0.1)
    optim = optimizer("sgd", found)
    with edgetrain.training.member.joining.join(
        address, found, optim, name=f"m{index}", job_file=job_file
    ):
        for step in range(steps):
            backward(found, optim, index, step)
            optim.step()
    return flat(found)


def keeps_on(address: str, out: str, folder: Path | None, index: int, steps: int) -> None:
    """A loop that may be killed and started again; leaves its parameters and batches in files."""
    torch.set_num_threads(1)
    found = model(0)
    optim = optimizer("adam", found)
    keep = None if folder is None else Keep(folder, Sparing(0.02, 0.5, 1e15))
    member = edgetrain.training.member.joining.join(
        address, found, optim, name=f"m{index}", checkpoint=keep
    )
    with Path(f"{out}.batches").open("a") as file:
        print("begins", file=file, flush=True)
        for _ in range(member.begins_at, steps):
            print(member.steps, file=file, flush=True)
            backward(found, optim, index, member.steps)
            member.step()
    member.close()
    np.save(f"{out}.npy", flat(found))


def stops_when_asked(address: str, out: str, folder: Path | None, index: int, steps: int) -> None:
    """A loop that takes SIGTERM as the documentation says; leaves its batches and parameters."""
    torch.set_num_threads(1)
    found = model(0)
    optim = optimizer("adam", found)
    member = edgetrain.training.member.joining.join(
        address, found, optim, name=f"m{index}", checkpoint=folder
    )
    signal.signal(signal.SIGTERM, member.stop)
    with Path(f"{out}.batches").open("a") as file, member:
        for _ in range(member.begins_at, steps):
            print(member.steps, file=file, flush=True)
            backward(found, optim, index, member.steps)
            member.step()
    np.save(f"{out}.npy", flat(found))


def has_a_schedule(address: str, out: str, folder: Path | None, index: int, steps: int) -> None:
    """A loop with a learning-rate schedule that may be killed; leaves steps and rates in a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # of a schedule that is brought up to date
    found = model(0)
    optim = optimizer("sgd", found)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, steps)
    keep = None if folder is None else Keep(folder, Sparing(0.02, 0.5, 1e15))
    state = None if folder is None else {"scheduler": scheduler}
    member = edgetrain.training.member.joining.join(
        address, found, optim, name=f"m{index}", checkpoint=keep, state=state
    )
    while scheduler.last_epoch < member.begins_at:
        scheduler.step()
    with Path(f"{out}.rates").open("a") as file:
        print("begins", file=file, flush=True)
        for step in range(member.begins_at, steps):
            print(step, optim.param_groups[0]["lr"], file=file, flush=True)
            backward(found, optim, index, member.steps)
            member.step()
            scheduler.step()
    member.close()


def with_ddp(out: str, names: list[str], steps: int) -> None:
    """The same batches under torch's own DistributedDataParallel, on a rank of `ranks.world`."""
    rank = torch.distributed.get_rank()
    for name in names:
        wrapped = nn.parallel.DistributedDataParallel(model(0))
        optim = optimizer(name, wrapped)
        for step in range(steps):
            backward(wrapped, optim, rank, step)
            optim.step()
        np.save(f"{out}-{name}-{rank}.npy", flat(wrapped.module))
    for name in ("adamw", "decay"):
        wrapped = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
        optim = optimizer(name, wrapped)
        for step in range(steps):
            optim.zero_grad()
            x, y = batch(rank, step)
            nn.functional.cross_entropy(wrapped(x, rank, step), y).backward()
            optim.step()
        np.save(f"{out}-{name}-{rank}.npy", flat(wrapped.module))


class HubThread:
    """A hub served from a thread, and what it noted."""

    def __init__(
        self, transport, strategy="local-sgd", members=2, *, local_steps=1, delay=0, journal=None,
        part=None, **other,
    ):  # fmt: skip
        row = strategies.find(strategy)
        policy = Policy(
            members, **({"heartbeat_s": 0.05, "lost_after_s": 60.0} | other.pop("policy", {}))
        )
        codec = codecs.parse(other.pop("codec", "fp32"))
        reply_codec = codecs.parse(other.pop("reply_codec", codec.name))
        terms = Terms(row, local_steps, Delay(delay or 0, delay is None), **other)
        merge, outer = row.merge_rule(), row.outer_rule()
        self.hub = Hub(terms, policy, merge, codec, reply_codec, outer=outer)
        if part is not None:
            part.attach(self.hub)
        self.transport = transport
        self.notes: list[Note] = []
        self.closed: list[Closed] = []
        self.on_close: Callable[[Closed], None] = lambda closed: None
        self.error: BaseException | None = None
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._journal = journal
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            serve(
                self.hub,
                self.transport,
                time.monotonic,
                self._observe,
                lambda: self._stop,
                self._journal,
                orders=self._orders,
            )
        except BaseException as error:
            self.error = error

    def _orders(self) -> Iterator[Order]:
        while not self.orders.empty():
            yield self.orders.get()

    def _observe(self, effect: Observed) -> None:
        if isinstance(effect, Note):
            self.notes.append(effect)
        elif isinstance(effect, Closed):
            self.closed.append(effect)
            self.on_close(effect)

    def stop(self) -> None:
        """Let it end at once, whoever is there."""
        self._stop = True

    @contextlib.contextmanager
    def serving(self) -> Iterator[HubThread]:
        """Until the block ends; an error of the hub is raised there."""
        self.begin()
        try:
            yield self
        finally:
            self.finish()

    def begin(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def end(self) -> None:
        """End at once, as if killed: what is journaled stays."""
        self._stop = True
        self._thread.join()
        if self._journal is not None:
            self._journal.close()

    def finish(self) -> None:
        """Wait a while for the job's end; raises an error of the hub."""
        if self.hub.started and not self.hub.finished:
            self._thread.join(2.0)  # the last farewells may be on their way
        self.end()
        self.transport.close()
        if self.error is not None:
            raise self.error


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run all at once; their results in order, the first error raised."""
    found: list[object] = [None] * len(jobs)

    def run(i: int) -> None:
        try:
            found[i] = jobs[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found
