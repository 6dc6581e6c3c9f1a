"""What there is to learn: tasks, each a model, the data of every member, a loss, an evaluation.

A job names one as `task = "edgetrain.tasks:digits"`, or `"your_module:your_factory"`. Tasks know
nothing of members' processes, networks or strategies. Importing this package loads torch.
"""

from edgetrain.tasks.classification import Classification
from edgetrain.tasks.handwriting import digits, mnist
from edgetrain.tasks.load import load_task
from edgetrain.tasks.pictures import cifar10
from edgetrain.tasks.protocol import Task, batches_from
from edgetrain.tasks.sized import sized
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
