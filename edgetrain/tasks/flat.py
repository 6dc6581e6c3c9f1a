"""A model's trained parameters and gradients as two flat float32 vectors.

Here torch tensors become the vectors that strategies work on; nothing here knows a strategy, a
message or an optimizer.

What is in the vector: every parameter with `requires_grad`, once (tied ones are one), in the order
of `named_parameters()`; behind them, with `statistics`, the running means and variances that
normalisation layers measure, and the means' squares (`spread`). What is not: frozen parameters,
other buffers (docs/decisions/002-buffers-stay-local.md), and what is personal (`personal`).

A parameter may have no gradient at all (`grad is None`: the loss did not depend on it). That is not
a gradient of zeros: an optimizer leaves the one alone, and moves the other by weight decay and
momentum. In the flat gradient

    zeros                    stand for no gradient
    zeros, but SPECK first   stand for a gradient of zeros

A sum of what members contribute is zeros where none of them had a gradient, so that all leave that
parameter alone, as DistributedDataParallel does. A lossy codec makes zeros of its own: with one, no
gradient is a gradient of zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgetrain.errors import ConfigError, refuse_first
from edgetrain.tasks.fixed import digest_of_fixed, fixed_of, fixed_part_of, personal_of, plain
from edgetrain.tasks.spread import Square, spread_layers
from edgetrain.vectors import layout as layouts
from edgetrain.vectors.allocator import release_freed
from edgetrain.vectors.vector import Layout, Vector, zeros

SPECK = np.float32(1e-30)
"""The first element of a gradient of zeros in the flat gradient: next to nothing, but not 0."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass
class _Group:
    """Parameters of one dtype on one device, flat. `where` is their range in the vector."""

    params: torch.Tensor
    gradient: torch.Tensor
    where: slice
    tensors: list[torch.Tensor]
    """Views of `params`, in order: parameters, and buffers."""
    members: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    """(parameter, its view of `params`, its view of `gradient`)"""


class FlatModel:
    """Binds a model to flat storage: its parameters and gradients become views of two vectors.

    For a float32 model in main memory `params` and `gradient` *are* that storage: what an optimizer
    does in place happens to the vector, and nothing is gathered or scattered. For other dtypes and
    for CUDA they are float32 mirrors in main memory, moved by `pull_*` and `push_*` (which cost
    nothing in the first case). A mirror keeps the bits that a half-precision model cannot: only
    what the optimizer changed is added to it.

    Bind after `model.to(device)`: moving a bound model breaks the views, and the next pull says so.
    Vectors belong to this object; strategies mutate them between pull and push. Raises ConfigError
    for a model without trained parameters, or with parameters that are not real floats.
    """

    def __init__(
        self, model: torch.nn.Module, *, frozen: str = "equal", statistics: bool = False
    ) -> None:
        """What is not in the vector is `frozen` "equal" on all members, the "first" one's, or each
        member's "own". With `statistics` running means and variances are in the vector, for
        strategies that exchange displacements: an optimizer does not move them."""
        named, mine = trained_of(model), personal_of(model)
        if not named:
            raise ConfigError("the model has no parameters with requires_grad: nothing to train")
        self._personal = [p for name, p in model.named_parameters() if name in mine]
        _check_tensors(named, [*fixed_of(model), *(("a personal one", p) for p in self._personal)])
        measured, self._squares = _measured_of(model) if statistics else ([], [])
        self._variances = [tensor for name, tensor in measured if name.endswith("running_var")]
        runs = _runs_of(named, measured)
        self._groups: list[_Group] = []
        self._memory: list[Vector] = []  # stays where it is when `share_memory` moves the tensors
        layout: list[tuple[str, int, tuple[int, ...]]] = []
        start = 0
        for _, members in runs:
            group, *memory = _bind([tensor for _, tensor in members], start)
            self._groups.append(group)
            self._memory += memory
            for name, tensor in members:
                layout.append((name, start, tuple(tensor.shape)))
                start += tensor.numel()
        release_freed()  # the old storage: a model's worth that glibc would keep
        self.layout: Layout = tuple(layout[: len(named)])
        """(name, start, shape) of every parameter in the vector."""
        self.elements = start
        self.trained = layout[len(named)][1] if measured else start
        """Elements that are parameters; statistics are behind them."""
        # In the order of the vector: a model cut over devices has another one.
        described = [
            (plain(name), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for _, members in runs
            for name, tensor in members
        ]
        self.fixed_tensors = fixed_part_of(model) if frozen == "first" else None
        """Tensors handed out by the first member; None: none."""
        others = self.fixed_tensors.tensors if self.fixed_tensors is not None else []
        self.description = layouts.describe(described, others)
        """Names, shapes and dtypes, as the hub is told them."""
        self.digest = layouts.digest(self.description)
        """Digest of the description."""
        self.fixed = digest_of_fixed(model) if frozen == "equal" else ""
        """A digest of the values that are not in the vector; "": not to be compared."""
        self._model = model
        (dtype, device), _ = runs[0]
        self.is_storage = len(runs) == 1 and dtype is torch.float32 and device.type == "cpu"
        """Whether the vectors are the model's own memory."""
        self._used: set[torch.Tensor] = set()
        self._versions, self.changed = self.count_writes(), ""
        """Torch's counts of writes to parameters when they were pulled; one written to later."""
        if self.is_storage:
            self.params: Vector = self._groups[0].params.numpy()
            self.gradient: Vector = self._groups[0].gradient.numpy()
        else:
            self.params, self.gradient = zeros(start), zeros(start)
            for group in self._groups:
                self.params[group.where] = _host(group.params)

    def zero_grad(self) -> None:
        for group in self._groups:
            group.gradient.zero_()
            for parameter, _, gradient in group.members:
                parameter.grad = gradient
        for own in self._personal:
            own.grad = None

    def freeze(self, personal: bool) -> None:
        """After a backward pass: the optimizer leaves what is personal as it is, or all else."""
        shared = (parameter for group in self._groups for parameter, _, _ in group.members)
        for parameter in self._personal if personal else shared:
            parameter.grad = None

    def note_used(self) -> None:
        """From now on `drop_unused` knows which parameters a backward pass has reached."""
        for group in self._groups:
            for parameter, _, _ in group.members:
                parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]

    def drop_unused(self) -> None:
        """After `zero_grad` and a backward pass: parameters that it has not reached have no
        gradient, as after torch's own `zero_grad`. Only after `note_used`."""
        for group in self._groups:
            for parameter, _, _ in group.members:
                if parameter not in self._used:
                    parameter.grad = None
        self._used.clear()

    def pull_params(self) -> None:
        """Bring `params` up to what the optimizer did. ConfigError if a view was broken, or if
        another parameter is trained now."""
        self._check_trained()
        self._versions = self.count_writes()
        for square in self._squares:
            square.measure()
        for group in self._groups:
            for parameter, view, _ in group.members:
                if parameter.data_ptr() != view.data_ptr():
                    raise ConfigError(
                        "a parameter left the flat vector",
                        "call model.to(...) before joining, and load weights in place",
                    )
            if self.is_storage and group.params.data_ptr() != self.params.ctypes.data:
                raise ConfigError(
                    "the model was moved into memory that processes share",
                    "give others copy.deepcopy(model), or the member's state_dict()",
                )
            if not self.is_storage:
                mirror = self.params[group.where]
                if group.params.dtype is torch.float32:
                    mirror[:] = _host(group.params)
                else:
                    before = torch.from_numpy(mirror).to(group.params.dtype)
                    mirror += _host(group.params) - _host(before)

    def _check_trained(self) -> None:
        bound = {id(parameter) for group in self._groups for parameter, _, _ in group.members}
        bound.update(map(id, self._personal))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in bound:
                raise ConfigError(
                    f"parameter '{name}' has been unfrozen or added since the model joined: it "
                    "would be trained on this member alone",
                    "close the member, and join again with the model as it is now",
                )

    def count_writes(self) -> list[int]:
        """How often torch, and not a reply, has written to each parameter."""
        return [parameter._version for group in self._groups for parameter, _, _ in group.members]

    def release(self) -> None:
        """Give every tensor memory of its own, as before it was bound, for good. What it has of
        running statistics is taken for the fleet's. Works twice."""
        while self._squares:
            self._squares.pop().widen()
        groups, self._groups = self._groups, []
        for group in groups:
            for tensor in group.tensors:
                tensor.data = tensor.detach().clone()
                if isinstance(tensor.grad, torch.Tensor):
                    tensor.grad = tensor.grad.clone()
        release_freed()

    def state(self) -> dict[str, Any]:
        """The model's `state_dict` as it is now, each tensor in memory of its own."""
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._model.state_dict().items()
        }

    def push_params(self) -> None:
        if not self.is_storage:
            for group in self._groups:
                group.params.copy_(torch.from_numpy(self.params[group.where]))
        for square in self._squares:
            square.note()

    @contextmanager
    def holding(self, vector: Vector) -> Iterator[None]:
        """Within: the model's parameters are `vector`, float32 [elements].

        Afterwards they, and `params`, have the bits they had. For a look at other parameters
        between two steps: pulling and pushing would round those of a model that is not float32.
        """
        own = [group.params.clone() for group in self._groups]
        try:
            for group in self._groups:
                group.params.copy_(torch.from_numpy(vector[group.where]))
            for variance in self._variances:  # noise, or a lossy codec, may have made it negative
                variance.clamp_(min=0)
            for square in self._squares:
                square.widen()
            torch.clear_autocast_cache()  # copies of what the parameters were before
            yield
        finally:
            for group, before in zip(self._groups, own, strict=True):
                group.params.copy_(before)
            torch.clear_autocast_cache()

    def pull_gradient(self) -> None:
        """Collect gradients that are not views any more (`zero_grad(set_to_none=True)` drops them).

        A parameter without a gradient counts as zero; see the module for a gradient of zeros.
        """
        none = []
        writes = zip(self.layout, self._versions, self.count_writes(), strict=False)
        self.changed = next((n for (n, *_), then, now in writes if then != now), self.changed)
        for group in self._groups:
            for parameter, _, gradient in group.members:
                found = parameter.grad
                none.append(found is None)
                if found is None:
                    gradient.zero_()
                elif found.is_sparse or found.data_ptr() != gradient.data_ptr():
                    gradient.copy_((found.to_dense() if found.is_sparse else found).detach())
                parameter.grad = gradient
            if not self.is_storage:
                self.gradient[group.where] = _host(group.gradient)
        self.gradient[self.trained :] = 0
        for here, is_none in zip(self._tensors(), none, strict=True):
            if not is_none and here.size and not _any(here):
                here[0] = SPECK

    @contextmanager
    def only(self, chosen: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Within: parameters that are not `chosen` have no gradient; afterwards as before."""
        self._versions = []  # parts of the model are stepped, and not only at the end of a step
        ids, kept = set(map(id, chosen)), []
        for group in self._groups:
            for parameter, _, _ in group.members:
                if id(parameter) not in ids:
                    found = parameter.grad
                    kept.append((parameter, None if found is None else found.clone()))
                    parameter.grad = None
        yield
        for parameter, gradient in kept:
            parameter.grad = gradient

    def push_gradient(self, zeros_are_none: bool = False) -> None:
        """Write `gradient` back, for the optimizer to step with. With `zeros_are_none` parameters
        whose gradient is all zeros get none; see the module."""
        none = []
        for here in self._tensors():
            none.append(zeros_are_none and bool(here.size) and not _any(here))
            if here.size and abs(here[0]) <= SPECK and np.abs(here).max() <= SPECK:
                here[:] = 0
        if not self.is_storage:
            for group in self._groups:
                group.gradient.copy_(torch.from_numpy(self.gradient[group.where]))
        members = (each for group in self._groups for each in group.members)
        for (parameter, _, gradient), is_none in zip(members, none, strict=True):
            parameter.grad = None if is_none else gradient

    def _tensors(self) -> Iterator[Vector]:
        for number, (_, start, _) in enumerate(self.layout, 1):
            stop = self.layout[number][1] if number < len(self.layout) else self.trained
            yield self.gradient[start:stop]


def with_parameters(model: torch.nn.Module, params: Vector) -> torch.nn.Module:
    """A copy of a model with other parameters, [elements] in the order of FlatModel; where there
    are more, with its statistics, as they are shown."""
    found = copy.deepcopy(model)
    flat = FlatModel(found, frozen="own")
    if params.size != flat.elements:
        flat = FlatModel(found, frozen="own", statistics=True)
    flat.params[:] = params
    flat.push_params()
    flat.release()
    return found


def _check_tensors(
    named: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """ConfigError for parameters that cannot be moved into a flat vector as they are. `others` of
    the model's tensors stay where they are."""
    for name, tensor in named:
        is_lazy = isinstance(tensor, torch.nn.parameter.UninitializedParameter)
        on_cpu = not is_lazy and tensor.device.type == "cpu"
        is_shared = on_cpu and tensor.is_shared()  # type: ignore[no-untyped-call]
        refuse_first(
            (is_lazy, f"parameter '{name}' has no shape yet: it is one of a lazy layer",
             "run one batch through the model before joining"),
            (tensor.is_meta, f"parameter '{name}' is on the meta device: it has no values",
             "model.to_empty(device='cpu'), and load or initialise its weights, before joining"),
            (tensor.dtype not in DTYPES, f"parameter '{name}' is {tensor.dtype}",
             "trained parameters are float32, float16, bfloat16 or float64"),
            (is_shared, f"parameter '{name}' is in memory that processes share: the others would "
             "not see what is trained here", "join with copy.deepcopy(model)"),
        )  # fmt: skip
        if any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            _refuse_shared(name, name)
    trained = {name for name, _ in named}
    apart = [(n, t) for n, t in others if t.layout is torch.strided and not t.is_meta]
    there = [(str(t.device), t.data_ptr(), name, t) for name, t in (*named, *apart) if t.numel()]
    there.sort(key=lambda each: each[:3])
    for (device, _, name, tensor), (other_device, begin, other_name, other) in pairwise(there):
        if device == other_device and begin < _end(tensor) and {name, other_name} & trained:
            ours, theirs = _addresses(tensor), _addresses(other)
            if np.intersect1d(ours, theirs).size:
                _refuse_shared(name, other_name)


def _refuse_shared(name: str, other: str) -> None:
    raise ConfigError(
        f"elements of '{name}' and '{other}' share memory (expand, or views of one tensor), and "
        "would be trained apart",
        "give each parameter memory of its own (.clone()), or use one parameter in both places",
    )


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _addresses(tensor: torch.Tensor) -> NDArray[np.int64]:
    found = np.array([tensor.data_ptr()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = (found[:, None] + np.arange(size) * stride * tensor.element_size()).ravel()
    return found


_Kind = tuple[torch.dtype, torch.device]
_Named = list[tuple[str, torch.Tensor]]


def _runs_of(
    parameters: list[tuple[str, torch.nn.Parameter]], measured: _Named
) -> list[tuple[_Kind, _Named]]:
    """The tensors of a vector, in runs of one dtype on one device: parameters of a kind together,
    and behind all of them what is measured, whatever its kind."""
    kinds: dict[_Kind, _Named] = {}
    for name, parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    runs = list(kinds.items())
    for name, tensor in measured:
        kind = tensor.dtype, tensor.device
        if runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append((name, tensor))
    return runs


def trained_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters in a model's vector, by name."""
    personal = personal_of(model)
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in personal]


def statistics_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The running means and variances of a model's normalisation layers, by name, but for personal
    ones."""
    ends, personal = ("running_mean", "running_var"), personal_of(model)
    return [
        (n, b)
        for n, b in model.named_buffers()
        if n.endswith(ends) and b.is_floating_point() and n not in personal
    ]


def _spread_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers whose mean and variance are both in the vector."""
    shared = {id(buffer) for _, buffer in statistics_of(model)}
    return {
        name: layer
        for name, layer in spread_layers(model).items()
        if shared.issuperset(map(id, (layer.running_mean, layer.running_var)))
    }


def measured_elements(model: torch.nn.Module) -> int:
    """How long what `statistics` are in a model's vector is. The model may be on meta."""
    squares = (each.get_buffer("running_mean") for each in _spread_of(model).values())
    return sum(t.numel() for t in (*squares, *(t for _, t in statistics_of(model))))


def _measured_of(model: torch.nn.Module) -> tuple[_Named, list[Square]]:
    squares = [Square(*each) for each in _spread_of(model).items()]
    return [*statistics_of(model), *((each.name, each.tensor) for each in squares)], squares


def _bind(tensors: list[torch.Tensor], start: int) -> tuple[_Group, Vector, Vector]:
    """Move tensors of one dtype and device into one flat tensor and make them views of it. The
    group, and the main memory of parameters and gradients."""
    total = sum(tensor.numel() for tensor in tensors)
    like = tensors[0]
    (flat, memory), (gradient, gradient_memory) = _zeros(total, like), _zeros(total, like)
    members = []
    at = 0
    for tensor in tensors:
        here = slice(at, at + tensor.numel())
        at = here.stop
        view = flat[here].view(tensor.shape)
        view.copy_(tensor.detach())
        tensor.data = view
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        gradient_view = gradient[here].view(tensor.shape)
        if tensor.grad is not None:
            gradient_view.copy_(tensor.grad)
            tensor.grad = gradient_view
        members.append((tensor, view, gradient_view))
    where = slice(start, start + total)
    return _Group(flat, gradient, where, tensors, members), memory, gradient_memory


def _any(values: Vector) -> bool:
    """Whether one of the values (at least one) is not 0; most gradients tell by their first."""
    return bool(values[0]) or bool(values.any())


def _zeros(total: int, like: torch.Tensor) -> tuple[torch.Tensor, Vector]:
    """Zeros, and the main memory that they stand in. They cost none until they are written: not
    every strategy needs the gradient.

    torch.zeros writes them at once; NumPy takes fresh pages from the system, which are zero.
    """
    if like.device.type != "cpu":
        return torch.zeros(total, dtype=like.dtype, device=like.device), zeros(0)
    words = zeros(2 * (total * like.element_size() // 8 + 1))
    return torch.from_numpy(words).view(like.dtype)[:total], words


def _host(tensor: torch.Tensor) -> Vector:
    host: Vector = tensor.detach().to("cpu", torch.float32).numpy()
    return host
