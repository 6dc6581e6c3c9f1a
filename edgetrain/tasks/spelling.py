"""What a job says of its task, as far as it can be judged before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgetrain.errors import TaskError, did_you_mean

OWN = "edgetrain.tasks"
FACTORIES = ("char_lm", "cifar10", "digits", "mnist", "sized")
"""The tasks that come with edgetrain."""


def split(spec: str, called: str) -> tuple[str, str]:
    """Module and object of "module:object". TaskError for anything else."""
    module, colon, name = spec.partition(":")
    if colon and module and name:
        return module, name
    if spec in FACTORIES:
        raise TaskError(f"task '{called}' is not module:object", f"did you mean '{OWN}:{spec}'?")
    raise TaskError(f"task '{called}' is not module:object", "for example edgetrain.tasks:digits")


def check(spec: str, data: Mapping[str, Any]) -> None:
    """TaskError for a task that is not module:object; of edgetrain's own tasks also for a name that
    does not exist, and for a partition that is none."""
    module, name = split(spec, spec)
    if module != OWN:
        return
    if name not in FACTORIES:
        raise TaskError(f"'{OWN}' has no task '{name}'", did_you_mean(name, FACTORIES))
    if "partition" in data:
        from edgetrain.tasks.partition import parse_partition

        parse_partition(data["partition"])
