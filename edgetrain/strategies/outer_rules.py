"""The formulas of outer rules; `outer` has their table and the definition.

Pure: float32 vectors in and out. No socket, no clock, no membership, no codec; which contributions
a round has, and how they become one, is the merge rule's business.

**Sign.** A contribution is a displacement, the sum of a member's steps: it points downhill already.
Papers with the fleet's progress as a gradient take "parameters before minus after": it points
uphill, and they subtract the step. Here `merged` is minus that pseudo-gradient, and the
step is added to the base. All rules below are odd in their input, so both give the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from edgetrain.strategies.spelling import spelled
from edgetrain.vectors.vector import Vector, tiles

RuleState: TypeAlias = Mapping[str, Vector]
"""State of a rule, by names of its choice: float32 vectors [elements]."""

MOST_MAGNITUDE = 2.0**40
"""Largest allowed element of a merged contribution: squares of larger ones, added up over a long
run, would leave float32."""


class OuterRule(ABC):
    """Turns a round's merged contribution into the step added to the base: a formula on one tile.
    `arguments`: of its row.

    The hub keeps the state in its journal's snapshots, and with each round the merged contribution.
    A restored hub gives the rule the state and steps on these again, in order: the same bits.
    """

    name: str
    begins: Mapping[str, float]
    """The names of its vectors, and the value of all their elements before the first round."""

    def __init__(self, *arguments: float) -> None:
        self.arguments = arguments
        self.begins = {}
        self._vectors: dict[str, Vector] = {}

    @property
    def spelled(self) -> str:
        """With all its arguments: `find(rule.spelled)` gives an equal rule."""
        return spelled(self.name, self.arguments)

    def start(self, elements: int) -> None:
        """Begin anew, for vectors of this length."""
        self._vectors = {
            name: np.full(elements, value, np.float32) for name, value in self.begins.items()
        }

    def step(self, merged: Vector, start: int) -> None:
        """Overwrite `merged`, the elements [start, start + size) of the round's merged
        contribution, with the step of these elements, and update the state. Elementwise: a round
        may be stepped in ranges of any size and order."""
        for here in tiles(merged.size):
            there = slice(start + here.start, start + here.stop)
            self._step_tile(merged[here], *(vector[there] for vector in self._vectors.values()))

    @abstractmethod
    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        """`step` on one tile, with the rule's own vectors there."""

    def state(self) -> RuleState:
        """The state as views, valid until the next step. {}: none, a step follows from the merged
        contribution alone."""
        return dict(self._vectors)

    def restore(self, state: RuleState) -> None:
        """Take over the `state` of an equal rule. Copies the vectors."""
        self._vectors = {name: state[name].copy() for name in self.begins}


class Sgd(OuterRule):
    """step = lr merged. With lr = 1 the bits of having no outer rule.

    FedAvg's server rate: Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 1 with
    plain SGD as ServerOpt.
    """

    name = "sgd"

    def _step_tile(self, merged: Vector, *vectors: Vector) -> None:
        (lr,) = self.arguments
        if lr != 1:
            merged *= lr


class Momentum(OuterRule):
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


class Adam(OuterRule):
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


class Adagrad(OuterRule):
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


RULES: Mapping[str, type[OuterRule]] = {
    rule.name: rule for rule in (Sgd, Momentum, Nesterov, Adam, Yogi, Adagrad)
}
