"""Trained models as files: `model.safetensors`, written at the end of a run, read at the start.

The format holds arrays and names and no code. Names are those of `named_parameters` and
`named_buffers`; a tied parameter is there once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from pathlib import Path

import torch

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.files.writing import replacing, sync
from edgetrain.tasks.fixed import Unexchanged, personal_of
from edgetrain.tasks.flat import statistics_of

FILE = "model.safetensors"
_COUNT = "num_batches_tracked"


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once, and the buffers that belong to the model's state, by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    return found | {name: each for name, each in model.named_buffers() if name in kept}


def unnoised_check(model: torch.nn.Module, statistics: bool, unit: str) -> Callable[[], None]:
    """A function that raises ConfigError if, since now, something has changed that leaves with the
    model and is in no contribution, so that it has no noise: frozen parameters, buffers, and
    running statistics unless they are in the vector (`statistics`). Counts of batches may: they are
    equal whatever the data are. `unit`: of privacy; "none": nothing is checked."""
    exchanged = {id(each): each for _, each in statistics_of(model) if statistics}
    personal = personal_of(model)  # which leaves with no model of the fleet

    def unnoised(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        # Of a gradient of examples nothing is left in a buffer that could be computed with.
        others = model.named_buffers() if unit == "example" else ()
        return [
            (name, each)
            for name, each in (tensors_of(model) | dict(others)).items()
            if not (each.requires_grad or id(each) in exchanged or name.endswith(_COUNT))
            and name not in personal
        ]

    watched = None if unit == "none" else Unexchanged(model, unnoised, sys.maxsize)

    def check() -> None:
        for name in watched.changed() if watched else ():
            raise ConfigError(
                f"privacy.unit = '{unit}': training changes '{name}', which is in no contribution: "
                "it would leave with the trained model, without noise",
                "GroupNorm or LayerNorm, or no buffers"
                if unit == "example"
                else "of BatchNorm take buffers = 'mean' with dga or local-sgd, or GroupNorm; a "
                "buffer made with persistent=False stays with its member",
            )

    return check


def save(model: torch.nn.Module, path: Path, only: Container[str] | None = None) -> None:
    """Write the model's tensors as `path`, or those with `only` these names, whole or not at all.
    ConfigError if the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in tensors_of(model).items()
        if only is None or name in only
    }
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            save_file(held, file.name, metadata={"format": "pt"})  # puts another file there
            sync(Path(file.name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {path}: {error}", "free some space on that disk") from None


def load(model: torch.nn.Module, path: Path) -> None:
    """Put a file's tensors into the model. ConfigError: missing, damaged, another model's, or with
    numbers that are none in what is trained."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            names = set(file.keys())
            mine = tensors_of(model)
            _check_names(path, set(mine), names)
            for name, tensor in mine.items():
                found = file.get_tensor(name)
                _check_values(path, name, found, tensor)
                if not isinstance(tensor, torch.nn.Parameter):  # a buffer may grow in training
                    set_buffer(model, name, found.to(tensor.dtype))
                    continue
                if found.shape != tensor.shape:
                    raise ConfigError(
                        f"start = '{path}': {name} is {tuple(found.shape)} there and "
                        f"{tuple(tensor.shape)} in the task's model",
                        "a file of the same model is needed",
                    )
                tensor.copy_(found)
    except FileNotFoundError:
        raise ConfigError(f"start = '{path}': there is no such file", "runs/…/" + FILE) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"start = '{path}' cannot be read: {error}", "runs/…/" + FILE) from None


def _check_names(path: Path, mine: set[str], theirs: set[str]) -> None:
    for name in sorted(mine - theirs):
        raise ConfigError(f"start = '{path}' has no '{name}'", did_you_mean(name, theirs))
    for name in sorted(theirs - mine):
        raise ConfigError(
            f"start = '{path}': the task's model has no '{name}'", did_you_mean(name, mine)
        )


def _check_values(path: Path, name: str, found: torch.Tensor, mine: torch.Tensor) -> None:
    if found.is_floating_point() != mine.is_floating_point():
        raise ConfigError(
            f"start = '{path}': {name} is {found.dtype} there and {mine.dtype} in the task's model",
            "a file of the same model is needed",
        )
    if mine.requires_grad and not found.to(mine.dtype).isfinite().all():
        raise ConfigError(
            f"start = '{path}': {name} has numbers that are none (NaN, or infinite)",
            "the training that left it exploded: train again, at a lower rate or with train.clip",
        )


def set_buffer(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a buffer this value, in place unless it has another shape or dtype: then, or where the
    model has none of this name yet, it becomes a copy on the old one's device, or the model's.
    AttributeError for a module that is not there."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    buffer = module._buffers.get(key)
    if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
        buffer.copy_(value)
        return
    like = next(model.parameters()) if buffer is None else buffer
    is_kept = key not in module._non_persistent_buffers_set
    module.register_buffer(key, value.to(like.device, copy=True), persistent=is_kept)
