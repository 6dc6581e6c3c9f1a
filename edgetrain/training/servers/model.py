"""One rank's part of the model: built empty, divided, sharded, then filled by the leader.

The order is torch's: tensor parallel, recomputation, compiling, sharding. Weights are made by the
leader, rank 0, as a member of the job would make them, and handed out parameter by parameter;
nobody else ever has the whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from edgetrain.errors import ConfigError
from edgetrain.tasks.experts import expert_modules
from edgetrain.tasks.flat import FlatModel
from edgetrain.tasks.profiling import placed_modules, tensor_plan
from edgetrain.tasks.protocol import Task
from edgetrain.training.servers.attention import SplitAttention
from edgetrain.training.servers.dividing import divide, divide_with_norms, share_experts
from edgetrain.training.servers.dropping import Dropping
from edgetrain.training.servers.mesh import Ranks
from edgetrain.training.servers.parts import Parts

_WRAPPED = "_checkpoint_wrapped_module."


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
        self._divided: dict[str, int] = {}
        self._of_experts: set[str] = set()
        self.attention = self._split_attention()
        self.modules = [self._build(stage, precision) for stage in ranks.stages]
        self.own: list[dict[str, nn.Parameter]] = [
            {
                parts.names[name.replace(_WRAPPED, "")]: parameter
                for name, parameter in module.named_parameters()
            }
            for module in self.modules
        ]
        self.whole: FlatModel | None = None
        self._model: nn.Module | None = None
        self._tied = TiedGroups(self)

    # -- building ------------------------------------------------------------------------------

    def _build(self, stage: int, precision: str) -> nn.Module:
        module = self.parts.build(stage)
        self._within_attention(module)
        placement = self.ranks.placement
        if placement.tensor > 1:
            self._divide(module)
        experts = self._share_experts(module)
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
        for name in units:
            fully_shard(
                module.get_submodule(name), mesh=mesh, reshard_after_forward=again, mp_policy=policy
            )
        # The loss is computed in float32, and so do stages hand on what they have computed.
        fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=ends)
        if any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers())):
            module.to_empty(device=self.ranks.device)
        else:
            module.to(self.ranks.device)
        if placement.all_stages > 1:
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
        if self.parts.how == "tracer":
            raise ConfigError(
                "placement: sequence with a pipeline that torch's tracer cuts",
                "the model names its pieces, or leave one of both out",
            )
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
        if self.parts.how == "tracer":
            raise ConfigError(
                "placement: tensor with a pipeline that torch's tracer cuts",
                "the model names its pieces, or leave one of both out",
            )
        plan, mesh = tensor_plan(self.parts.whole), self.ranks.mesh["tensor"]
        blocks = [name for name in self.parts.units if _has(module, name)]
        if self.ranks.placement.norms == "split" and blocks:
            divide_with_norms(module, plan, mesh, blocks)
        else:
            divide(module, plan, mesh)
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
                self._divided[self.parts.names[name]] = parameter.placements[0].dim

    def _share_experts(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose experts this rank shares with others; it keeps its part of them."""
        mesh = self.ranks.experts
        if mesh is None:
            return []
        if self.parts.how == "tracer":
            raise ConfigError(
                "placement: experts with a pipeline that torch's tracer cuts",
                "the model names its pieces, or leave one of both out",
            )
        found = expert_modules(module)
        for name, each in found.items():
            share_experts(each, mesh["expert"])
            self._of_experts |= {
                self.parts.names[f"{name}.{own}"] for own, _ in each.named_parameters()
            }
        return list(found.values())

    # -- weights -------------------------------------------------------------------------------

    def hand_out(self, task: Task, seed: int) -> None:
        """Fill all ranks with the weights that a member of the job begins with. All ranks call it.

        The leader keeps the whole model, in main memory: `whole` is its flat vector.
        """
        if self.ranks.rank == 0:
            torch.manual_seed(seed)
            self._model = task.model()
            self.whole = FlatModel(self._model)
        self.scatter()

    def scatter(self) -> None:
        """Fill all ranks from the leader's model."""
        tensors = dict(self._model.named_parameters()) if self._model is not None else {}
        for name, shape in self._shapes():
            full = self._from_leader(tensors.get(name), shape)
            for own in self.own:
                if name in own:
                    self._fill(name, own[name], full)
        kept = dict(self._model.named_buffers()) if self._model is not None else {}
        for name, buffer in self.parts.whole.named_buffers():
            full = self._from_leader(kept.get(name), buffer)
            for module in self.modules:
                mine = dict(module.named_buffers())
                if name in mine:
                    mine[name].copy_(full)

    def _shapes(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.parts.whole.named_parameters()

    def _from_leader(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        full = (
            torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor.detach().cpu()
        )
        dist.broadcast(full, 0)
        return full

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter, full: Tensor) -> None:
        part = full
        if name in self._divided:
            count, place = self.ranks.placement.tensor, self.ranks.place("tensor")
            part = part.chunk(count, self._divided[name])[place]
        count, place = self.ranks.placement.divided, self.ranks.place("shard")
        if name in self._of_experts and self.ranks.experts is not None:
            count = self.ranks.placement.experts
            place = self.ranks.experts.get_local_rank("expert")
        if count > 1:
            chunks = part.chunk(count, 0)
            part = chunks[place] if place < len(chunks) else part[:0]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(part)

    def gather(self) -> nn.Module | None:
        """Bring the leader's whole model up to date. All ranks call it; only the leader gets it."""
        tensors = dict(self._model.named_parameters()) if self._model is not None else {}
        with torch.no_grad():
            for name, _ in self._shapes():
                self._gather_one(name, tensors.get(name))
        if self.whole is not None:
            self.whole.pull_params()
        return self._model

    def _gather_one(self, name: str, into: Tensor | None) -> None:
        ranks = self.ranks
        stage = self.parts.holders[name][0]
        holder = ranks.holder(stage)
        full: Tensor | None = None
        if ranks.place("pipeline") == holder:
            parameter = self.own[ranks.stages.index(stage)][name]
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
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

    def add_tied_gradients(self) -> None:
        """Give all copies of a tied parameter the sum of their gradients. All ranks call it."""
        self._tied.add()

    def copies(self, name: str) -> int:
        """Ranks of a stage that have the same part of a parameter."""
        placement = self.ranks.placement
        whole = 1 if name in self._divided else placement.tensor
        if name in self._of_experts:
            return placement.data // placement.experts * whole
        return placement.data // placement.divided * placement.sequence * whole

    def parameters(self) -> nn.ModuleList:
        """This rank's stages as one module, for an optimizer."""
        return nn.ModuleList(self.modules)


def _contiguous(module: nn.Module, args: Any, output: Any) -> Any:
    """What a stage passes on, as its transport wants it: convolutions have other strides."""
    return tree_map_only(Tensor, lambda tensor: tensor.contiguous(), output)


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
        self._tied: list[tuple[str, tuple[int, ...]]] = []
        for name, stages in held.parts.holders.items():
            if len(stages) > 1:
                places = tuple(sorted({ranks.holder(stage) for stage in stages}))
                self._tied.append((name, places))
        for places in sorted({places for _, places in self._tied}):
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
        place = self._held.ranks.place("pipeline")
        for name, places in self._tied:
            if place not in places:
                continue
            copies = [own[name] for own in self._held.own if name in own]
            total = sum(local_gradient(copy) for copy in copies)
            assert isinstance(total, Tensor)
            if (group := self._groups[places]) is not None:
                dist.all_reduce(total, group=group)
            for each in copies:
                local_gradient(each).copy_(total)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient; zeros if it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    found = parameter.grad
    return found.to_local() if isinstance(found, DTensor) else found
