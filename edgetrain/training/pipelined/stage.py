"""What one stage computes: its layers, its part of the batch, its optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from edgetrain.errors import BadMessage, BadPayload
from edgetrain.exchange.messages import Figure
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import tuning_of
from edgetrain.jobs.pipeline import StagePlan
from edgetrain.tasks.draws import model_of, seed_step
from edgetrain.tasks.losses import no_loss, scalar_of
from edgetrain.tasks.profiling import inputs_of, loss_of
from edgetrain.tasks.protocol import Batch, Task, counts_of
from edgetrain.tasks.work import begin_at, optimizer_for, tune
from edgetrain.training.member.pacing import HeatCap
from edgetrain.training.member.state import load_state, pack, state_of, unpack
from edgetrain.training.servers.member import diverged
from edgetrain.training.servers.parts import cut, with_buffers
from edgetrain.training.servers.steps import batches_of
from edgetrain.vectors.vector import Buffer

_INT8 = 127.0


def encode(tensor: Tensor, word: str) -> bytes:
    """A float32 tensor as stages pass it on: float32; bf16, rounded to nearest; or int8, of which
    127 stands for the largest magnitude, a float32 behind the numbers."""
    flat = tensor.detach().contiguous().reshape(-1)
    if word == "bf16":
        return flat.bfloat16().view(torch.uint8).numpy().tobytes()
    if word == "int8":
        largest = flat.abs().amax()
        scale = torch.where(largest > 0, largest / _INT8, torch.ones_like(largest))
        coded = torch.round(flat / scale).clamp(-_INT8, _INT8).to(torch.int8)
        return coded.numpy().tobytes() + scale.reshape(1).numpy().tobytes()
    return flat.numpy().tobytes()


def decode(payload: Buffer | None, shape: tuple[int, ...], word: str) -> Tensor:
    """The tensor that `encode` made this of. BadPayload for another length than the shape's."""
    raw = memoryview(payload or b"")
    count = math.prod(shape)
    size = {"float32": 4 * count, "bf16": 2 * count, "int8": count + 4}[word]
    if raw.nbytes != size:
        raise BadPayload(
            f"an activation of {raw.nbytes} bytes; {'x'.join(map(str, shape))} in {word} has {size}"
        )
    if word == "int8":
        scale = np.frombuffer(raw[count:], np.float32).copy()
        coded = np.frombuffer(raw[:count], np.int8).copy()
        return (torch.from_numpy(coded).float() * torch.from_numpy(scale)).reshape(shape)
    whole = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8))
    kind = torch.bfloat16 if word == "bf16" else torch.float32
    return whole.view(kind).float().reshape(shape)


class Watcher:
    """Is told what a stage does; this one does nothing about it."""

    def begin(self, step: int) -> None:
        """All stages begin, after this many steps."""

    def step(self, step: int, loss: float) -> None:
        """A step is over, with the loss of all stages."""

    def evaluate(self, step: int, model: nn.Module) -> Figure | None:
        """This is the model after so many steps; returns how good it is."""
        return None


class TorchStage:
    def __init__(
        self,
        job: Job,
        task: Task,
        plan: StagePlan,
        stage: int,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`sleep` makes a micro-batch last as long as on the stage's device."""
        self._job, self._task, self._plan, self._stage = job, task, plan, stage
        self._watcher, self._clock, self._sleep = watcher or Watcher(), clock, sleep
        self.clips = job.train.clip > 0
        self.cap: HeatCap | None = None
        self._is_first, self._is_last = stage == 0, stage == plan.placement.pipeline - 1
        self._parts = cut(task, plan.placement, None)
        self.computed_s = 0.0
        """Seconds of all forward and backward passes, held to the device's pace."""

    # -- state ---------------------------------------------------------------------------------

    def begin(self, step: int, state: bytes) -> None:
        """See Computes. BadMessage for a state that is not this stage's."""
        whole = with_buffers(model_of(self._task, self._job.seed))
        module = self._parts.build(self._stage).to_empty(device="cpu")
        theirs = self._parts.tensors(whole)
        self._tensors = self._parts.tensors(module)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(theirs[name])
        del whole, theirs
        self._module = module.train()
        named: list[tuple[str, Tensor]] = [
            (name, tensor)
            for name, tensor in self._tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
        named = named or [("", nn.Parameter(torch.zeros(1)))]  # a stage of activations alone
        self._optimizer = optimizer_for(named, self._job.train.optimizer, self._task)
        tune(self._optimizer, replace(tuning_of(self._job), clip=0.0))
        begin_at(self._optimizer, step)
        if state:
            self._load(state)
        self._optimizer.zero_grad()
        self._step, self._batches = step - 1, batches_of(self._task, self._job, 1, 0, step)
        self._out: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._watcher.begin(step)

    def state(self) -> bytes:
        """See Computes: sizes and plain values in msgpack, then the tensors' bytes; no code."""
        tree = {"tensors": dict(self._tensors), "optimizer": state_of(self._optimizer)}
        values, buffers = pack(tree)
        head = msgpack.packb([values, [int(each.size) for each in buffers]])
        return b"".join(
            [len(head).to_bytes(8, "little"), head, *(each.tobytes() for each in buffers)]
        )

    def _load(self, state: bytes) -> None:
        try:
            tree = tree_of(state)
            with torch.no_grad():
                for name, tensor in self._tensors.items():
                    tensor.copy_(tree["tensors"][name])
            load_state(self._optimizer, tree["optimizer"])
        except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise BadMessage(f"a state that is not of stage {self._stage}: {error}") from None

    def evaluate(self, step: int, stage: int, state: bytes) -> Figure | None:
        """See Computes. BadMessage for a state that is none."""
        if stage == 0:
            self._whole: dict[str, Tensor] = {}
        self._whole |= tree_of(state)["tensors"]
        if stage < self._plan.placement.pipeline - 1:
            return None
        model = self._task.model()
        mine: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        try:
            with torch.no_grad():
                for name in self._whole.keys() & mine.keys():
                    mine[name].copy_(self._whole[name])
        except (RuntimeError, TypeError) as error:
            raise BadMessage(f"states that are not of this model: {error}") from None
        self._whole = {}
        return self._watcher.evaluate(step, model)

    # -- computing -----------------------------------------------------------------------------

    def _begin_step(self, step: int) -> None:
        self._step = step
        if not (self._is_first or self._is_last):
            return
        count = self._plan.placement.microbatches
        split = [tensor.tensor_split(count) for tensor in next(self._batches)]
        self._micro: list[Batch] = [tuple(part[i] for part in split) for i in range(count)]
        own = counts_of(self._task, self._micro).tolist()  # by what counts over all micro-batches
        self._divisors = [sum(own) / each if each else math.inf for each in own]

    def forward(self, step: int, micro: int, given: Buffer | None) -> Buffer | None:
        began = self._clock()
        if step != self._step:
            self._begin_step(step)
        # What a stage draws (dropout) is the same when it computes a step again.
        seed_step(self._job.seed, step, micro, self._stage)
        entered: Tensor | None = None
        if self._is_first:
            args, kwargs = inputs_of(self._task, self._micro[micro])
            output = self._module(*args, **kwargs)
        else:
            shape = self._plan.shapes[self._stage - 1]
            entered = decode(given, shape, self._job.fleet.activations).requires_grad_()
            output = self._module(entered)
        if self._is_last:
            output = self._loss(output, micro)
        self._out[micro] = entered, output
        passed = None
        if not self._is_last:
            expected = self._plan.shapes[self._stage]
            if tuple(output.shape) != expected:
                raise BadPayload(
                    f"stage {self._stage} passes on {tuple(output.shape)}, planned was {expected}"
                )
            passed = encode(output, self._job.fleet.activations)
        self._hold(began, 0)
        return passed

    def _loss(self, output: Any, micro: int) -> Tensor:
        if math.isinf(self._divisors[micro]):
            return no_loss(output)
        loss = loss_of(self._task, output, self._micro[micro])
        return scalar_of(self._task, loss) / self._divisors[micro]

    def backward(self, micro: int, given: Buffer | None) -> tuple[Buffer | None, float]:
        began = self._clock()
        entered, output = self._out.pop(micro)
        loss = 0.0
        if self._is_last:
            loss = float(output.detach())
            if not math.isfinite(loss):
                raise diverged("the loss", self._step + 1)
            output.backward()  # type: ignore[no-untyped-call]
        elif output.requires_grad:
            shape = self._plan.shapes[self._stage]
            output.backward(decode(given, shape, self._job.fleet.activations))  # type: ignore[no-untyped-call]
        passed = None
        if entered is not None:
            gradient = torch.zeros_like(entered) if entered.grad is None else entered.grad
            passed = encode(gradient, self._job.fleet.activations)
        self._hold(began, 1)
        return passed, loss

    def _gradients(self) -> Iterator[Tensor]:
        every = (each for group in self._optimizer.param_groups for each in group["params"])
        return (each.grad for each in every if each.grad is not None)

    def squares(self) -> float:
        found = sum(float(each.double().square().sum()) for each in self._gradients())
        if not math.isfinite(found):
            raise diverged("the gradient", self._step + 1)
        return found

    def finish(self, step: int, loss: float, squares: float) -> None:
        if self.clips:  # as torch.nn.utils.clip_grad_norm_
            for each in self._gradients():
                each.mul_(min(1.0, self._job.train.clip / (math.sqrt(squares) + 1e-6)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._watcher.step(step + 1, loss)

    def _hold(self, began: float, way: int) -> None:
        if self.cap is not None:
            self._sleep(self.cap.rest_s(self._clock() - began))
        left = self._plan.paces[self._stage][way] - (self._clock() - began)
        if left > 0:
            self._sleep(left)
        self.computed_s += self._clock() - began


def tree_of(state: bytes) -> dict[str, Any]:
    """The values and tensors of a stage's state. BadMessage for anything else."""
    size = int.from_bytes(state[:8], "little")
    try:
        values, sizes = msgpack.unpackb(state[8 : 8 + size], max_map_len=0)
        whole = np.frombuffer(bytearray(state[8 + size :]), np.uint8)
        if sum(sizes) != whole.size or min(sizes, default=0) < 0:
            raise ValueError("its tensors have other sizes")
        tree = unpack(values, np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    except BadMessage:
        raise
    except Exception as error:  # msgpack and NumPy raise half a dozen types on bad bytes
        raise BadMessage(f"no state of a stage: {error}") from None
    if not isinstance(tree, dict) or not {"tensors", "optimizer"} <= tree.keys():
        raise BadMessage("no state of a stage")
    return tree
