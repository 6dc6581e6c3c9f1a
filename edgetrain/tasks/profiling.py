"""What a model's layers cost, without the memory that it would take.

One step of the task runs on fake tensors: shapes without numbers. Layers are found by structure, or
the model names them (`pieces`). A task needs nothing for it: what its model is called with, and the
loss of what it answers, come out of `Task.loss` with a stand-in for the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from edgetrain.errors import TaskError
from edgetrain.tasks.experts import expert_modules
from edgetrain.tasks.layers import Layer, Model
from edgetrain.tasks.losses import scalar_of
from edgetrain.tasks.meta import without_numbers
from edgetrain.tasks.protocol import Batch, Task

# -- a task without its model ---------------------------------------------------------------------


class _Seen(Exception):
    """The model was called."""


class _StandIn(nn.Module):
    """In place of the model: answers with what was computed elsewhere; without that a call goes no
    further."""

    def __init__(self, *answer: Any) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(()))
        self._answer, self.calls = answer, list[tuple[tuple[Any, ...], dict[str, Any]]]()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if not self._answer:
            raise _Seen
        return self._answer[0]


def inputs_of(task: Task, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the task calls its model with, for this batch. TaskError if it does not call it."""
    model = _StandIn()
    with contextlib.suppress(_Seen):
        task.loss(model, batch)
    if not model.calls:
        raise TaskError(
            f"task '{task.name}': loss(model, batch) does not call the model",
            "only a model that is called can be cut into stages",
        )
    return model.calls[-1]


def loss_of(task: Task, output: Any, batch: Batch) -> Tensor:
    """The task's loss for an output that was computed elsewhere. TaskError if it calls its model
    more than once: one output cannot be the answer to several calls."""
    model = _StandIn(output)
    found = task.loss(model, batch)
    if len(model.calls) != 1:
        raise TaskError(
            f"task '{task.name}': loss(model, batch) calls the model {len(model.calls)} times",
            "a model that is cut into stages is called once",
        )
    return found


# -- layers ---------------------------------------------------------------------------------------


def pieces_of(model: nn.Module) -> list[tuple[str, ...]]:
    """The modules of each layer, by name, in the order they run: as the model's `pieces` says, or
    its children, with lists, dictionaries and sequences of modules opened, and what is around a
    list of layers. A module that another one is made of is no piece, whatever its second name."""
    named = getattr(model, "pieces", None)
    if named is not None:
        return [tuple(each) for each in named]
    found: dict[nn.Module, str] = {}
    for name in _opened(model, "", type(model) is nn.Sequential):
        found.setdefault(model.get_submodule(name), name)
    inner = {each for module in found for each in list(module.modules())[1:]}
    return [(name,) for module, name in found.items() if module not in inner]


def traced(model: nn.Module) -> bool:
    """Whether only torch's tracer can cut this model into stages: it does not name its pieces, and
    is no sequence of modules."""
    is_sequence = isinstance(model, nn.Sequential) and all(
        len(piece) == 1 and "." not in piece[0] for piece in pieces_of(model)
    )
    return getattr(model, "pieces", None) is None and not is_sequence


def _opened(module: nn.Module, prefix: str, in_list: bool) -> Iterator[str]:
    for name, child in module.named_children():
        holds = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if (holds and len(list(child.children()))) or (not in_list and _has_layers(child)):
            yield from _opened(child, f"{prefix}{name}.", in_list or holds)
        else:
            yield prefix + name


def _has_layers(module: nn.Module) -> bool:
    """Whether a list of alike layers, each of several modules, is in it or in one of its own."""
    lists = [each for each in module.children() if isinstance(each, nn.ModuleList | nn.Sequential)]
    return any(
        len(each) > 1
        and len({type(layer) for layer in each}) == 1
        and len(list(each[0].children()))
        for each in lists
    ) or any(_has_layers(child) for child in module.children() if child not in lists)


def profile(task: Task, batch: Batch) -> Model:
    """The layers of the task's model in a step of this batch, [samples, …], seen for its shapes."""
    with without_numbers():
        model = task.model()
        found, pieces = layers_of(model), pieces_of(model)
        # Two passes: the flop counter decomposes composite operators, which would count twice.
        # Of every module by name ("" is the whole): in the forward pass, and in both
        model.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False, depth=None) as first:  # type: ignore[arg-type]
            scalar_of(task, task.loss(model, batch))
        with FlopCounterMode(display=False, depth=None) as second:  # type: ignore[arg-type]
            loss = task.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        forward, both = _by_name(model, first), _by_name(model, second)
        watch = _Watch(model, pieces)
        with watch, _Attentions(watch, found), _routed(watch, found, model, len(batch[0])):
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        _fill(found.layers, pieces, forward, both, watch, len(batch[0]))
        found.knows_place = (
            bool(placed_modules(model)) or "position_ids" in inputs_of(task, batch)[1]
        )
    return found


def layers_of(model: nn.Module) -> Model:
    """The layers of a model, with their parameters and no other figures."""
    found = _counted_parameters(model, pieces_of(model))
    module, plan = _planned(model)
    heads = ("num_key_value_heads", *(["num_attention_heads"] if plan else []))
    told = (getattr(_config(module), name, 0) for name in heads)
    found.heads = int(getattr(model, "heads", 0) or next(filter(None, told), 0))
    return found


def placed_modules(model: nn.Module) -> list[nn.Module]:
    """Those that can be told which positions their inputs are, by their `first_place`."""
    return [each for each in model.modules() if hasattr(each, "first_place")]


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Name patterns of linear layers and how each is divided, in the words of transformers, whose
    plans count from the model that a head is on; {} if neither the model nor a part of it says."""
    return _planned(model)[1]


def _planned(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """The first module of whose plan a pattern hits, and its plan; else the first with a plan: what
    wraps a model may answer for it (peft)."""
    found: list[tuple[nn.Module, dict[str, str]]] = []
    names = [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        said = getattr(_config(module), "base_model_tp_plan", None)
        plan: dict[str, str] | None = getattr(module, "tensor_plan", said)
        base = "" if hasattr(module, "tensor_plan") else getattr(module, "base_model_prefix", "")
        if plan is not None:
            inside = [each for each in (name, base if hasattr(module, base) else "") if each]
            whole = {".".join([*inside, pattern]): style for pattern, style in plan.items()}
            found.append((module, whole))
            if any(fnmatchcase(each, pattern) for each in names for pattern in whole):
                return found[-1]
    return found[0] if found else (model, {})


def _counted_parameters(model: nn.Module, pieces: list[tuple[str, ...]]) -> Model:
    layers = [Layer(names[0]) for names in pieces or [("model",)]]
    homes: dict[int, list[int]] = {}
    sizes: dict[int, tuple[int, bool]] = {}
    divided = [f"{pattern}.*" for pattern in tensor_plan(model)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        split = any(fnmatchcase(name, pattern) for pattern in divided)
        sizes[id(parameter)] = (parameter.numel(), split)
        inside = [at for at, names in enumerate(pieces) if _is_in(name, names)]
        for at in inside or [0]:
            if at not in homes.setdefault(id(parameter), []):
                homes[id(parameter)].append(at)
    tied = []
    shares = [0] * len(layers)
    modules = expert_modules(model)
    of_experts = {id(p): p.numel() for m in modules.values() for p in m.parameters()}
    for key, where in homes.items():
        count, split = sizes[key]
        for at in where:
            layers[at].parameters += count
            shares[at] += count * split
        tied += [(where[0], other, count) for other in where[1:]]
    for layer, share in zip(layers, shares, strict=True):
        layer.divided = share / layer.parameters if layer.parameters else 0.0
    for key, count in of_experts.items():
        for at in homes[key]:
            layers[at].expert += count / layers[at].parameters
    experts = math.gcd(*(int(getattr(each, "experts", 0)) for each in modules.values()))
    return Model(layers, tied, experts=experts)


@contextlib.contextmanager
def _routed(watch: _Watch, found: Model, model: nn.Module, samples: int) -> Iterator[None]:
    """Counts the bytes that experts are given."""

    def entered(module: nn.Module, args: Any) -> None:
        given = args[0].numel() * args[0].element_size()
        found.layers[watch.at].routed_bytes += given / samples

    hooks = [m.register_forward_pre_hook(entered) for m in expert_modules(model).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_in(parameter: str, modules: tuple[str, ...]) -> bool:
    return any(parameter.startswith(f"{name}.") for name in modules)


def _by_name(model: nn.Module, counter: FlopCounterMode) -> dict[str, int]:
    top = f"{type(model).__name__}."
    found = {"": counter.get_total_flops()}
    for name, counts in counter.get_flop_counts().items():
        if name.startswith(top):
            found[name.removeprefix(top)] = sum(counts.values())
    return found


class _Watch(TorchDispatchMode):
    """One step: which layer is being computed, its operators, and what it keeps for backward."""

    def __init__(self, model: nn.Module, pieces: list[tuple[str, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = [0] * len(pieces)
        self.saved = [0] * len(pieces)
        self.passed = [0] * len(pieces)
        self.backward = 0
        self._at = 0
        self._kept: set[int] = {p.untyped_storage()._cdata for p in model.parameters()}
        self._hold: list[Tensor] = []
        self._hooks: list[Any] = []
        self._model, self._pieces = model, pieces

    def __enter__(self) -> _Watch:
        seen: set[str] = set()
        for at, names in enumerate(self._pieces):
            for name in names:
                module = self._model.get_submodule(name)
                if name not in seen:
                    hook = module.register_forward_pre_hook(self._entered(at), with_kwargs=True)
                    self._hooks.append(hook)
                seen.add(name)
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)
        self._saving.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._saving.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hold.clear()

    def _entered(self, at: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if at != self._at:
                tensors = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
                self.passed[self._at] = sum(t.numel() * t.element_size() for t in tensors)
            self._at = at

        return enter

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept.add(storage._cdata)
            self._hold.append(tensor)  # an address that is free again would be another tensor's
            self.saved[self._at] += storage.nbytes()
        return tensor

    @property
    def at(self) -> int:
        return self._at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "prim":  # fake tensors ask for their device
            if torch._C._current_graph_task_id() == -1:
                self.operators[self._at] += 1
            else:
                self.backward += 1
        return func(*args, **(kwargs or {}))


class _Attentions(TorchFunctionMode):
    """Counts calls of attention by layer, and looks how long sequences are."""

    def __init__(self, watch: _Watch, found: Model) -> None:
        super().__init__()
        self._watch, self._found = watch, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._found.layers[self._watch.at].attentions += 1
            self._found.length = int((args or tuple((kwargs or {}).values()))[0].shape[-2])
        return func(*args, **(kwargs or {}))


def _fill(
    layers: Sequence[Layer],
    pieces: list[tuple[str, ...]],
    forward: dict[str, int],
    both: dict[str, int],
    watch: _Watch,
    samples: int,
) -> None:
    """Figures of each layer. What happens in no layer's module is the last layer's."""
    used: set[str] = set()
    for layer, names in zip(layers, pieces, strict=True):
        mine = [name for name in names if name not in used]
        used |= set(names)
        layer.flops = sum(forward.get(name, 0) for name in mine)
        layer.backward_flops = sum(both.get(name, 0) for name in mine) - layer.flops
    layers[-1].flops += forward[""] - sum(layer.flops for layer in layers)
    layers[-1].backward_flops += (both[""] - forward[""]) - sum(x.backward_flops for x in layers)
    total = sum(watch.operators) or 1
    left = watch.backward
    for place, layer in enumerate(layers):
        layer.flops /= samples
        layer.backward_flops /= samples
        layer.saved_bytes = watch.saved[place] / samples
        layer.passed_bytes = watch.passed[place] / samples
        layer.operators = watch.operators[place]
        layer.backward_operators = round(watch.backward * watch.operators[place] / total)
        left -= layer.backward_operators
    layers[-1].backward_operators += left
