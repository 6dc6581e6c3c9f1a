"""One rank's part of the model: built empty, divided, sharded, then filled by the leader.

The order is torch's: tensor parallel, recomputation, compiling, sharding. Weights are made by the
leader, rank 0, as a member of the job would make them, and handed out tensor by tensor; nobody else
ever has the whole model. torch's `set_model_state_dict` would do it for parameters, and leaves
buffers out that are not in the state dict, as masks mostly are.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from edgetrain.errors import ConfigError
from edgetrain.tasks.draws import model_of
from edgetrain.tasks.experts import expert_modules
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.profiling import placed_modules, tensor_plan
from edgetrain.tasks.protocol import Task
from edgetrain.training.servers.attention import SplitAttention
from edgetrain.training.servers.dividing import divide, divide_with_norms, share_experts
from edgetrain.training.servers.dropping import Dropping
from edgetrain.training.servers.mesh import Ranks
from edgetrain.training.servers.parts import Parts, with_buffers


class Held:
    """The stages of one rank, and the whole model on the leader.

    `modules` are this rank's stages, in the order of `ranks.stages`. `own` are its parameters by
    the first name that the whole model has for them, once for each stage that holds them.
    """

    def __init__(
        self,
        parts: Parts,
        ranks: Ranks,
        precision: str,
        compiler: str = "",
        dropping: Dropping | None = None,
    ) -> None:
        """Empty: `hand_out` fills it. `compiler` is the backend of torch.compile; "": none."""
        self.parts, self.ranks, self.compiler = parts, ranks, compiler
        self.dropping = dropping
        self.attention = self._split_attention()
        self.modules = [self._build(stage, precision) for stage in ranks.stages]
        self.own: list[dict[str, nn.Parameter]] = [
            {
                name: tensor
                for name, tensor in parts.tensors(module).items()
                if isinstance(tensor, nn.Parameter)
            }
            for module in self.modules
        ]
        self.whole: FlatModel | None = None
        self._model: nn.Module | None = None
        self._tied = TiedGroups(self)

    # -- building ------------------------------------------------------------------------------

    def _build(self, stage: int, precision: str) -> nn.Module:
        module = self.parts.build(stage)
        self.parts.tie(module)
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        self._within_attention(module)
        placement = self.ranks.placement
        if placement.tensor > 1:
            self._divide(module)
        experts = self._share_experts(module)
        for name in frozen:  # torch makes divided parameters anew, to be trained
            module.get_parameter(name).requires_grad_(False)
        units = [n for n in self.parts.units if _has(module, n)]
        if self.dropping is not None:
            for name in units:
                self.dropping.apply(module, name)
        for name in units:
            if placement.recomputes(self.parts.units[name]):
                parent, _, leaf = name.rpartition(".")
                wrapped = checkpoint_wrapper(
                    module.get_submodule(name),
                    checkpoint_impl=CheckpointImpl.NO_REENTRANT,
                    **({"context_fn": self._again} if self.attention else {}),
                )
                module.get_submodule(parent)._modules[leaf] = wrapped
        if self.compiler:
            # Schedules that compute the gradients of weights apart go backward twice.
            torch._functorch.config.donated_buffer = False
            for name in units:
                module.get_submodule(name).compile(backend=self.compiler)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32 if precision == "bf16" else None,
        )
        ends = dataclasses.replace(policy, output_dtype=policy.reduce_dtype)
        mesh = self.ranks.mesh["replicate", "shard"]
        again = placement.zero >= 3
        for each in experts:
            assert self.ranks.experts is not None
            fully_shard(each, mesh=self.ranks.experts["copies", "single"], mp_policy=policy)
        if mesh.size() > 1 or experts or precision == "bf16":
            scalars = {p for p in module.parameters() if not p.dim()}  # every rank has them whole
            shard = partial(
                fully_shard, mesh=mesh, reshard_after_forward=again, ignored_params=scalars
            )
            for name in _apart(module, units):
                shard(module.get_submodule(name), mp_policy=policy)
            # The loss is computed in float32, and so do stages hand on what they have computed.
            shard(module, mp_policy=ends)
        _move(module, self.ranks.device)
        self.parts.tie(module)
        if placement.all_stages > 1:
            module.register_forward_pre_hook(_sent_back_contiguous)
            module.register_forward_hook(_contiguous)
        return module

    def _again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Within what a block is computed, and computed again: that is in the backward pass, where
        the forward pass of its stage, and what it is within, is over."""
        return nullcontext(), self.attention or nullcontext()

    def _within_attention(self, module: nn.Module) -> None:
        attention, forward = self.attention, module.forward
        if attention is None:
            return

        def within(*args: Any, **kwargs: Any) -> Any:
            with attention:
                return forward(*args, **kwargs)

        module.forward = within

    def _split_attention(self) -> SplitAttention | None:
        """What attends over the slices of all ranks; None: each has whole sequences."""
        slices, placement = self.ranks.slices, self.ranks.placement
        if slices is None:
            return None
        self._refuse_tracer("sequence")
        ring = slices["ring"].get_group() if placement.ring > 1 else None
        ulysses = slices["ulysses"].get_group() if placement.ulysses > 1 else None
        return SplitAttention(ring, ulysses)

    def tell_place(self, length: int) -> None:
        """Tell this rank's modules that their inputs are its slice of sequences, `length` of
        them."""
        for module in self.modules:
            for each in placed_modules(module):
                setattr(each, "first_place", self.ranks.slice * length)  # noqa: B010

    def _divide(self, module: nn.Module) -> None:
        self._refuse_tracer("tensor")
        plan, mesh = tensor_plan(self.parts.whole), self.ranks.mesh["tensor"]
        blocks = [name for name in self.parts.units if _has(module, name)]
        if self.ranks.placement.norms == "split" and blocks:
            divide_with_norms(module, plan, mesh, blocks)
        else:
            divide(module, plan, mesh)

    def _refuse_tracer(self, what: str) -> None:
        if self.parts.how == "tracer":
            raise ConfigError(
                f"placement: {what} with a pipeline that torch's tracer cuts",
                "the model names its pieces, or leave one of both out",
            )

    def _share_experts(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose experts this rank shares with others; it keeps its part of them."""
        mesh = self.ranks.experts
        if mesh is None:
            return []
        self._refuse_tracer("experts")
        found = list(expert_modules(module).values())
        for each in found:
            share_experts(each, mesh["expert"])
        return found

    # -- weights -------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[dict[str, Tensor]]:
        """This rank's parts of parameters and buffers, by their first names, once for each stage
        that holds them. Buffers may be others after a forward pass; one of another shape is no
        state of the model, and stays here."""
        whole, found = self.parts.tensors(self.parts.whole), []
        for module, own in zip(self.modules, self.own, strict=True):
            kept = {n: t for n, t in self.parts.tensors(module).items() if n not in own}
            for name, tensor in kept.items():
                if tensor.shape != whole[name].shape:
                    kept[name] = torch.zeros_like(whole[name], device=tensor.device)
            found.append(own | kept)
        return found

    @property
    def model(self) -> nn.Module | None:
        """The whole model, on the leader, as it was gathered last."""
        return self._model

    def hand_out(
        self, task: Task, seed: int, frozen: str = "equal", statistics: bool = False
    ) -> None:
        """Fill all ranks with the weights that a member of the job begins with. All ranks call it.

        The leader keeps the whole model, in main memory: `whole` is its flat vector; `frozen` and
        `statistics` are FlatModel's.
        """
        if self.ranks.rank == 0:
            self._model = with_buffers(model_of(task, seed))
            self.whole = FlatModel(self._model, frozen=frozen, statistics=statistics)
        self.scatter()

    @torch.no_grad()
    def scatter(self) -> None:
        theirs, held = self.parts.tensors(self._model), self.tensors
        for name, like in self.parts.tensors(self.parts.whole).items():
            full = (
                theirs[name].detach().cpu() if self._model is not None
                else torch.empty(like.shape, dtype=like.dtype)
            )  # fmt: skip
            dist.broadcast(full, 0)
            for each in held:
                if name in each:
                    _fill(each[name], full)

    def gather(self) -> nn.Module | None:
        """Bring the leader's whole model up to date. All ranks call it; only the leader gets it."""
        self._gather(self.parts.tensors(self.parts.whole))
        if self.whole is not None:
            self.whole.pull_params()
        return self._model

    def gather_buffers(self, but: Collection[str] = ()) -> nn.Module | None:
        """Bring buffers of the leader's whole model up to date, `but` for these; see `gather`."""
        whole = self.parts.whole
        trained = dict(whole.named_parameters())
        names = self.parts.tensors(whole)
        self._gather(name for name in names if name not in trained and name not in but)
        return self._model

    def _gather(self, names: Iterable[str]) -> None:
        tensors, held = self.parts.tensors(self._model), self.tensors
        with torch.no_grad():
            for name in names:
                if self.parts.holders[name]:  # torch's tracer drops what nothing uses
                    self.gather_one(name, held, tensors.get(name))

    def gather_one(
        self, name: str, held: Sequence[Mapping[str, Tensor]], into: Tensor | None
    ) -> None:
        """Copy what stages hold under a name, whole, to `into`, which only the leader has. All
        ranks call it; `held` has their tensors, or gradients, once for each stage."""
        ranks = self.ranks
        stage = self.parts.holders[name][0]
        holder = ranks.holder(stage)
        full: Tensor | None = None
        if ranks.place("pipeline") == holder:
            found = held[ranks.stages.index(stage)][name]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            full = found.detach().cpu().contiguous()
        owner = ranks.rank_at(holder)
        if owner == 0:
            if into is not None and full is not None:
                into.copy_(full)
        elif ranks.rank == owner and full is not None:
            dist.send(full, 0)
        elif into is not None:
            received = torch.empty(into.shape, dtype=into.dtype)
            dist.recv(received, owner)
            into.copy_(received)

    # -- gradients -----------------------------------------------------------------------------

    def gradients(self) -> list[dict[str, Tensor]]:
        """This rank's parts of the gradient, as `own`; zeros where there is none."""
        return [
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in each.items()}
            for each in self.own
        ]

    def gather_gradients(self) -> None:
        """Bring the gradients of the leader's whole model up to date. A parameter that no rank has
        a gradient of has none there either. All ranks call it."""
        names, theirs = self._trained(), dict(self._model.named_parameters()) if self._model else {}
        own = self.gradients()
        reached = torch.tensor(
            [any(n in each and each[n].grad is not None for each in self.own) for n in names]
        ).int()
        dist.all_reduce(reached, op=dist.ReduceOp.MAX)
        if self.whole is not None:
            self.whole.zero_grad()
        for name, is_reached in zip(names, reached, strict=True):
            parameter = theirs.get(name)
            if is_reached:
                self.gather_one(name, own, None if parameter is None else parameter.grad)
            elif parameter is not None:
                parameter.grad = None
        if self.whole is not None:
            self.whole.pull_gradient()

    @torch.no_grad()
    def scatter_gradients(self) -> None:
        """Give all ranks the gradients of the leader's whole model. All ranks call it."""
        names, theirs = self._trained(), dict(self._model.named_parameters()) if self._model else {}
        reached = torch.tensor(
            [n in theirs and theirs[n].grad is not None for n in names], dtype=torch.int32
        )
        dist.broadcast(reached, 0)
        shapes = dict(self.parts.whole.named_parameters())
        for name, is_reached in zip(names, reached, strict=True):
            found = theirs[name].grad if is_reached and theirs else None
            if is_reached:
                like = shapes[name]
                full = (
                    torch.empty(like.shape, dtype=like.dtype) if found is None
                    else found.contiguous()
                )  # fmt: skip
                dist.broadcast(full, 0)
            for parameter in (each[name] for each in self.own if name in each):
                if not is_reached:
                    parameter.grad = None
                    continue
                parameter.grad = torch.zeros_like(parameter)  # it may have been a partial sum
                _fill(parameter.grad, full)

    def _trained(self) -> list[str]:
        """The names of the whole model's trained parameters that a stage holds, each once."""
        named = self.parts.whole.named_parameters()
        return [name for name, p in named if p.requires_grad and self.parts.holders[name]]

    def add_tied_gradients(self) -> None:
        """Give all copies of a tied parameter the sum of their gradients, and scalars, which are
        not sharded, the mean over the ranks with other samples. All ranks call it."""
        mesh = self.ranks.mesh
        for parameter in (p for own in self.own for p in own.values()):
            if parameter.dim() or not parameter.requires_grad:
                continue
            is_used = torch.full_like(parameter.data, parameter.grad is not None)
            total = torch.stack([local_gradient(parameter), is_used])
            for axis in ("replicate", "shard"):
                dist.all_reduce(total, group=mesh[axis].get_group())
            count = mesh["replicate"].size() * mesh["shard"].size()
            parameter.grad = total[0] / count if total[1] else None
        self._tied.add()

    def copies(self, parameter: nn.Parameter) -> int:
        """Ranks of a stage that have the same part of a parameter."""
        parts = 1
        if isinstance(parameter, DTensor):
            axes = enumerate(parameter.placements)
            parts = math.prod(
                parameter.device_mesh.size(axis) for axis, each in axes if not each.is_replicate()
            )
        return self.ranks.placement.width // parts

    def parameters(self) -> nn.ModuleList:
        return nn.ModuleList(self.modules)


def _fill(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full`, which all ranks have, into a tensor."""
    if isinstance(tensor, DTensor):
        whole = full.to(tensor.device)
        mesh, placements = tensor.device_mesh, tensor.placements
        full = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.copy_(full)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device: with memory for what has no numbers, and buffers that modules
    share shared there, which `to` and `to_empty` do not keep."""
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        found = made.get(id(tensor))
        if found is None:
            empty = tensor.is_meta
            found = torch.empty_like(tensor, device=device) if empty else tensor.to(device)
            if not isinstance(tensor, nn.Parameter):
                made[id(tensor)] = found
        return found

    module._apply(moved)  # type: ignore[no-untyped-call]


def _sent_back_contiguous(module: nn.Module, args: Any) -> None:
    for tensor in tree_leaves(args):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]


def _contiguous(module: nn.Module, args: Any, output: Any) -> Any:
    """What a stage passes on, as its transport wants it: convolutions have other strides. The next
    stage sends a gradient back of what a frozen stage passes on, too."""

    def passed(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        wants = tensor.is_floating_point() and torch.is_grad_enabled() and not tensor.requires_grad
        return tensor.detach().requires_grad_() if wants else tensor

    return tree_map_only(Tensor, passed, output)


def _apart(module: nn.Module, units: Sequence[str]) -> list[str]:
    """The units that share no parameter with anything else: these can be sharded one by one."""
    users = defaultdict[nn.Parameter, set[str]](set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users[parameter].add(next((u for u in units if name.startswith(f"{u}.")), ""))
    own = {unit: module.get_submodule(unit).parameters() for unit in units}
    return [unit for unit, mine in own.items() if all(users[each] == {unit} for each in mine)]


def _has(module: nn.Module, name: str) -> bool:
    try:
        return module.get_submodule(name) is not None
    except AttributeError:
        return False


class TiedGroups:
    """Parameters that several stages hold, and the ranks that hold them."""

    def __init__(self, held: Held) -> None:
        self._held, ranks = held, held.ranks
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._tied: dict[tuple[int, ...], list[str]] = {}
        trained = dict(held.parts.whole.named_parameters())
        for name, stages in held.parts.holders.items():
            if len(stages) > 1 and name in trained:
                places = tuple(sorted({ranks.holder(stage) for stage in stages}))
                self._tied.setdefault(places, []).append(name)
        for places in sorted(self._tied):
            self._groups[places] = self._group(places)

    def _group(self, places: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The one that this rank is in, of those of all ranks of a stage. All ranks make all
        of them, in the same order."""
        ranks, mine = self._held.ranks, None
        if len(places) == 1:
            return None
        for within in range(ranks.placement.width):
            members = [ranks.rank_at(place, within) for place in places]
            group = dist.new_group(members)
            if ranks.rank in members:
                mine = group
        return mine

    def add(self) -> None:
        """Sum the gradients of all copies. A parameter that no copy has a gradient of keeps none:
        an optimizer would move it by its weight decay."""
        place = self._held.ranks.place("pipeline")
        for places, group in self._groups.items():
            if place not in places:
                continue
            names = self._tied[places]
            copies = [[own[name] for own in self._held.own if name in own] for name in names]
            reached = torch.tensor([any(c.grad is not None for c in each) for each in copies])
            reached = reached.int()
            if group is not None:
                dist.all_reduce(reached, group=group)
            for each in (each for each, is_used in zip(copies, reached, strict=True) if is_used):
                total = sum(local_gradient(copy) for copy in each)
                assert isinstance(total, Tensor)
                if group is not None:
                    dist.all_reduce(total, group=group)
                for copy in each:
                    local_gradient(copy).copy_(total)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient; zeros if it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    found = parameter.grad
    return found.to_local() if isinstance(found, DTensor) else found
