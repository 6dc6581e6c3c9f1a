"""Layers divided among tensor-parallel ranks, by a table of name patterns.

The words of the table are those of transformers' tp_plan: `colwise`, `rowwise`, and for layers
whose results or inputs the model takes apart `colwise_gather_output`, `rowwise_split_input`. With
split norms (Korthikanti et al., Reducing Activation Recomputation, MLSys 2023) each of these ranks
has a part of the sequence wherever layers are whole: the first block begins with a slice, norms
gather it for divided layers, whose results are scattered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.training.servers.attention import exchanged

PLACES = 1
"""The dimension of positions in what blocks pass on, [samples, positions, width]."""


def divide(module: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Divide the linear layers and embeddings whose names match the plan's patterns. ConfigError
    for an unknown word."""
    parallelize_module(module, mesh, _styles(module, plan, None))


def divide_with_norms(
    module: nn.Module, plan: dict[str, str], mesh: DeviceMesh, blocks: Sequence[str]
) -> None:
    """`divide`, and the norms of `blocks`, which run one after the other, work on a part of the
    sequence each. ConfigError for a module without any."""
    found = _styles(module, plan, Shard(PLACES))
    norms = {
        f"{block}.{name}": _SplitNorm(sequence_dim=PLACES)
        for block in blocks
        for name, child in module.get_submodule(block).named_modules()
        if _is_norm(child)
    }
    if not norms:
        raise ConfigError(
            "placement: norms=split, and the model's blocks have no LayerNorm or RMSNorm",
            "leave norms out",
        )
    parallelize_module(module, mesh, {**found, **norms})
    for block in blocks:
        for name, parameter in module.get_submodule(block).named_parameters():
            if not isinstance(parameter, DTensor):
                raise ConfigError(
                    f"placement: norms=split, and '{block}.{name}' is of no norm and not divided: "
                    "ranks would each train it on a part of the sequence",
                    "name it in tensor_plan, or leave norms out",
                )
    _keep_order([module.get_submodule(name) for name in blocks])
    first, last = (module.get_submodule(name) for name in (blocks[0], blocks[-1]))
    first.register_forward_pre_hook(lambda block, args: (_split(args[0], mesh), *args[1:]))
    last.register_forward_hook(lambda block, args, output: _joined(output, mesh))


def share_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its part of a module's experts (see tasks.experts): two all-to-alls bring
    positions to the ranks of their experts and back (Lepikhin et al., GShard, 2021)."""
    count, group = mesh.size(), mesh.get_group()

    for key, parameter in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(divided))

    def sent(module: nn.Module, given: tuple[Tensor]) -> DTensor:
        experts, positions, width = given[0].shape
        found = _Times.apply(given[0], float(count))  # type: ignore[no-untyped-call]
        found = exchanged(found, group).reshape(count, experts // count, positions, width)
        found = found.transpose(0, 1).reshape(experts // count, count * positions, width)
        return DTensor.from_local(found, mesh, [Shard(0)], run_check=False)

    def returned(module: nn.Module, given: Any, output: DTensor) -> Any:
        found = output.to_local()
        here, positions, width = found.shape
        found = found.reshape(here, count, positions // count, width).transpose(0, 1)
        found = exchanged(found.reshape(here * count, positions // count, width), group)
        return _Times.apply(found, 1 / count)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(sent)
    module.register_forward_hook(returned)


def _keep_order(blocks: Sequence[nn.Module]) -> None:
    """ConfigError, when they are called, for blocks that do not run once each, in this order:
    between the first and the last one ranks have parts of the sequence."""
    before = [0]

    def follow(place: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # it is computed again
        if not in_backward and place not in (0, before[0] + 1):
            raise ConfigError(
                "placement: norms=split, and the model's blocks do not run once each, one after "
                "the other",
                "leave norms out",
            )
        before[0] = place

    for place, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda own, given, place=place: follow(place))


class _Times(torch.autograd.Function):
    """A tensor as it is, and its gradient times a factor. An expert gets the gradients of all
    ranks' losses, of which the mean counts: they are divided where they come in, and multiplied
    where they leave."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _styles(
    module: nn.Module, plan: dict[str, str], results: Shard | None
) -> dict[str, ParallelStyle]:
    """How each layer is divided; `results`: what rows hand on is a slice of the sequence."""
    out, whole = results or Replicate(), Replicate()
    kinds = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=whole),
        "rowwise": RowwiseParallel(output_layouts=out),
        "rowwise_split_input": RowwiseParallel(input_layouts=whole, output_layouts=out),
    }
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if style not in kinds:
            raise ConfigError(
                f"the model's tensor_plan divides '{pattern}' in the way '{style}'",
                did_you_mean(style, kinds),
            )
        for name, child in module.named_modules():
            if fnmatchcase(name, pattern) and isinstance(child, nn.Linear | nn.Embedding):
                found[name] = kinds[style]
    return found


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(
        "RMSNorm"
    )


class _SplitNorm(SequenceParallel):
    """A norm that computes its part of the sequence, and hands the whole on: the sum of the
    gradients of the layers behind it is scattered on the way back."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = super()._apply(module, device_mesh)
        found.register_forward_hook(lambda norm, args, output: output.redistribute(
            placements=[Replicate()]
        ))  # fmt: skip
        return found


def _split(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a sequence that all ranks have; gradients are gathered."""
    if whole.shape[PLACES] % mesh.size():
        raise ConfigError(
            f"placement: norms=split over tensor={mesh.size()} of {whole.shape[PLACES]} positions",
            "a sequence that divides, or leave norms out",
        )
    found = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return found.redistribute(placements=[Shard(PLACES)]).to_local()


def _joined(part: Any, mesh: DeviceMesh) -> Any:
    """The whole sequence from the parts of all ranks; the gradient is split."""
    if isinstance(part, tuple):
        return (_joined(part[0], mesh), *part[1:])
    found = DTensor.from_local(part, mesh, [Shard(PLACES)], run_check=False)
    return found.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
