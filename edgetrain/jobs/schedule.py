"""Learning rates over the steps of a job: `train.schedule`.

schedule = part { "|" part };  part = "warmup(STEPS)" | "constant" | "linear" [ "(END)" ]
         | "cosine" [ "(END)" ] | "step(FACTOR, STEPS)"

A warm-up comes first, and is followed by one of the others (constant, if none is named).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.strategies.spelling import check_count, number, split, whole

_SPELLED = {
    "warmup": "warmup(steps)",
    "constant": "constant",
    "linear": "linear(end)",
    "cosine": "cosine(end)",
    "step": "step(factor, steps)",
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step, as a factor of the optimizer's."""

    steps: int
    """Of the job."""
    warmup: int = 0
    """Steps in which the rate rises evenly to the optimizer's."""
    shape: str = "constant"
    end: float = 0.0
    """linear, cosine: the factor that the last step comes near. step: the factor of each fall."""
    fall_every: int = 0
    """step: steps between two falls."""

    def factor(self, step: int) -> float:
        """Of the step with this number, from 0; after the job's last it stays."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(step, self.steps) - self.warmup
        share = done / max(1, self.steps - self.warmup)
        match self.shape:
            case "linear":
                return 1 - (1 - self.end) * share
            case "cosine":
                return self.end + (1 - self.end) * (1 + math.cos(math.pi * share)) / 2
            case "step":
                return float(self.end ** (done // self.fall_every))
        return 1.0


def parse(text: str, steps: int) -> Schedule | None:
    """The schedule that a job of so many steps spells as `text`; None: "", a constant rate.

    ConfigError names what is allowed.

    >>> [round(parse("warmup(2) | linear", 6).factor(step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not text.strip():
        return None
    warmup, shape, end, fall_every = 0, "", 0.0, 0
    for place, part in enumerate(text.split("|")):
        name, words = split(part)
        if name not in _SPELLED:
            raise ConfigError(
                f"train.schedule = '{text}': no part '{name}'", did_you_mean(name, _SPELLED)
            )
        if name == "warmup" and not place:
            check_count(name, _SPELLED[name], words, 1, 1)
            warmup = _steps(name, "steps", words[0], steps)
            continue
        if name == "warmup" or shape:
            raise ConfigError(
                f"train.schedule = '{text}'", "it reads as 'warmup(20) | cosine': warm-up first"
            )
        shape = name
        if name == "step":
            check_count(name, _SPELLED[name], words, 2, 2)
            end = number(name, "factor", words[0], 0.0, 1.0)
            fall_every = _steps(name, "steps", words[1], steps)
        elif name == "constant":
            check_count(name, _SPELLED[name], words, 0, 0)
        else:
            check_count(name, _SPELLED[name], words, 0, 1)
            end = number(name, "end", words[0], 0.0, 1.0) if words else 0.0
    return Schedule(steps, warmup, shape or "constant", end, fall_every)


def _steps(name: str, what: str, text: str, steps: int) -> int:
    found = whole(name, what, text, 1)
    if found > steps:
        raise ConfigError(
            f"train.schedule: {name} with {what} = {found} in a run of {steps} steps",
            f"allowed are 1 to {steps}",
        )
    return found
