"""Learning rates over the steps of a job: `train.schedule`.

schedule = part { "|" part };  part = "warmup(STEPS)" | "constant" | "linear" [ "(END)" ]
         | "cosine" [ "(END)" ] | "step(FACTOR, STEPS)"

A warm-up comes first, and is followed by one of the others (constant, if none is named).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.strategies.spelling import Parameter, arguments_of, spelled, split

_STEPS, _END = Parameter("steps", 1), Parameter("end", 0.0, 1.0, default=0.0)
_PARTS: dict[str, tuple[Parameter, ...]] = {
    "warmup": (_STEPS,), "constant": (), "linear": (_END,), "cosine": (_END,),
    "step": (Parameter("factor", 0.0, 1.0), _STEPS),
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step, as a factor of the optimizer's."""

    steps: int
    """Steps of the job."""
    warmup: int = 0
    """Steps in which the rate rises evenly to the optimizer's."""
    shape: str = "constant"
    end: float = 0.0
    """linear, cosine: the factor that the last step comes near. step: the factor of each fall."""
    fall_every: int = 0
    """step: steps between two falls."""
    own: Callable[[int, int], float] | None = None
    """A user's own shape: the factor of a step after the warm-up, of how many there are then."""

    def factor(self, step: int) -> float:
        """Factor of the step with this number, from 0; constant after the job's last step."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(step, self.steps) - self.warmup
        if self.own is not None:
            return self.own(done, self.steps - self.warmup)
        share = done / max(1, self.steps - self.warmup)
        match self.shape:
            case "linear":
                return 1 - (1 - self.end) * share
            case "cosine":
                return self.end + (1 - self.end) * (1 + math.cos(math.pi * share)) / 2
            case "step":
                return float(self.end ** (done // self.fall_every))
        return 1.0


def _own(shape: Callable[..., float], *values: float) -> Callable[[int, int], float]:
    return lambda step, steps: float(shape(step, steps, *values))


def parse(text: str, steps: int) -> Schedule | None:
    """The schedule that a job of so many steps spells as `text`; None: "", a constant rate.

    ConfigError names what is allowed.

    >>> [round(parse("warmup(2) | linear", 6).factor(step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not text.strip():
        return None
    warmup, shape, end, fall_every = 0, "", 0.0, 0
    own: Callable[[int, int], float] | None = None
    for place, part in enumerate(text.split("|")):
        name, words = split(part)
        found: Any = extensions.find("schedule", name, _PARTS)
        parameters = found if name in _PARTS else ()
        spelling = spelled(name, [each.name for each in parameters])
        if name in _PARTS:
            values = arguments_of(name, spelling, parameters, words)
        else:
            own, values = extensions.build("schedule", name, words, partial(_own, found)), ()
        taken = int(values[-1]) if _STEPS in parameters else 0
        if taken > steps:
            raise ConfigError(
                f"train.schedule: {name} with steps = {taken} in a run of {steps} steps",
                f"allowed are 1 to {steps}",
            )
        if name == "warmup" and not place:
            warmup = taken
        elif name == "warmup" or shape:
            raise ConfigError(
                f"train.schedule = '{text}'", "it reads as 'warmup(20) | cosine': warm-up first"
            )
        else:
            shape, end, fall_every = name, values[0] if values else 0.0, taken
    return Schedule(steps, warmup, shape or "constant", end, fall_every, own)
