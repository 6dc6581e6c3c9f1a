"""A task's model without memory, built on torch's meta device, and steps without numbers: there
tensors have only shapes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from edgetrain.errors import TaskError, quoted
from edgetrain.tasks.protocol import Task

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Outline:
    """A model that may be looked at, and whether it could be had without memory."""

    model: torch.nn.Module
    problem: str
    """Why it had to be built in memory; "": it was not."""

    @property
    def parameters(self) -> int:
        """Trained parameters, tied ones once. TaskError for no model, and one with a lazy layer."""
        if not isinstance(self.model, torch.nn.Module):
            raise TaskError(
                f"model() of the task returns a {type(self.model).__name__}", "a module"
            )
        for name, each in (*self.model.named_parameters(), *self.model.named_buffers()):
            if torch.nn.parameter.is_lazy(each):
                raise TaskError(
                    f"the task's model has a lazy layer: its tensor '{name}' has no shape yet",
                    "say the layer's sizes, or call the model with one batch in model()",
                )
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def outline_of(task: Task) -> Outline:
    """The task's model on the meta device, or in memory. Torch's generator is not touched."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = task.model()
            if not any(each.device.type == "meta" for each in model.parameters()):
                problem = "it makes its tensors elsewhere"
            elif kept := _kept(model):
                problem = f"its '{kept}' is a list or dict with tensors, which have no names"
            else:
                return Outline(model, "")
        except Exception as error:  # whatever a model's own code raises
            problem = quoted(error)
        return Outline(task.model(), f"the model cannot be built without memory: {problem}")


def _kept(model: torch.nn.Module) -> str:
    """An attribute that is no tensor and holds some on the meta device, where nothing will fill
    them, by name; "": there is none."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers") or isinstance(value, torch.Tensor):
                continue
            if any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(value)):
                return f"{name}.{key}".removeprefix(".")
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries log and warn: torch logs what it raises, with all frames."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def without_numbers() -> Iterator[FakeTensorMode]:
    """Within it new tensors have shapes and no numbers. Torch's generator is not touched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        quiet(),
        torch.random.fork_rng(devices=[]),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


def gpus() -> list[int]:
    if not torch.cuda.is_available():
        return []
    return [
        torch.cuda.get_device_properties(place).total_memory
        for place in range(torch.cuda.device_count())
    ]
