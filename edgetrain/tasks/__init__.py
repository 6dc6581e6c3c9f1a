"""What there is to learn: tasks, each a model, the data of every member, a loss, an evaluation.

A job names one as `task = "edgetrain.tasks:digits"`, or `"your_module:your_factory"`. Tasks know
nothing of members' processes, networks or strategies. Their factories load torch; what a
job says of them is checked without it (`spelling`).

Doors: datasets, draws, effects, experts, fixed, flat, held, layers, layerwise, losses, meta,
own_data, partition, personal, private_work, profiling, protocol, slices, spelling, vmapped,
weights, work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgetrain.tasks.classification import Classification
    from edgetrain.tasks.dataless import sized
    from edgetrain.tasks.handwriting import digits, mnist
    from edgetrain.tasks.load import load_task
    from edgetrain.tasks.pictures import cifar10
    from edgetrain.tasks.protocol import Task, batches_from
    from edgetrain.tasks.text import char_lm

__all__ = [
    "Classification",
    "Task",
    "batches_from",
    "char_lm",
    "cifar10",
    "digits",
    "load_task",
    "mnist",
    "sized",
]
_HOMES = {
    "Classification": "classification",
    "Task": "protocol",
    "batches_from": "protocol",
    "char_lm": "text",
    "cifar10": "pictures",
    "digits": "handwriting",
    "load_task": "load",
    "mnist": "handwriting",
    "sized": "dataless",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"edgetrain.tasks.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'edgetrain.tasks' has no attribute '{name}'")
