"""A torch optimizer's state, a model's buffers, random numbers and what else a loop has, as plain
values and buffers.

For checkpoints: the way there and the way back, without pickle. Nothing here knows a file, a member
or a round.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from edgetrain.errors import BadMessage, ConfigError
from edgetrain.exchange.member.checkpoint import Bytes
from edgetrain.tasks.draws import generator_states, put_back_generators
from edgetrain.tasks.fixed import Unexchanged, personal_of
from edgetrain.tasks.weights import set_buffer, tensors_of

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
        torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}  # fmt: skip
_DEPTH = 16
_PLAIN = "it holds numbers, texts, None and tensors, in tables and lists, and no code"


class Stateful(Protocol):
    """The common methods of torch's schedulers, GradScaler, AveragedModel and others."""

    def state_dict(self) -> Any:
        """All of its state: numbers, texts, None and tensors, in tables and lists."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Become what had this state."""


class TrainingState:
    """What a training process has besides its trained parameters: the optimizer's state, the
    model's buffers (normalisation statistics stay with the member), frozen parameters that training
    changes (a teacher that follows), random numbers (torch's,
    Python's, NumPy's own), and `others` of the loop's by name. They are only read, but by
    `put_back`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._others = dict(others or {})
        self._unexchanged: Unexchanged | None = None
        for name, other in self._others.items():
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise ConfigError(
                    f"state['{name}'] is a {type(other).__name__}",
                    "what a checkpoint is to hold has state_dict and load_state_dict",
                )
        self.collect_others()  # what cannot be kept is told now, not ten minutes into training

    @property
    def optimizer(self) -> str:
        """Its class, which a checkpoint must have in common."""
        return type(self._optimizer).__name__

    def collect(self) -> dict[str, Any]:
        """All of it, as a tree with tensors in it, which are the model's and optimizer's own."""
        parameters = dict(self._model.named_parameters())
        return {
            "optimizer": state_of(self._optimizer),
            "buffers": dict(self._model.named_buffers()),
            "persistent": [n for n in tensors_of(self._model) if n not in parameters],
            "frozen": self._moved(),
            "others": self.collect_others(),
            **generator_states(),
        }

    def rounded(self) -> dict[str, torch.Tensor]:
        """Trained parameters by name whose bits a vector of float32 does not have."""
        named = self._model.named_parameters()
        return {n: p.detach() for n, p in named if p.requires_grad and p.itemsize != 4}

    def _moved(self) -> dict[str, torch.Tensor]:
        """Frozen parameters that have other values than when training began, as a teacher's; and
        personal ones."""
        if self._unexchanged is None:
            self._unexchanged = Unexchanged(self._model)
        changed = self._unexchanged.changed()
        personal, named = personal_of(self._model), dict(self._model.named_parameters())
        return {name: p for name, p in named.items() if name in personal or name in changed}

    def collect_others(self) -> dict[str, Any]:
        """The states of the others. ConfigError where a checkpoint cannot hold one."""
        states = {name: state_of(other) for name, other in self._others.items()}
        for name, state in states.items():
            try:
                pack(state)
            except ConfigError as error:
                raise ConfigError(f"state['{name}']: {error.message}", _PLAIN) from None
        return states

    def put_back(self, tree: Mapping[str, Any]) -> None:
        """Become what `collect` gave. ConfigError where it is another model's or optimizer's, or
        damaged; then nothing is promised of either."""
        self._put_back_others(tree.get("others", {}))
        self._moved()  # what is put back has moved
        try:
            self._put_back(tree)
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"the checkpoint does not fit this model and optimizer: {error}",
                "to join as a newcomer, delete it",
            ) from None

    def _put_back_others(self, states: Mapping[str, Any]) -> None:
        if set(states) != set(self._others):
            raise ConfigError(
                f"the checkpoint holds state of {sorted(states) or 'nothing else'}, this member "
                f"names {sorted(self._others) or 'nothing'}",
                "give `state` the same names, or delete the checkpoint to join as a newcomer",
            )
        for name, other in self._others.items():
            try:
                load_state(other, states[name])
            except Exception as error:  # anyone's code, with anyone's state
                raise ConfigError(
                    f"state['{name}'] of the checkpoint does not fit this "
                    f"{type(other).__name__}: {type(error).__name__}: {error}",
                    "make it as it was made before, or delete the checkpoint",
                ) from error

    def _put_back(self, tree: Mapping[str, Any]) -> None:
        buffers, kept = dict(self._model.named_buffers()), tree["buffers"]
        if lacking := sorted((buffers.keys() & tensors_of(self._model).keys()) - kept.keys()):
            raise ValueError(f"it has no buffer '{lacking[0]}'")
        load_state(self._optimizer, tree["optimizer"])
        frozen = {name: self._model.get_parameter(name) for name in tree.get("frozen", {})}
        with torch.no_grad():
            for name, value in kept.items():  # the model makes others again that are not persistent
                if name in buffers or name in tree.get("persistent", kept):
                    set_buffer(self._model, name, value)
            for name, parameter in frozen.items():
                parameter.copy_(tree["frozen"][name])
        put_back_generators(tree)


def state_of(stateful: Stateful) -> Any:
    """Its `state_dict`. That of an optimizer with torch's own one has two entries more: "hosted",
    what of a parameter's state is in main memory although the parameter is not, and "numbers",
    which are attributes and which torch leaves out."""
    state = stateful.state_dict()
    if not _has_torchs(stateful, "state_dict"):
        return state
    hosted = [
        [number, key]
        for number, parameter in _numbered(stateful, state)
        for key, value in state["state"].get(number, {}).items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" != parameter.device.type
    ]
    return {**state, "hosted": hosted, "numbers": _numbers(stateful)}


def load_state(stateful: Stateful, kept: Any) -> None:
    """Become what `state_of` gave. An optimizer's state has the bits that it had: torch's own way
    back casts float32 masters, and whole numbers, to the dtype of a parameter in half precision."""
    if not _has_torchs(stateful, "state_dict"):
        stateful.load_state_dict(kept)
        return
    is_plain = _has_torchs(stateful, "load_state_dict")
    stateful.load_state_dict({**kept, "state": {}} if is_plain else kept)
    parameters, hosted = dict(_numbered(stateful, kept)), kept.get("hosted", [])
    on_device = {
        id(p)
        for group in stateful.param_groups
        for p in group["params"]
        if group.get("capturable") or group.get("fused")
    }
    for number, state in kept["state"].items():
        if (parameter := parameters.get(number)) is None:  # of the whole optimizer
            stateful.state[number] = state
            continue
        stays = [key for one, key in hosted if one == number]
        stays += [] if id(parameter) in on_device else ["step"]  # as torch has it
        move = methodcaller("to", parameter.device)
        stateful.state[parameter] = {
            key: value if key in stays else tree_map_only(torch.Tensor, move, value)
            for key, value in state.items()
        }
    known = _numbers(stateful)
    vars(stateful).update(
        {n: v for n, v in kept.get("numbers", {}).items() if n in known and type(v) in (int, float)}
    )


def _has_torchs(stateful: Stateful, method: str) -> TypeGuard[torch.optim.Optimizer]:
    """Whether this is an optimizer that has this method from torch, and no hooks around it."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return False
    torchs, its = (getattr(each, method) for each in (torch.optim.Optimizer, type(stateful)))
    hooks = (getattr(stateful, f"_optimizer_{method}_{when}_hooks") for when in ("pre", "post"))
    return inspect.unwrap(its) is inspect.unwrap(torchs) and not any(hooks)


def _numbered(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[int, torch.Tensor]]:
    """An optimizer's parameters, each with its number in a `state_dict`."""
    for group, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
        yield from zip(kept["params"], group["params"], strict=True)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, int | float]:
    return {name: each for name, each in vars(optimizer).items() if type(each) in (int, float)}


def pack(tree: Any) -> tuple[Any, list[Bytes]]:
    """A tree of plain values and tensors as what msgpack can hold, and the tensors' bytes (the
    tensors' own memory where that lies together). ConfigError for anything else in it."""
    buffers: list[Bytes] = []
    return _pack(tree, buffers), buffers


def _pack(value: Any, buffers: list[Bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout is not torch.strided:
            raise ConfigError(f"a checkpoint holds no {name} tensor of layout {value.layout}")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        buffers.append(flat.numpy())
        return ["tensor", len(buffers) - 1, name, list(value.shape)]
    if isinstance(value, np.ndarray):
        return _pack(torch.from_numpy(value), buffers)
    if isinstance(value, Counter):  # MultiStepLR's milestones
        return ["counter", _pack(dict(value), buffers)]
    if isinstance(value, Mapping):
        pairs = [[_pack(k, buffers), _pack(v, buffers)] for k, v in value.items()]
        return ["dict", pairs]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_pack(item, buffers) for item in value]]
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return value
    raise ConfigError(
        f"the state has a {type(value).__name__} in it, which no checkpoint can hold", _PLAIN
    )


def unpack(values: Any, buffers: Sequence[Bytes]) -> Any:
    """The tree that `pack` made; its tensors lie in `buffers`. Raises BadMessage."""
    return _unpack(values, buffers, 0)


def _unpack(value: Any, buffers: Sequence[Bytes], depth: int) -> Any:
    if not isinstance(value, list):
        return value
    if depth > _DEPTH or not value:
        raise BadMessage("a checkpoint's values are nested wrongly")
    match value:
        case ["tensor", int(number), str(name), list(shape)] if name in _DTYPES:
            return _tensor(number, _DTYPES[name], shape, buffers)
        case ["dict", list(pairs)]:
            found = {}
            for pair in pairs:
                if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], list):
                    raise BadMessage("a checkpoint's table has no such entries")
                found[pair[0]] = _unpack(pair[1], buffers, depth + 1)
            return found
        case ["counter", table]:
            found = _unpack(table, buffers, depth + 1)
            if not isinstance(found, dict):
                raise BadMessage("a checkpoint's counter is no table")
            return Counter(found)
        case ["list", list(items)]:
            return [_unpack(item, buffers, depth + 1) for item in items]
        case ["tuple", list(items)]:
            return tuple(_unpack(item, buffers, depth + 1) for item in items)
    raise BadMessage(f"a checkpoint's values have no {value[0]!r}")


def _tensor(
    number: int, dtype: torch.dtype, shape: list[Any], buffers: Sequence[Bytes]
) -> torch.Tensor:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise BadMessage(f"a tensor's shape is no {shape!r}")
    if not 0 <= number < len(buffers) or buffers[number].size != math.prod(shape) * dtype.itemsize:
        raise BadMessage(f"buffer {number} is not {shape!r} of {dtype}")
    if not buffers[number].size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffers[number]).view(dtype).reshape(shape)
