"""What a model does in a step besides computing, which not every placement can have.

One forward pass on fake tensors, which have shapes and no numbers, so a model of any size can be
looked at. Nothing is divided here.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgetrain.tasks.meta import outline_of, without_numbers
from edgetrain.tasks.profiling import traced
from edgetrain.tasks.protocol import Batch, Task

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE = re.compile(r"__setitem__|__i[a-z]+__|(?!requires_grad_)[a-z]\w*[^_]_")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@dataclass(frozen=True)
class Effects:
    """Effects seen in a model; "": none."""

    buffer: str = ""
    """A buffer that the forward pass changes, by name."""
    count: str = ""
    """A whole number, an attribute of a module, that every forward pass changes, by name."""
    samples: str = ""
    """A module that normalises over the samples of a batch."""
    positions: str = ""
    """A module that normalises over the positions of a sequence."""
    hooked: str = ""
    """A parameter with a hook on its gradient."""
    shared: str = ""
    """A parameter and another tensor in the same memory, by name."""
    complex: str = ""
    """A complex parameter, by name."""
    sparse: str = ""
    """A module whose gradients are sparse, by name."""
    attention: str = ""
    """Obstacle to computing attention slice by slice."""
    untraced: str = ""
    """What torch's tracer would leave out of a model that only it can cut."""
    written: str = ""
    """A parameter that the forward pass writes to, by name."""
    rebuilt: str = ""
    """A module or parameter that the forward pass adds, takes away or replaces, by name."""


def effects_of(task: Task, batch: Batch) -> Effects:
    """The effects of a step of this batch, [samples, …]."""
    outline = outline_of(task).model
    hooked = [n for n, p in outline.named_parameters() if _has_hook(p)]
    is_complex = [n for n, p in outline.named_parameters() if p.is_complex()]
    sparse = [n for n, m in outline.named_modules() if getattr(m, "sparse", False) is True]
    seen = {
        "samples": _first(outline, nn.modules.batchnorm._BatchNorm),
        "positions": _first(outline, nn.modules.instancenorm._InstanceNorm),
        "hooked": hooked[0] if hooked else "",
        "shared": _shared(outline),
        "complex": is_complex[0] if is_complex else "",
        "sparse": sparse[0] if sparse else "",
    }
    watch = _Calls()
    try:
        with without_numbers():
            model = task.model()
            before, parts = _buffers(model), _parts(model)
            versions = {name: p._version for name, p in model.named_parameters()}
            watch.memory = {p.untyped_storage()._cdata: n for n, p in model.named_parameters()}
            with watch:
                loss = task.loss(model, batch)
            after, left = _buffers(model), _parts(model)
            changed = [name for name, kept in before.items() if _is_changed(kept, after.get(name))]
            written = watch.written + [
                name for name, p in model.named_parameters() if p._version != versions.get(name)
            ]
            untraced = _function(loss) or watch.hook if traced(model) else ""
            counted = _counts(model)  # what the first pass sets, and no other, is a cache
            with contextlib.suppress(Exception):  # what the first pass has shown stays
                task.loss(model, batch)
            counts = [n for n, count in _counts(model).items() if counted.get(n, count) != count]
    except Exception:  # whatever a model's own code raises on tensors without numbers
        return Effects(**seen)
    first = changed[0] if changed else ""
    seen["count"] = counts[0] if counts else ""
    others = [name for name in {**parts, **left} if parts.get(name) is not left.get(name)]
    seen["rebuilt"] = others[0] if others else ""
    seen["written"] = written[0] if written and not others else ""
    return Effects(buffer=first, attention=watch.attention, untraced=untraced, **seen)


def _parts(model: nn.Module) -> dict[str, object]:
    return {**dict(model.named_modules()), **dict(model.named_parameters())}


def _first(model: nn.Module, kind: type[nn.Module]) -> str:
    """The first module of this kind that computes statistics of what it is given, by name."""
    for name, each in model.named_modules():
        is_kept = getattr(each, "track_running_stats", False) and not each.training
        if isinstance(each, kind) and not is_kept:
            return name or type(each).__name__
    return ""


def _shared(model: nn.Module) -> str:
    """A trained parameter and another tensor of the model that begin in the same memory."""
    known: dict[object, tuple[str, bool]] = {}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if each.layout is torch.strided and each.numel():
            place = each.untyped_storage()._cdata, each.storage_offset()
            other, is_trained = known.setdefault(place, (name, each.requires_grad))
            if other != name and (is_trained or each.requires_grad):
                return f"'{other}' and '{name}'"
    return ""


def _has_hook(parameter: Tensor) -> bool:
    kept = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(kept)


def _buffers(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Buffers and tensors that are plain attributes, and how often each was written to."""
    return {
        f"{name}.{key}".removeprefix("."): (value, value._version)
        for name, module in model.named_modules()
        for key, value in [*module._buffers.items(), *vars(module).items()]
        if isinstance(value, Tensor)
    }


def _counts(model: nn.Module) -> dict[str, int]:
    """Whole numbers that are attributes of modules."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int)
    }


def _is_changed(before: tuple[Tensor, int], after: tuple[Tensor, int] | None) -> bool:
    """Whether this buffer goes into the next step as another one. What has a gradient does not: it
    is noted for the loss, or to be looked at."""
    if after is None or after[0].requires_grad:
        return False
    return before[0] is not after[0] or before[1] != after[1]


class _Calls(TorchFunctionMode):
    """Notices hooks on tensors that a forward pass computes, how it attends, and what it writes to
    `memory`, of parameters, past their counts of versions (`.data`)."""

    hook = attention = ""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.written = dict[int, str](), list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOOKS:
            self.hook = "a hook on a tensor's gradient"
        is_written = func == _SET_DATA or _IN_PLACE.fullmatch(name)
        if is_written and args and isinstance(args[0], Tensor):
            owner = self.memory.get(args[0].untyped_storage()._cdata)
            self.written += [owner] if owner else []
        if func is nn.functional.scaled_dot_product_attention:
            given = dict(zip(("attn_mask", "dropout_p"), args[3:5], strict=False)) | (kwargs or {})
            if given.get("attn_mask") is not None:
                self.attention = "a mask of its own"
            elif given.get("dropout_p"):
                self.attention = f"dropout of {given['dropout_p']:g}"
        return func(*args, **(kwargs or {}))


def _function(loss: Tensor) -> str:
    """An autograd function in Python that the loss depends on."""
    todo, known = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"the autograd function '{type(node).__name__.removesuffix('Backward')}'"
        todo += [each for each, _ in node.next_functions]
    return ""
