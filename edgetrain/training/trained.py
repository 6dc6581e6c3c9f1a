"""What a run leaves behind: its trained model, as a file that anyone can read."""

from __future__ import annotations

from pathlib import Path

import torch

from edgetrain.errors import ConfigError
from edgetrain.runs.files import replacing
from edgetrain.tasks import weights


def write_model(model: torch.nn.Module, path: Path) -> None:
    """Write a model's parameters and buffers as safetensors, whole or not at all. ConfigError."""
    try:
        with replacing(path) as draft:
            weights.save(model, draft)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", "free some space on that disk"
        ) from None
