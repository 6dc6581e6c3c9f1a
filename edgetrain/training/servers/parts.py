"""A model cut into stages: by the names of its pieces, as a sequence, or by torch's tracer.

Stages are built without numbers (on the meta device) and keep the names of the whole model, so that
weights, snapshots and tied parameters need no table. A parameter that two stages hold is tied:
both copies get the sum of their gradients. Buffers, and tensors that modules have as plain
attributes, are named and handed out like parameters.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.utils._pytree import tree_map_only

from edgetrain.errors import ConfigError, quoted
from edgetrain.jobs.placement.words import Placement
from edgetrain.tasks.meta import outline_of, quiet
from edgetrain.tasks.profiling import pieces_of, traced
from edgetrain.tasks.protocol import Task

_WRAPPED = "_checkpoint_wrapped_module."
Example = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a model's call, for one micro-batch."""


@dataclass
class Parts:
    """The stages of a model. `holders` are the stages that hold each parameter and buffer, by its
    first name."""

    whole: nn.Module
    """Without numbers, if it can be."""
    names: dict[str, str]
    """Every name of a parameter or buffer, and its first one: shared ones have several."""
    holders: dict[str, list[int]]
    build: Callable[[int], nn.Module]
    """A fresh module of a stage."""
    how: str
    """"whole", "names", "sequence" or "tracer"."""
    pipe: Pipe | None = None
    units: dict[str, int] = field(default_factory=dict)
    """Modules that are sharded one by one, by name, and the layer that each is."""

    def tensors(self, module: nn.Module | None) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the model or a stage, by their first names; {} of None."""
        if module is None:
            return {}
        every = itertools.chain(module.named_parameters(), module.named_buffers())
        plain = ((_plain(name), tensor) for name, tensor in every)
        return {self.names[name]: tensor for name, tensor in plain if name in self.names}

    def tie(self, module: nn.Module) -> None:
        """Let all names of a parameter in a stage mean one again: torch's tracer makes copies of
        it, and a move to another device does."""
        first: dict[str, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            parent, _, leaf = name.rpartition(".")
            kept = first.setdefault(self.names.get(_plain(name), name), parameter)
            module.get_submodule(parent)._parameters[leaf] = kept


def _plain(name: str) -> str:
    """A tensor's name in the whole model. Torch's tracer numbers further calls of a module."""
    return re.sub(r"@\d+", "", name.replace(_WRAPPED, ""))


def cut(task: Task, placement: Placement, example: Example | None) -> Parts:
    """Cut the task's model as a placement says; `example` is needed by the tracer only.

    ConfigError for a model that can be neither traced nor cut, with torch's reason.
    """
    whole = with_buffers(outline_of(task).model)
    pieces = pieces_of(whole)
    names = _first_names(whole)
    units = {
        name: layer
        for layer, each in enumerate(pieces)
        for name in each
        if len(each) == 1 and _is_block(whole, name)
    }
    stages = placement.all_stages
    if stages == 1:
        holders = {first: [0] for first in names.values()}
        return Parts(whole, names, holders, lambda stage: _fresh(task, whole), "whole", None, units)
    edges = [0, *(placement.cuts or _even(len(pieces), stages)), len(pieces)]
    kept = [{name for piece in pieces[i:j] for name in piece} for i, j in itertools.pairwise(edges)]
    if getattr(whole, "pieces", None) is not None:
        every = {name for piece in pieces for name in piece}
        holders = _held(names, kept, every)

        def by_names(stage: int) -> nn.Module:
            return _without(_fresh(task, whole), every - kept[stage])

        return Parts(whole, names, holders, by_names, "names", None, units)
    if not traced(whole):
        holders = _held(names, kept, set(names))

        def in_sequence(stage: int) -> nn.Module:
            found = _fresh(task, whole)
            children = OrderedDict((n, m) for n, m in found.named_children() if n in kept[stage])
            return nn.Sequential(children)

        return Parts(whole, names, holders, in_sequence, "sequence", None, units)
    return _traced(whole, names, [pieces[at][0] for at in edges[1:-1]], example, units)


def _even(pieces: int, stages: int) -> tuple[int, ...]:
    if pieces < stages:
        raise ConfigError(f"{stages} stages of a model with {pieces} layers", f"at most {pieces}")
    return tuple(round(pieces * stage / stages) for stage in range(1, stages))


def _fresh(task: Task, whole: nn.Module) -> nn.Module:
    if any(p.device.type == "meta" for p in whole.parameters()):
        return with_buffers(outline_of(task).model)
    return copy.deepcopy(whole)


def with_buffers(model: nn.Module) -> nn.Module:
    """The model; tensors that are plain attributes of its modules become buffers, which have names
    and go along to other devices. The memory of all its tensors is in order, as collectives and
    shards have to have it: those that are not (transposed, slices, expanded) are copied."""
    ordered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # shared buffers stay shared
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, key)
                module.register_buffer(key, value, persistent=False)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided:
                pair = ordered.setdefault(id(buffer), (buffer, buffer.contiguous()))
                module._buffers[key] = pair[1]
    for parameter in model.parameters():
        if parameter.layout is torch.strided and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    return model


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    }


def _is_block(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_in(parameter: str, modules: set[str]) -> bool:
    return any(parameter == name or parameter.startswith(f"{name}.") for name in modules)


def _held(names: dict[str, str], kept: list[set[str]], every: set[str]) -> dict[str, list[int]]:
    """What no piece names is on every stage."""
    held: dict[str, list[int]] = {first: [] for first in names.values()}
    for name, first in names.items():
        anywhere = any(_is_in(name, modules) for modules in kept)
        for stage, modules in enumerate(kept):
            if (_is_in(name, modules) or not anywhere) and stage not in held[first]:
                held[first].append(stage)
    return held


def _without(model: nn.Module, absent: set[str]) -> nn.Module:
    for name in absent:
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = None
    return model


def _traced(
    whole: nn.Module,
    names: dict[str, str],
    begins: list[str],
    example: Example | None,
    units: dict[str, int],
) -> Parts:
    assert example is not None
    device = next(whole.parameters()).device
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)
    split = dict.fromkeys(begins, SplitPoint.BEGINNING)
    try:
        with quiet():
            pipe = pipeline(whole, args, kwargs, split_spec=split)
    except Exception as error:  # whatever the tracer meets in a model's code
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(
            f"the model cannot be cut into stages: {quoted(cause)}",
            "name its pieces (docs/how-to/gpu-servers.md), or place it without a pipeline",
        ) from None
    if pipe.num_stages != len(begins) + 1:
        raise ConfigError(
            f"the model cannot be cut at {', '.join(begins)}: torch makes {pipe.num_stages} stages",
            "other cuts, or name its pieces (`pieces`, docs/how-to/gpu-servers.md)",
        )
    if short := _called_short(pipe.split_gm):
        raise ConfigError(
            f"torch's tracer, which would cut this model, leaves out what '{short}' is called with",
            "name its pieces (docs/how-to/gpu-servers.md), or place it without a pipeline",
        )
    holders: dict[str, list[int]] = {first: [] for first in names.values()}
    for stage in range(pipe.num_stages):
        module: Any = pipe.get_stage_module(stage)
        for node in module.graph.nodes:  # stages receive into memory that is in order
            if isinstance(example := node.meta.get("val"), torch.Tensor):
                node.meta["val"] = example.contiguous()
        every = itertools.chain(module.named_parameters(), module.named_buffers())
        for name in (_plain(name) for name, _ in every):
            if name in names and stage not in holders[names[name]]:
                holders[names[name]].append(stage)
    return Parts(whole, names, holders, pipe.get_stage_module, "tracer", pipe, units)


def _called_short(cut: nn.Module) -> str:
    """The first module that the traced code calls with less than it takes, by name; "": none. Of
    what runs under `torch.no_grad` torch 2.13 makes a function inside the module, and calls the
    module for it, before the module's arguments are computed."""
    for name, caller in cut.named_modules():
        for node in getattr(getattr(caller, "graph", None), "nodes", ()):
            if node.op == "call_module":
                called: Any = caller.get_submodule(node.target)
                nodes = getattr(getattr(called, "graph", None), "nodes", ())
                wants = [each for each in nodes if each.op == "placeholder" and not each.args]
                if len(node.args) + len(node.kwargs) < len(wants):
                    return f"{name}.{node.target}".partition(".")[2]  # without the stage's
    return ""
