"""The check before the first step: a group computes one small batch, and one process does, too.

The leader has the whole model, so it can compute what the group should: the loss, the gradient and
the buffers that a forward pass changes. What no rule of the planner foresees shows there. Dropout
and dropped layers are off. A model or a loss that draws other numbers draws the same ones on both
sides: one process then computes the micro-batches of all ranks, one after the other. The check
leaves nothing behind: gradients, buffers and generators are as they were, and the optimizer has not
stepped.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.job import Job
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.experts import set_share
from edgetrain.tasks.protocol import Batch, Task, counts_of
from edgetrain.training.servers.model import Held
from edgetrain.training.servers.owned import local_part
from edgetrain.training.servers.rank import Rank
from edgetrain.training.servers.steps import batches_of, own_buffers

DIFFERS = "servers.check: "
"""How the error of a group that computes something else begins."""
ROUNDING = {torch.float64: 1e-6}
MOST = 1e-3
"""Difference that is rounding, as a share of the gradient's length: of types not in ROUNDING."""
SHARE = 0.25
"""Largest share of the leader's main memory for the check."""
_SAMPLES = 2
"""Samples of each micro-batch."""
_STATE = 7
"""Seed of what is drawn within SameDraws."""
_DRAWS = "the model or its loss draws numbers besides dropout"
_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
    torch.ops.aten.dropout.default,
)  # fmt: skip


class WithoutDropout(TorchFunctionMode):
    """While it is entered nothing is dropped."""

    drawn: frozenset[str] = frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return kwargs["input"] if "input" in kwargs else args[0]
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class SameDraws(WithoutDropout):
    """Within it every function draws from the same state of torch's generator, so that its numbers
    follow from its arguments, wherever it is called. `drawn` are the shapes of what was drawn."""

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = torch.default_generator.manual_seed(_STATE).get_state()
        found = func(*args, **kwargs)
        if not torch.equal(before, torch.default_generator.get_state()):
            tensors = (t for t in tree_leaves(found) if isinstance(t, Tensor))
            self.drawn |= {str(tuple(local_part(t).shape)) for t in tensors}
        return found


@dataclass(frozen=True)
class Alone:
    """One process's result of a batch. An unused parameter has None."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    @property
    def length(self) -> float:
        return _length(self.gradients.values())

    def off(self, other: Alone) -> tuple[float, float]:
        """How far another's loss and gradient are from these, as shares of them."""
        pairs = [(a, other.gradients[n]) for n, a in self.gradients.items() if a is not None]
        apart = _length(a - b for a, b in pairs if b is not None)
        return _share(other.loss - self.loss, self.loss), apart / (self.length or 1.0)


def check_group(job: Job, task: Task, rank: Rank) -> str:
    """Compare what the group computes of one small batch with one process; why that is left out, or
    "". All ranks call it, before the first step. EdgetrainError for another result."""
    held, placement = rank.held, rank.ranks.placement
    alone, limits, reason, repeats = None, (MOST, MOST), "", True
    parts, apart = _parts(placement), _apart(placement)
    one: WithoutDropout = WithoutDropout()
    with _undone(rank):
        if held.model is not None:
            reason = _no_memory(held.model, job.servers.precision)
            if not reason:
                batches, again = (
                    [_small(job, task, rank, place, parts) for place in range(apart)]
                    for _ in range(2)
                )
                pairs = zip(_joined(batches), _joined(again), strict=True)
                repeats = all(torch.equal(*pair) for pair in pairs)
                alone, limits, reason, one = _in_one_process(job, task, rank, batches, parts)
        if reason := _told(reason):
            return f"servers.check is left out: {reason}"
        drawn = _told("\n".join(one.drawn))
        own = _small(job, task, rank, rank.ranks.data_rank % apart, parts)
        with SameDraws() if drawn else WithoutDropout() as group:
            loss = rank.steps.try_batch(own, parts)
        others = torch.tensor(not group.drawn <= set(drawn.split("\n"))).int()
        dist.all_reduce(others, op=dist.ReduceOp.MAX)
        if others:
            return f"servers.check is left out: {_DRAWS}, of other shapes than in one process"
        differences = (  # all of them: all ranks compute each together
            _compared_buffers(held, alone, limits[1]),
            _compared_gradients(rank, alone, loss, limits),
            _compared_replicas(held, alone, limits[1]),
        )
        said = next((each for each in differences if each), "")
        if said and not repeats:
            said = "is given other batches each time: draw them from the seed that `batches` gets"
    if said := _told(said):
        raise EdgetrainError(f"{DIFFERS}{placement} {said}")
    return ""


# -- the batch ------------------------------------------------------------------------------------


def _apart(placement: Placement) -> int:
    """Data ranks with samples of their own: others repeat them, so that one process has few."""
    return next(n for n in range(min(2, placement.data), placement.data + 1)
                if placement.data % n == 0)  # fmt: skip


def _parts(placement: Placement) -> int:
    """Micro-batches: as few as the schedule can do with, two of them if the placement has any."""
    least = {"interleaved": placement.pipeline, "dualpipev": placement.all_stages}
    if placement.pipeline == 1:
        return min(2, placement.microbatches)
    return least.get(placement.schedule, min(2, placement.microbatches))


def _small(job: Job, task: Task, rank: Rank, data_rank: int, parts: int) -> Batch:
    """The first samples of what a data rank begins with."""
    placement, held = rank.ranks.placement, rank.held
    batch = next(batches_of(task, job, placement.data, data_rank))
    each = len(batch[0]) // (job.train.accumulate * placement.microbatches)
    if held.parts.how != "tracer" and not held.compiler:  # their code is made for one size
        each = min(each, _SAMPLES)
    return tuple(tensor[: each * parts] for tensor in batch)


def _joined(batches: Iterable[Batch]) -> Batch:
    return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))


# -- one process ----------------------------------------------------------------------------------


def _no_memory(model: nn.Module, precision: str) -> str:
    """Why the check does not fit; ""."""
    import psutil

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    needs = size * (5 if precision == "bf16" else 2)  # gradients, a copy of one, and all in bf16
    has = SHARE * psutil.virtual_memory().total
    if needs <= has:
        return ""
    return (
        f"it takes {needs / 1e9:.3g} GB of the leader's main memory, and may have {has / 1e9:.3g}"
    )


def _in_one_process(
    job: Job, task: Task, rank: Rank, batches: Sequence[Batch], parts: int
) -> tuple[Alone | None, tuple[float, float], str, WithoutDropout]:
    """What one process computes, how far a group may be off, why nothing can be compared, and what
    it was computed within."""
    held, model, mode = rank.held, rank.held.model, WithoutDropout()
    assert model is not None
    each = [_joined(batches)]
    generator = torch.get_rng_state()
    with mode:
        alone = _computed(task, held, model, each)
    if not torch.equal(generator, torch.get_rng_state()):
        if held.compiler or rank.ranks.device.type != "cpu":
            return None, (0.0, 0.0), f"{_DRAWS}, and ranks draw others", mode
        split = ([tensor.tensor_split(parts) for tensor in batch] for batch in batches)
        each = [micro for tensors in split for micro in zip(*tensors, strict=True)]
        mode = SameDraws()
        with mode:
            alone = _computed(task, held, model, each)
    if not math.isfinite(alone.loss) or not math.isfinite(alone.length):
        return None, (0.0, 0.0), "loss and gradient of one process are not finite", mode
    types = [tensor.dtype for tensor in alone.gradients.values() if tensor is not None]
    most = ROUNDING.get(types[0], MOST) if types else MOST
    if job.servers.precision == "bf16":
        with mode:
            loss, gradient = alone.off(_computed(task, held, _in_bf16(model), each))
        return alone, (max(most, 2 * loss), max(most, 2 * gradient)), "", mode
    return alone, (most, most), "", mode


def _computed(task: Task, held: Held, model: nn.Module, batches: Sequence[Batch]) -> Alone:
    """Results of these micro-batches together."""
    counts = counts_of(task, batches) if len(batches) > 1 else np.ones(1)
    set_share(model, 1 / len(batches))
    with own_buffers(model):
        losses = [
            task.loss(model, batch) * share
            for batch, share in zip(batches, counts / counts.sum(), strict=True)
            if share
        ]
        loss = torch.stack(losses).sum()
        tensors = held.parts.tensors(model)
        named = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        buffers = {n: t for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
    return Alone(float(loss.detach()), dict(zip(named, found, strict=True)), buffers)


def _in_bf16(model: nn.Module) -> nn.Module:
    """A copy that computes as torch's sharding does with `precision = "bf16"`."""
    found = copy.deepcopy(model)
    for parameter in found.parameters():
        parameter.data = parameter.data.bfloat16()

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    found.register_forward_pre_hook(
        lambda module, args, kwargs: (cast(args, torch.bfloat16), cast(kwargs, torch.bfloat16)),
        with_kwargs=True,
    )
    found.register_forward_hook(lambda module, args, output: cast(output, torch.float32))
    return found


# -- the comparison -------------------------------------------------------------------------------


def _compared_gradients(
    rank: Rank, alone: Alone | None, loss: float, limits: tuple[float, float]
) -> str:
    """What the group has computed otherwise, on the leader."""
    held = rank.held
    shapes = held.parts.tensors(held.parts.whole)
    own = held.gradients()
    off: dict[str, float] = {}
    length = 0.0
    for name in _used(held):
        into = None if alone is None else torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
        held.gather_one(name, own, into)
        if alone is not None and into is not None:
            one = alone.gradients.get(name)
            length = math.hypot(length, _length([into]))
            # Zeros are not the same as no gradient: weight decay shrinks what has one.
            off[name] = (
                _length([into - one]) if one is not None else _decay(rank) or _length([into])
            )
    if alone is None:
        return ""
    for name, gradient in alone.gradients.items():
        off.setdefault(name, _length([gradient]))
    apart = math.hypot(*off.values()) / (alone.length or 1.0)
    if apart <= limits[1] and _share(loss - alone.loss, alone.loss) <= limits[0]:
        return ""
    worst = max(off, key=lambda name: math.inf if math.isnan(off[name]) else off[name])
    return (
        f"computes the loss {loss:.9g} and a gradient of length {length:.6g} for one small batch, "
        f"one process {alone.loss:.9g} and {alone.length:.6g}; the gradient of '{worst}' differs "
        "most"
    )


def _used(held: Held) -> list[str]:
    """The parameters that have a gradient on any rank."""
    names = [name for name, stages in held.parts.holders.items() if stages]
    has = torch.zeros(len(names), dtype=torch.uint8)
    for own in held.own:
        for place, name in enumerate(names):
            if name in own and own[name].grad is not None:
                has[place] = 1
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    return [name for name, used in zip(names, has.tolist(), strict=True) if used]


def _compared_replicas(held: Held, alone: Alone | None, limit: float) -> str:
    """The parameter whose gradient differs among ranks that have the same part, on the leader."""
    names = list(held.parts.holders)
    mine = torch.zeros(len(names), 3, dtype=torch.float64)  # a part's number from 1, its gradient
    for own in held.own:
        for place, name in enumerate(names):
            if name in own and (gradient := own[name].grad) is not None:
                local = local_part(gradient).double().cpu()
                sums = [local.sum(), torch.linalg.vector_norm(local)]
                mine[place] = torch.tensor([_part(own[name]), *sums])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if alone is None:
        return ""
    for place, name in enumerate(names):
        first: dict[float, Tensor] = {}
        for part, *found in (each[place] for each in every):
            here = torch.stack(found)
            apart = float((first.setdefault(float(part), here) - here).abs().max())
            if part and not apart <= limit * (alone.length or 1.0):
                return f"has other gradients of '{name}' on ranks that hold the same part of it"
    return ""


def _part(parameter: nn.Parameter) -> int:
    """The number of this rank's part of a parameter, from 1: the same for copies of it."""
    number = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number + 1


def _decay(rank: Rank) -> float:
    """Infinite where the optimizer shrinks parameters whose gradient is zero."""
    groups = rank.steps.optimizer.param_groups
    return math.inf if any(group.get("weight_decay") for group in groups) else 0.0


def _compared_buffers(held: Held, alone: Alone | None, limit: float) -> str:
    """The buffer that is most off on any rank, on the leader."""
    worst, said, own = limit, "", held.tensors
    for name, like in held.parts.tensors(held.parts.whole).items():
        if isinstance(like, nn.Parameter):
            continue
        expected = torch.empty(like.shape, dtype=like.dtype)
        if alone is not None:
            expected.copy_(alone.buffers[name])
        dist.broadcast(expected, 0)
        off = torch.zeros(1, dtype=torch.float64)
        for each in own:
            if name in each:
                off = torch.maximum(off, _off(each[name].cpu(), expected))
        dist.all_reduce(off, op=dist.ReduceOp.MAX)
        if float(off) > worst:
            worst = float(off)
            said = f"leaves the buffer '{name}' other than one process does, by {worst:.3g} of it"
    return said if alone is not None else ""


def _off(mine: Tensor, expected: Tensor) -> Tensor:
    """The largest difference of two buffers, as a share of the largest number; infinite if one of
    them has numbers that are none."""
    a, b = mine.double(), expected.double()
    apart = torch.where(a == b, 0.0, (a - b).abs()).reshape(-1)
    finite = b[b.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    most = float(apart.nan_to_num(math.inf).max()) if apart.numel() else 0.0
    return torch.tensor([most / (largest or 1.0)], dtype=torch.float64)


def _length(tensors: Any) -> float:
    squares = (float(torch.linalg.vector_norm(t.double())) ** 2 for t in tensors if t is not None)
    return math.sqrt(sum(squares))


def _share(apart: float, of: float) -> float:
    return math.inf if math.isnan(apart) else abs(apart) / max(abs(of), 0.01)


# -- around it ------------------------------------------------------------------------------------


def _told(text: str) -> str:
    said = text.encode()
    size = torch.tensor([len(said)])
    dist.broadcast(size, 0)
    if not int(size):
        return ""
    content = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        content.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    dist.broadcast(content, 0)
    return bytes(content.tolist()).decode()


@contextmanager
def _undone(rank: Rank) -> Iterator[None]:
    """What is computed within leaves nothing behind."""
    device = rank.ranks.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([] if device.type == "cpu" else [device]))
        for module in rank.held.modules:
            stack.enter_context(own_buffers(module))
        try:
            yield
        finally:
            rank.steps.optimizer.zero_grad()
