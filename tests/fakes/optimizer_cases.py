"""Tasks for optimizers that look at whole tensors, and for parameters in groups."""

from __future__ import annotations

import group_cases as cases
from torch import nn

from edgetrain.tasks import char_lm, digits


def weights(**options):
    """Digits, and a model of matrices only: some optimizers take nothing else."""
    task = digits(**options)
    task.model = lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12, bias=False), nn.Tanh(),
        nn.Linear(12, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False),
    )  # fmt: skip
    return task


def grouped(**options):
    """char_lm, which says that norms and biases do not decay."""
    task = char_lm(**options)
    task.optimizer_groups = [{"parameters": ["vectors"], "weight_decay": 0.0}]
    return task


def weights_job(optimizer: str, *words: str):
    return cases.job_of(
        "task=optimizer_cases:weights", f"optimizer={{ name = '{optimizer}', lr = 0.02 }}", *words
    )


DECAYING = ("optimizer={ name = 'adamw', lr = 0.003, weight_decay = 0.5 }",)
"""A decay that shows within a few steps."""


def grouped_job(*words: str):
    return cases.job_of(*cases.CHARS, "task=optimizer_cases:grouped", *DECAYING, *words)
