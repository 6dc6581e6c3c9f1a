"""The optimizers that a job may name, looked up without torch."""

from __future__ import annotations

import functools
import math
import re
from importlib.util import find_spec
from pathlib import Path

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.jobs.job import Job


def check_optimizer(job: Job) -> None:
    """ConfigError for an optimizer that is unknown, or not for members. Loads no torch."""
    name, known = str(job.train.optimizer.get("name", "")), optimizers()
    if not name:
        raise ConfigError(
            "train.optimizer has no name", "as in { name = 'sgd', lr = 0.05, momentum = 0.9 }"
        )
    if known and name.lower() not in known:
        raise ConfigError(f"no optimizer '{name}'", did_you_mean(name, known))
    for key in sorted(_NUMBERS & set(job.train.optimizer)):
        value = job.train.optimizer[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"optimizer '{name}': {key} = {value!r} (allowed is a finite number)")
    if name.lower() in _LOOKS_AGAIN:
        raise ConfigError(
            f"optimizer '{name}' computes the loss again within its step, which neither a member "
            "nor a rank can",
            "use adam or sgd",
        )


_LOOKS_AGAIN = ("lbfgs",)
_NUMBERS = {"lr", "momentum", "weight_decay", "dampening", "eps", "rho", "alpha", "lambd"}
"""Settings that are numbers wherever an optimizer of torch has them."""

ELEMENTWISE = (
    "sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop",
    "asgd",
)  # fmt: skip
"""Optimizers that step each element by itself. All others are taken to look at whole tensors."""

LAYER_WISE = ("lars", "lamb")
"""The optimizers of `edgetrain.tasks.layerwise`, which needs torch."""


@functools.cache
def optimizers() -> tuple[str, ...]:
    """The classes that torch.optim imports from its modules, and those of edgetrain's own, in small
    letters; (): torch's are not known."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ()
    try:
        text = (Path(found.origin).parent / "optim" / "__init__.py").read_text("utf-8")
    except OSError:
        return ()
    names = re.findall(r"^from (?:torch)?\.(?:optim\.)?\w+ import (\w+)", text, re.MULTILINE)
    classes = [name for name in names if name[0].isupper() and name != "Optimizer"]
    return (*(name.lower() for name in classes), *LAYER_WISE)
