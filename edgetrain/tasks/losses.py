"""What a task's loss can be divided into, found by calling it with a stand-in for the model.

A group of ranks computes a batch in parts: some samples, some positions, the model's output apart
from the model. That is the same training only for some losses. No model is built here, and nothing
is divided: a look at a loss compares its value with those of its parts, for drawn outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from edgetrain.errors import TaskError, quoted
from edgetrain.tasks.meta import outline_of, without_numbers
from edgetrain.tasks.protocol import Batch, Task, batches_from, counts_of, is_counted

MOST_SAMPLES, ENOUGH = 256, (8, 64)
"""Whose losses are looked at: a rare class may weigh more than others. ENOUGH: batches, and samples
in them, after which no more are drawn."""
ANSWERED = 8
"""Samples that the model is called with, to see its outputs' shapes."""
MOST_SLICES = 8
MOST_ELEMENTS = 1 << 21
"""Limit of the drawn outputs: fewer samples, of fewer positions, are taken above it."""
SMALL = 1_000_000
"""Parameters of a model that is built rather than traced, which takes longer."""
FEW = 2
"""Samples of each half of a batch in which labels are left out, of a loss that a model computes."""
IGNORED = -100
"""Labels ignored by torch's and transformers' losses."""
FAILS = "fails apart from the model"
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference of a loss from its parts that may be rounding, by its type."""


@dataclass(frozen=True)
class Look:
    """The result of looking at a loss. A field of "" is no obstacle."""

    samples: str = ""
    """Why it is not made of the losses of its samples."""
    positions: str = ""
    """Why it is not made of the losses of slices of its sequences."""
    apart: str = ""
    """Why it cannot be computed apart from the model, from one output."""
    parameters: str = ""
    """"before" or "after" it calls the model it reads the model's parameters; ""."""
    draws: str = ""
    """Why the numbers that it draws cannot be the same in every launch."""
    unknown: str = ""
    """Why nothing is known of what it is made of."""


def scalar_of(task: Task, loss: Any, device: torch.device | None = None) -> Tensor:
    """A loss, on the model's `device`. TaskError for what is no scalar with a graph."""
    said = ""
    if not isinstance(loss, Tensor):
        said = f"a {type(loss).__name__}"
    elif loss.numel() != 1 or not loss.is_floating_point():
        said = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
    elif not loss.requires_grad:
        said = "a scalar that does not depend on the model"
    elif device is not None and loss.device != device:
        said = f"a scalar on {loss.device}, and not on the model's {device}"
    if said:
        raise TaskError(
            f"task '{task.name}': loss(model, batch) returns {said}",
            "the mean loss, a scalar with a graph",
        )
    assert isinstance(loss, Tensor)
    return loss


def part_of(batch: Batch, count: int, place: int) -> Batch:
    """One of `count` slices of the positions of every tensor [samples, positions, …] of a batch."""
    length = length_of(batch)
    size = length // count
    return tuple(
        t.narrow(1, place * size, size) if t.dim() > 1 and t.shape[1] == length else t
        for t in batch
    )


def length_of(batch: Batch) -> int:
    """Positions of the sequences of a batch; 0: it has none."""
    return next((tensor.shape[1] for tensor in batch if tensor.dim() > 1), 0)


def no_loss(output: Any) -> Tensor:
    """The loss of an output of which nothing counts: 0, with a graph."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([torch.nan_to_num(tensor).sum() * 0 for tensor in tensors]).sum()


# -- looking --------------------------------------------------------------------------------------


def first_batches(task: Task, members: int, batch: int, seed: int) -> Batch:
    """The first member's first batches, as one: two, and more for as many samples as are compared,
    if these are small."""
    found: list[Batch] = []
    samples = elements = 0
    for each in batches_from(task, 0, members, batch, seed):
        found.append(each)
        shapes: set[object] = {
            isinstance(each, tuple) and tuple(t.shape for t in each) for each in found
        }
        if len(shapes) > 1 or False in shapes:
            raise TaskError(
                f"task '{task.name}': batches that are computed in parts are tuples of tensors, of "
                "the same shapes each time", "pad them to one length",
            )  # fmt: skip
        samples, elements = samples + len(each[0]), elements + sum(t.numel() for t in each)
        enough = len(found) >= ENOUGH[0] and samples >= ENOUGH[1]
        if len(found) > 1 and (enough or samples >= MOST_SAMPLES or elements >= MOST_ELEMENTS):
            break
    return tuple(torch.cat(pair) for pair in zip(*found, strict=True))


def look_at(task: Task, batch: Batch, size: int = 1) -> Look:
    """What the task's loss of this batch, [samples, …], can be divided into: parts of so many
    samples, and slices of positions.

    Nothing is found out about a loss whose draws cannot be held (`_Held`), nor, where the model is
    large, about one that fails on fake tensors or that the model computes itself. TaskError for a
    loss that is none.
    """
    with torch.random.fork_rng(devices=[]):
        given = _Generators()
        try:
            with given:
                outputs, sample = _outputs_of(task, _first(batch, ANSWERED))
                if 2 * sample > MOST_ELEMENTS:
                    batch = _thinned(batch, MOST_ELEMENTS / (2 * sample))
                    outputs, sample = _outputs_of(task, _first(batch, ANSWERED))
        except TaskError:
            raise
        except Exception:  # whatever a model's own code raises on tensors without numbers
            return Look(draws=given.said)
        answered = min(len(batch[0]), ANSWERED)
        most = min(len(batch[0]), MOST_SAMPLES, max(2, MOST_ELEMENTS // max(1, sample)))
        size = max(1, min(size, most // 2))
        sees, look = bool(_floats(outputs)), Look()
        for dtype in (torch.float64, torch.float32) if sees or is_small(task) else ():
            # With which weights of the task's own go.
            own = tuple(_as(dtype, tensor) for tensor in _first(batch, most))
            drawn = [_drawn(each, answered, most, dtype) for each in outputs]
            look = _Trial(task, own, drawn, size).look(given)
            if not look.apart.startswith(FAILS):
                break
        unknown = look.apart or not sees or not all(_has(t, 0, most) for t in _floats(drawn))
        if not unknown or look.samples or look.draws:
            return look
        if is_small(task):
            model, few = task.model().eval(), _first(batch, 2 * FEW)
            tried = [(_first(batch, most), size), *((each, FEW) for each in _left_out(few, model))]
            found = (_Trial(task, own, model, n).look(given).samples for own, n in tried)
            return replace(look, samples=next(filter(None, found), ""))
        said = "the model computes its loss, and is too large to be tried with labels left out"
        return look if is_counted(task) else replace(look, unknown=said)


def _left_out(batch: Batch, model: nn.Module) -> Iterator[Batch]:
    """The batch, [samples, positions, …], as if half of its second half's positions were padding:
    in each tensor in turn, with what losses ignore, the model's own value, or zero, as in masks."""
    own = getattr(getattr(model, "config", None), "pad_token_id", None)
    values = dict.fromkeys(v for v in (IGNORED, own, 0) if v is not None)
    for (place, tensor), value in itertools.product(enumerate(batch), values):
        if tensor.dim() > 1 and tensor.shape[1] > 1 and not tensor.is_floating_point():
            tensor = tensor.clone()
            tensor[len(tensor) // 2 :, tensor.shape[1] // 2 :] = value
            yield (*batch[:place], tensor, *batch[place + 1 :])


def is_small(task: Task) -> bool:
    """Whether its model is quickly built, and called."""
    return outline_of(task).parameters <= SMALL


def _first(batch: Batch, count: int) -> Batch:
    return tuple(tensor[:count] for tensor in batch)


def _outputs_of(task: Task, batch: Batch) -> tuple[list[Any], int]:
    """What the model answers to each call of it, without numbers unless it is small; and how many
    elements of it a sample has."""
    found: list[Any] = []
    with nullcontext() if is_small(task) else without_numbers():
        model = task.model()
        model.register_forward_hook(lambda module, given, output: found.append(output))
        loss = task.loss(model, batch)
        scalar_of(task, loss, next(model.parameters()).device)
    return found, sum(t.numel() for t in _floats(found)) // len(batch[0])


def _thinned(batch: Batch, share: float) -> Batch:
    """A share of the positions of a batch, evenly spaced: padding is at one end."""
    length = length_of(batch)
    kept = max(MOST_SLICES, int(share * length) // MOST_SLICES * MOST_SLICES)
    places = torch.linspace(0, length - 1, kept).long()
    return tuple(t[:, places] if _has(t, 1, length) else t for t in batch)


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _drawn(output: Any, samples: int, most: int, dtype: torch.dtype) -> Any:
    """Numbers for the outputs of the first `most` samples, each sample's of another size."""

    def drawn(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype)
        if shape and shape[0] == samples:
            shape[0] = most
        found = torch.randn(shape, dtype=dtype)
        if len(shape) > 1:
            found *= torch.linspace(1, 2, shape[0], dtype=dtype).reshape(
                -1, *[1] * (len(shape) - 1)
            )
        return found.requires_grad_()

    return tree_map_only(Tensor, drawn, output)


class _Generators(TorchFunctionMode):
    """Notices a generator that is passed by hand."""

    said = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") is not None:
            self.said = f"passes a generator of its own to {getattr(func, '__name__', func)}"
        return func(*args, **(kwargs or {}))


_DRAWS = ("rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "poisson")


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets each draw be one number for all samples, so that a part of a batch draws what the whole
    does: a half, the least whole number, the order as it is. RuntimeError where it cannot."""

    left = 1_000
    """Draws, of a loss that may wait for another number for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        self.left -= 1
        name = func.overloadpacket.__name__
        if not self.left or not name.startswith(_DRAWS):
            raise RuntimeError(f"cannot hold what {name} draws")
        if name == "randperm":
            return found.copy_(torch.arange(len(found)))
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        whole = given.get("low", given.get("from", 0))
        return found.fill_(0.5 if found.is_floating_point() else whole)


class _Stand(nn.Module):
    """In place of the model: answers its calls in turn, and remembers what it was called with."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__()
        # As a matrix of weights is, and is called: some penalties leave out all else.
        self.before, self.after = (nn.Parameter(torch.ones(1, 1).double()) for _ in range(2))
        self._answers, self.calls = answers, list[Any]()

    def named_parameters(self, *unused: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield "weight", self.after if self.calls else self.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self._answers[len(self.calls) - 1]


class _Trial:
    """A batch of a task, drawn outputs of its model, or the model, and the samples of a part."""

    def __init__(self, task: Task, batch: Batch, outputs: list[Any] | nn.Module, size: int) -> None:
        self._task, self._batch, self._outputs, self._size = task, batch, outputs, size
        self._holds = False

    def look(self, given: _Generators) -> Look:
        """Compare the loss with itself, drawn again, and with those of its parts."""
        try:
            with given:
                (whole, stand), (again, _), (other, called) = (
                    self._loss(self._batch, self._outputs, seed) for seed in (1, 1, 2)
                )
        except TaskError:
            raise
        except AttributeError as error:
            return Look(apart=f"asks the model for more than its answer ({error})")
        except Exception as error:  # whatever it makes of a model that is none
            return Look(apart=f"{FAILS} ({quoted(error)})", draws=given.said)
        apart = "" if len(stand.calls) == 1 else f"calls the model {len(stand.calls)} times"
        pair = torch.autograd.grad(
            whole, (stand.before, stand.after), allow_unused=True, retain_graph=True
        )
        reads = "before" if pair[0] is not None else "after" if pair[1] is not None else ""
        draws = given.said
        if not draws and not _equal(whole, again):
            draws = "draws numbers that torch's seed does not decide"
        self._holds = not (_equal(whole, other) and _same(stand.calls, called.calls))
        if draws:
            return Look("", "", apart, reads, draws)
        if self._holds:
            try:
                whole, stand = self._loss(self._batch, self._outputs, 1)
            except Exception:  # what it draws cannot be held, or is not to be a half
                return Look("", "", apart, reads)
        if not bool(whole.isfinite()):
            return Look("", "", apart, reads)
        return Look(self._by_samples(whole, stand), self._by_positions(whole, stand), apart, reads)

    def _loss(self, batch: Batch, outputs: Any, seed: int) -> tuple[Tensor, _Stand]:
        torch.manual_seed(seed)
        stand = _Stand(outputs)
        model = outputs if isinstance(outputs, nn.Module) else stand
        with _Held() if self._holds else nullcontext():  # type: ignore[no-untyped-call]
            return scalar_of(self._task, self._task.loss(model, batch)), stand

    def _by_samples(self, whole: Tensor, stand: _Stand) -> str:
        count, size = len(self._batch[0]), self._size

        def one(tensor: Tensor, place: int) -> Tensor:
            return tensor[place * size :][:size] if _has(tensor, 0, count) else tensor

        if count < 2 or not all(_has(t, 0, count) for t in _floats(self._outputs)):
            return ""
        batches = [tuple(one(t, i) for t in self._batch) for i in range(-(-count // size))]
        whose = "its samples'" if size == 1 else "its parts'"
        return self._compared(whole, stand, batches, one, whose)

    def _by_positions(self, whole: Tensor, stand: _Stand) -> str:
        length = length_of(self._batch)
        counts = [n for n in range(2, MOST_SLICES + 1) if length and length % n == 0]
        if not counts:
            return ""
        if not all(_has(t, 1, length) for t in _floats(self._outputs)):
            return "is of an output without positions"
        count = counts[-1]

        def one(tensor: Tensor, place: int) -> Tensor:
            return part_of((tensor,), count, place)[0] if _has(tensor, 1, length) else tensor

        batches = [part_of(self._batch, count, i) for i in range(count)]
        return self._compared(whole, stand, batches, one, "its slices'")

    def _compared(
        self,
        whole: Tensor,
        stand: _Stand,
        batches: list[Batch],
        one: Callable[[Tensor, int], Tensor],
        whose: str,
    ) -> str:
        """Why the loss is not made of those of `batches`; `one` takes the same part of a tensor."""
        total = torch.zeros((), dtype=torch.float64)
        counts = counts_of(self._task, batches)
        for place, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            if not count:
                continue

            def cut(tensor: Tensor, place: int = place) -> Tensor:
                return one(tensor, place)

            try:
                loss, part = self._loss(batch, tree_map_only(Tensor, cut, self._outputs), 1)
            except Exception as error:  # of a loss that takes whole batches only
                return f"fails for a part of a batch ({quoted(error)})"
            if not _same(part.calls, tree_map_only(Tensor, cut, stand.calls)):
                return f"calls the model with other than {whose} part"
            total = total + loss.detach() * (count / counts.sum())
        if _equal(whole, total):
            return ""
        if is_counted(self._task):
            return f"is not the mean of {whose} losses over what `counted` counts"
        return f"is not the mean of {whose} losses"


def _floats(outputs: Any) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def _has(tensor: Tensor, dim: int, size: int) -> bool:
    return tensor.dim() > dim and tensor.shape[dim] == size


def _equal(one: Tensor, other: Tensor) -> bool:
    a, b = float(one.detach()), float(other.detach())
    near = _ROUNDING.get(one.dtype, 0.05)
    return math.isclose(a, b, rel_tol=near, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and torch.equal(a, b) if isinstance(a, Tensor) else True
        for a, b in pairs
    )
