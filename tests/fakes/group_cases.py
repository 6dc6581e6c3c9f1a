"""What ranks do in tests of groups, and the same in one process."""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of, tuning_of
from edgetrain.jobs.placement.words import Placement, parse
from edgetrain.jobs.reading import load
from edgetrain.tasks import char_lm
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.text import Transformer
from edgetrain.tasks.work import optimizer_for, tune
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.steps import batches_of

STEPS = 10


class Double:
    """A task in float64."""

    def __init__(self, task) -> None:
        self._task = task

    def model(self) -> nn.Module:
        return self._task.model().double()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._task, name)

    def batches_from(self, *arguments):
        for batch in self._task.batches_from(*arguments):
            yield tuple(t.double() if t.is_floating_point() else t for t in batch)


class Unnamed(Transformer):
    """The tied model of char_lm, which does not say where it can be cut."""

    pieces = None


class Thinned(Transformer):
    """The model of char_lm; blocks count by `factors`, 0 is left out."""

    factors = None

    def forward(self, text):
        hidden = self._embedded(text)
        for block, factor in zip(self.blocks, self.factors, strict=True):
            if factor:
                hidden = hidden + factor * (block(hidden) - hidden)
        return self._scored(self.norm(hidden))


def alone_thinned(job: Job, steps: int):
    """Losses in one process in which blocks are left out, and the factors of each step."""
    from edgetrain.training.servers.dropping import Dropping

    torch.manual_seed(job.seed)
    task = Double(_with_model(Thinned, job.data))
    model = task.model()
    count = len(model.blocks)
    names = [f"blocks.{place}" for place in range(count)]
    dropping = Dropping(job.servers.layer_keep, job.train.steps, job.seed, names)
    optimizer = optimizer_for(model, job.train.optimizer, task)
    batches, losses, drawn = batches_of(task, job, 1, 0), [], []
    for step in range(steps):
        dropping.begin(step)
        model.factors = dropping.factors
        drawn.append(dropping.factors)
        optimizer.zero_grad()
        loss = task.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, drawn


class Untraceable(Unnamed):
    """What it does depends on the numbers that it sees."""

    def forward(self, text):
        return super().forward(text) if float(self.norm.weight[0]) else text


class Angles(nn.Module):
    """Of positions, as libraries write rotary embeddings."""

    @torch.no_grad()
    def forward(self, places):
        return places.cos()[:, None]


class Angled(Unnamed):
    """A module of it keeps no gradients."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.angles = Angles()

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        return super().forward(text) * self.angles(places)


def unnamed(**options):
    """char_lm with a model of this file."""
    return _with_model(Unnamed, options)


def untraceable(**options):
    return _with_model(Untraceable, options)


def angled(**options):
    return _with_model(Angled, options)


def _with_model(kind, options):
    task = char_lm(**options)
    size = task.size
    task.model = lambda: kind(size.context, size.width, size.heads, size.layers, size.tied)
    return task


def job_of(*words: str) -> Job:
    return load(None, ["optimizer=adamw", "lr=0.003", "members=4", "batch=4", *words])


CHARS = ("task=edgetrain.tasks:char_lm", "data.limit_bytes=20000", "data.context=8",
         "data.width=16", "data.heads=4", "data.layers=3")  # fmt: skip
DIGITS = ("task=edgetrain.tasks:digits",)


def train(job: Job, words: str | Placement, double: bool = True, steps: int = STEPS, beside=None):
    """(loss of each step, the whole model's parameters at the end on rank 0, how it was cut)."""
    placement = parse(words) if isinstance(words, str) else words
    task = task_of(job, beside)
    rank = prepare_rank(job, Double(task) if double else task, placement, torch.device("cpu"))
    losses = []
    for _ in range(steps):
        loss = rank.steps.backward()
        rank.steps.step()
        losses.append(loss())
    model = rank.held.gather()
    flat = None if model is None else [p.detach().clone() for p in model.parameters()]
    return losses, flat, rank.held.parts.how


def alone(job: Job, double: bool = True, steps: int = STEPS, beside=None):
    """The same in one process: the batches of all members as one."""
    task = task_of(job, beside)
    task = Double(task) if double else task
    torch.manual_seed(job.seed)
    model = task.model()
    optimizer = optimizer_for(model, job.train.optimizer, task)
    tune(optimizer, tuning_of(job))
    batches, losses = batches_of(task, job, 1, 0), []
    for _ in range(steps):
        loss = task.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def in_bf16(job: Job, words: str):
    """Losses, the types of all parameters, of what a block computes with, and of the loss."""
    rank = prepare_rank(job, task_of(job), parse(words), torch.device("cpu"))
    types = {p.dtype for own in rank.held.own for p in own.values()}
    seen = set()
    for module in rank.held.modules:
        for each in module.modules():
            if isinstance(each, nn.Linear):
                each.register_forward_pre_hook(lambda own, args: seen.add(args[0].dtype))
    losses = _steps(rank, STEPS)
    state = {v.dtype for each in rank.steps.optimizer.state.values() for v in each.values()}
    return losses, types, seen, state


def attend(ring: int, ulysses: int, causal: bool, heads: tuple[int, int]):
    """Differences of attention over slices from attention over the whole: of outputs, and of the
    gradients of queries, keys and values."""
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.device_mesh import init_device_mesh

    from edgetrain.training.servers.attention import SplitAttention

    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    groups = [mesh[n].get_group() if mesh[n].size() > 1 else None for n in ("ring", "ulysses")]
    torch.manual_seed(5)
    sizes = (heads[0], heads[1], heads[1])
    whole = [torch.randn(2, n, 8, 3).double().requires_grad_() for n in sizes]
    weights, how = torch.randn(2, heads[0], 8, 3).double(), {"is_causal": causal, "scale": 0.7}
    how["enable_gqa"] = heads[0] != heads[1]
    expected = F.scaled_dot_product_attention(*whole, **how)
    (expected * weights).sum().backward()
    size = 8 // (ring * ulysses)
    here = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    mine = [each.detach()[:, :, here].clone().requires_grad_() for each in whole]
    mode = SplitAttention(*groups)
    with mode:
        found = F.scaled_dot_product_attention(*mine, **how)
    (found * weights[:, :, here]).sum().backward()
    assert mode.calls == 1
    pairs = [(found, expected[:, :, here])]
    pairs += [(a.grad, b.grad[:, :, here]) for a, b in zip(mine, whole, strict=True)]
    return [float((a - b).abs().max()) for a, b in pairs]


def attend_with(**how):
    """Attention that slices cannot have."""
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812

    from edgetrain.training.servers.attention import SplitAttention

    query = torch.zeros(1, 2, 4, 3)
    with SplitAttention(dist.group.WORLD, None):
        F.scaled_dot_product_attention(query, query, query, **how)


def first_checksum(job: Job, words: str) -> int | None:
    """Of the parameters that a group begins with, on the leader."""
    from edgetrain.vectors.vector import checksum

    rank = prepare_rank(job, task_of(job), parse(words), torch.device("cpu"))
    for each in rank.held.own:  # what ranks have is what comes back
        for parameter in each.values():
            assert parameter.isfinite().all()
    model = rank.held.gather()
    return None if model is None else checksum(FlatModel(model).params)


def kept_between_blocks(job: Job, words: str):
    """Positions of what enters each block that is computed again, and the names of these blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    rank = prepare_rank(job, task_of(job), parse(words), torch.device("cpu"))
    seen, names = [], []
    for module in rank.held.modules:
        for name, each in module.named_modules():
            if isinstance(each, CheckpointWrapper):
                names.append(name)
                each.register_forward_pre_hook(lambda own, args: seen.append(args[0].shape[1]))
    _steps(rank, 1)
    return seen, names


def train_compiled(job: Job, words: str):
    """`train`, and how many graphs torch has compiled for it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    found = train(job, words)
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    return found[0], graphs


def train_untied(job: Job, words: str):
    """`train`, without the sum of gradients over the copies of a tied parameter."""
    from edgetrain.training.servers import model

    real = model.TiedGroups.add
    model.TiedGroups.add = lambda self: None
    try:
        return train(job, words)
    finally:
        model.TiedGroups.add = real


def cut_only(job: Job, words: str) -> str:
    """How the model is cut, without a group of the placement's size."""
    from edgetrain.training.servers.parts import cut
    from edgetrain.training.servers.rank import example_of

    task, placement = task_of(job), parse(words)
    return cut(task, placement, example_of(job, task, placement)).how


def train_and_keep(job: Job, words: str, folder, steps: int) -> list[float]:
    """Losses of the first steps; a snapshot is kept after them."""
    from edgetrain.training.servers.snapshots import Snapshots

    rank = prepare_rank(job, Double(task_of(job)), parse(words), torch.device("cpu"))
    losses = _steps(rank, steps)
    snapshots = Snapshots(rank, folder, 0)
    snapshots.keep(steps)
    snapshots.wait()
    return losses


def keep_while_training(job: Job, words: str, folder, again: bool = True):
    """Losses of ten steps; the snapshot after the fifth is written once they are all over. Then
    what was the newest one before it was, how many were written at a time, and problems."""
    import threading

    from edgetrain.training.servers import snapshots as module

    rank = prepare_rank(job, Double(task_of(job)), parse(words), torch.device("cpu"))
    snapshots, problems = module.Snapshots(rank, folder, 0), []
    snapshots.report_to(problems.append)
    losses = _steps(rank, 3)
    snapshots.keep(3)
    losses += _steps(rank, 2)
    gate, real, busy, most = threading.Event(), module.save, [0], [0]

    def gated(*given, **named):
        assert gate.wait(60)
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        real(*given, **named)
        busy[0] -= 1

    snapshots.wait()
    module.save = gated
    try:
        snapshots.keep(5)
        losses += _steps(rank, 5)
        before = module.latest(folder)[0]
        gate.set()
        if again:
            for step in (6, 7, 5):
                snapshots.keep(step)
        snapshots.wait()
    finally:
        module.save = real
    return losses, before, most[0], problems


def keep_and_die(job: Job, words: str, folder) -> None:
    """A snapshot after three steps, and one more that all ranks are killed in: its parts are
    written, and it has no name yet."""
    import os
    import signal

    from edgetrain.training.servers import snapshots as module

    rank = prepare_rank(job, Double(task_of(job)), parse(words), torch.device("cpu"))
    snapshots, real = module.Snapshots(rank, folder, 0), module.save
    _steps(rank, 3)
    snapshots.keep(3)
    snapshots.wait()

    def deadly(*given, **named):
        real(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    module.save = deadly
    _steps(rank, 2)
    snapshots.keep(5)
    snapshots.wait()


def keep_on_a_full_disk(job: Job, words: str, folder, full: int):
    """Losses of ten steps, the problems that were reported, and the newest snapshot after each of
    three tries; in the second the disk of rank `full` takes no more than 1000 bytes a file."""
    import resource

    import torch.distributed as dist

    from edgetrain.training.servers.snapshots import Snapshots, latest

    own = _own(folder)
    own.mkdir(exist_ok=True)
    rank = prepare_rank(job, Double(task_of(job)), parse(words), torch.device("cpu"))
    snapshots, problems, newest = Snapshots(rank, own, 0), [], []
    snapshots.report_to(problems.append)
    losses, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for turn, steps in enumerate((3, 3, 4)):
        losses += _steps(rank, steps)
        if turn == 1 and dist.get_rank() == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            snapshots.keep(len(losses))
            snapshots.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        newest.append(latest(own)[0] if dist.get_rank() == 0 else 0)
    snapshots.wait()
    return losses, problems, newest, sorted(p.name for p in (own / "snapshots").glob(".*"))


def keep_apart(job: Job, words: str, folder, steps: int) -> list[float]:
    """`train_and_keep` where each rank has a disk of its own."""
    own = _own(folder)
    own.mkdir(exist_ok=True)
    return train_and_keep(job, words, own, steps)


def go_on_apart(job: Job, words: str, folder, steps: int) -> list[float]:
    """`go_on` where only the leader has snapshots."""
    own = _own(folder)
    if own.name != "disk0":
        assert not list((own / "snapshots").iterdir()), "parts are with the leader"
        (own / "snapshots").rmdir()
        own.rmdir()
    own.mkdir(exist_ok=True)
    found = go_on(job, words, own, steps)
    assert own.name == "disk0" or not list((own / "snapshots").iterdir())
    return found


def _own(folder):
    import torch.distributed as dist

    return folder / f"disk{dist.get_rank()}"


def go_on(job: Job, words: str, folder, steps: int) -> list[float]:
    """Losses of the steps after the newest snapshot, from weights that another seed drew."""
    from dataclasses import replace

    from edgetrain.training.servers.snapshots import Snapshots, latest

    start = (latest(folder) or (5,))[0]  # 5: on the leader's disk only
    rank = prepare_rank(job, Double(task_of(job)), parse(words), torch.device("cpu"), start)
    rank.held.hand_out(Double(task_of(job)), replace(job, seed=99).seed)
    Snapshots(rank, folder, 0).load(start)
    return _steps(rank, steps)


def _steps(rank, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = rank.steps.backward()
        rank.steps.step()
        losses.append(loss())
    return losses
