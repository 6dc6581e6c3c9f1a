"""Outer rules, the part of a strategy that says what the hub makes of a round's merged contribution
before it goes to all: as it is, or a step of a second optimizer, whose state lives at the hub.

Pure: float32 vectors in and out. No socket, no clock, no membership, no codec; which contributions
a round has, and how they become one, is the merge rule's business.

**Sign.** A contribution is a displacement, where the member's steps have led, so it points downhill
already. Papers that take the fleet's progress for a gradient have "parameters before minus after",
which points uphill, and subtract the step. Here `merged` is minus that pseudo-gradient, and the
step is added to the base. All rules below are odd in their input, so both give the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.strategies.spelling import Parameter, arguments_of, spelled, split
from edgetrain.vectors.vector import Vector, tiles

MOST_MAGNITUDE = 2.0**40
"""Largest element of a merged contribution that outer rules take: squares of larger ones, added up
for as many rounds as a run can have, would leave float32."""

RuleState: TypeAlias = Mapping[str, Vector]
"""State of a rule, by names of its choice: float32 vectors [elements]."""


class OuterRule(Protocol):
    """Makes the step that is added to the base of a round's merged contribution.

    The hub keeps the state in its journal's snapshots, and with each round the merged contribution.
    A restored hub gives the rule the state and steps on these again, in order: the same bits.
    """

    @property
    def spelled(self) -> str:
        """With all its arguments: `find(rule.spelled)` gives an equal rule."""

    def start(self, elements: int) -> None:
        """Begin anew, for vectors of this length."""

    def step(self, merged: Vector, start: int) -> None:
        """Overwrite `merged`, the elements [start, start + size) of the round's merged
        contribution, with what is added to the base there, and remember what the rule remembers of
        these elements. Elementwise: a round may be stepped in ranges of any size and order."""

    def state(self) -> RuleState:
        """All that the rule remembers: views, valid until the next step. {}: it remembers nothing,
        so that a step follows from the merged contribution alone."""

    def restore(self, state: RuleState) -> None:
        """Remember exactly this, which an equal rule gave as its `state`. Copies the vectors."""


class _Elementwise:
    """An outer rule as a formula on one tile; `arguments` are those of its row."""

    name: str
    begins: Mapping[str, float]
    """The names of its vectors, and the value of all their elements before the first round."""

    def __init__(self, *arguments: float) -> None:
        self.arguments = arguments
        self.begins = {}
        self._vectors: dict[str, Vector] = {}

    @property
    def spelled(self) -> str:
        """See OuterRule."""
        return spelled(self.name, self.arguments)

    def start(self, elements: int) -> None:
        """See OuterRule."""
        self._vectors = {
            name: np.full(elements, value, np.float32) for name, value in self.begins.items()
        }

    def step(self, merged: Vector, start: int) -> None:
        """See OuterRule."""
        for here in tiles(merged.size):
            there = slice(start + here.start, start + here.stop)
            self._step_tile(merged[here], *(vector[there] for vector in self._vectors.values()))

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        raise NotImplementedError

    def state(self) -> RuleState:
        """See OuterRule."""
        return dict(self._vectors)

    def restore(self, state: RuleState) -> None:
        """See OuterRule."""
        self._vectors = {name: state[name].copy() for name in self.begins}


class Sgd(_Elementwise):
    """step = lr merged. With lr = 1 the bits of having no outer rule.

    FedAvg's server rate: Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 1 with
    plain SGD as ServerOpt.
    """

    name = "sgd"

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr,) = self.arguments
        if lr != 1:
            merged *= lr


class Momentum(_Elementwise):
    """v <- m v + merged; step = lr v.

    FedAvgM: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification, 2019, section 4.2 (there with lr = 1).
    """

    name = "momentum"

    def __init__(self, lr: float, m: float) -> None:
        super().__init__(lr, m)
        self.begins = {"velocity": 0.0}

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr, m), (velocity,) = self.arguments, vectors
        velocity *= m
        velocity += merged
        np.multiply(velocity, lr, out=merged)


class Nesterov(Momentum):
    """v <- m v + merged; step = lr (merged + m v).

    DiLoCo: Douillard et al., 2023, algorithm 1 and section 3.1, whose OuterOpt is Nesterov momentum
    (0.7, 0.9) in the form of Sutskever et al., ICML 2013, as torch.optim.SGD has it.
    """

    name = "nesterov"

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr, m), (velocity,) = self.arguments, vectors
        velocity *= m
        velocity += merged
        merged += m * velocity
        merged *= lr


class Adam(_Elementwise):
    """m <- b1 m + (1 - b1) merged; v <- b2 v + (1 - b2) merged^2; step = lr m / (sqrt(v) + eps).

    FedAdam: Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2: no bias
    correction, and v begins as eps^2 (eps is their tau, lr their eta).
    """

    name = "adam"

    def __init__(self, lr: float, b1: float, b2: float, eps: float) -> None:
        super().__init__(lr, b1, b2, eps)
        self.begins = {"first": 0.0, "second": eps**2}

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr, b1, _, eps), (first, second) = self.arguments, vectors
        self._add_square(second, merged * merged)
        first *= b1
        first += (1 - b1) * merged
        np.multiply(first, lr, out=merged)
        merged /= np.sqrt(second) + eps

    def _add_square(self, second: Vector, square: Vector) -> None:
        b2 = self.arguments[2]
        second *= b2
        second += (1 - b2) * square


class Yogi(Adam):
    """As Adam, but v <- v - (1 - b2) merged^2 sign(v - merged^2).

    FedYogi: Reddi et al., ICLR 2021, algorithm 2.
    """

    name = "yogi"

    def _add_square(self, second: Vector, square: Vector) -> None:
        second -= (1 - self.arguments[2]) * square * np.sign(second - square)


class Adagrad(_Elementwise):
    """v <- v + merged^2; step = lr merged / (sqrt(v) + eps).

    FedAdagrad: Reddi et al., ICLR 2021, algorithm 2 with beta_1 = 0, as they run it; v begins as
    eps^2.
    """

    name = "adagrad"

    def __init__(self, lr: float, eps: float) -> None:
        super().__init__(lr, eps)
        self.begins = {"second": eps**2}

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr, eps), (second,) = self.arguments, vectors
        second += merged * merged
        merged *= lr
        merged /= np.sqrt(second) + eps


@dataclass(frozen=True)
class OuterRow:
    """A row of the table."""

    build: type[_Elementwise]
    parameters: tuple[Parameter, ...]
    summary: str
    source: str

    @property
    def name(self) -> str:
        """Its name in a job."""
        return self.build.name

    @property
    def spelling(self) -> str:
        """Spelling in a job, with the names of its parameters and their defaults."""
        return spelled(self.name, [f"{each.name} = {each.default:g}" for each in self.parameters])


def _rate(default: float) -> Parameter:
    return Parameter("lr", 1e-9, 1000.0, default)


def _decay(name: str, default: float) -> Parameter:
    return Parameter(name, 0.0, 1.0, default)


_EPS = Parameter("eps", 1e-12, 1000.0, 1e-3)
_MOMENTS = (_decay("b1", 0.9), _decay("b2", 0.99), _EPS)

_ROWS = (
    OuterRow(
        Sgd, (_rate(1.0),),
        "the merged contribution times lr; sgd(1) is having no outer rule",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        Momentum, (_rate(1.0), _decay("m", 0.9)),
        "momentum over rounds",
        "Hsu et al., 2019",
    ),
    OuterRow(
        Nesterov, (_rate(0.7), _decay("m", 0.9)),
        "Nesterov's momentum over rounds",
        "Douillard et al., DiLoCo, 2023",
    ),
    OuterRow(
        Adam, (_rate(0.03), *_MOMENTS),
        "Adam over rounds, without bias correction",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        Yogi, (_rate(0.03), *_MOMENTS),
        "adam whose second moment grows no faster than it shrinks",
        "Reddi et al., ICLR 2021",
    ),
    OuterRow(
        Adagrad, (_rate(0.03), _EPS),
        "steps divided by the length of all before them, elementwise",
        "Reddi et al., ICLR 2021",
    ),
)  # fmt: skip

TABLE: dict[str, OuterRow] = {row.name: row for row in _ROWS}


def parse(text: str) -> OuterRule:
    """A fresh rule, as a job's `strategy.outer` spells it: "nesterov(0.7, 0.9)", or "nesterov" for
    the defaults. ConfigError names what is wrong with the spelling or a value."""
    name, words = split(text)
    if name not in TABLE:
        raise ConfigError(f"no outer rule '{name}'", did_you_mean(name, TABLE))
    row = TABLE[name]
    return row.build(*arguments_of(name, row.spelling, row.parameters, words))
