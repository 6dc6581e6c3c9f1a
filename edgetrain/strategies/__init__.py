"""Strategies: a member's half and a merge rule make a name in the table.

The table is data; the halves are pure (no socket, no clock, no thread, no codec). This module
imports neither torch nor numpy until a half is built, so that the command line can list the table
at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from edgetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from edgetrain.strategies.factored import Factors
    from edgetrain.strategies.merging.rule import RoundRule, SliceRule
    from edgetrain.vectors.pool import Vectors
    from edgetrain.vectors.vector import Vector

Contributes = Literal["gradient", "displacement"]


class MemberHalf(Protocol):
    """What runs on a member. The driver calls, for each training step::

        exchange(half.before_step()); optimizer.step(); exchange(half.after_step())

    where `exchange` submits the vector if there is one, then applies the reply of every round
    that is `due`, and after each submits what may `follow_up`. Nothing else may wait.
    """

    every: int
    delay: int
    applied: int
    round: int
    checksum: int
    keeps_rest: bool
    """What a lossy codec leaves out of a contribution stays in the parameters, and so is in the
    next contribution by itself: the driver says with `sent` what got through. Otherwise what is
    left out is the driver's to send later."""

    @property
    def base(self) -> Vector:
        """float32 [elements]: the parameters that all replies so far lead to."""

    def start(self, applied: int, round: int) -> None:
        """Take the parameters as they are for the base after `applied` replies."""

    def before_step(self) -> Vector | None:
        """After backward, before the optimizer's step: a gradient contribution, or None."""

    def after_step(self) -> Vector | None:
        """After the optimizer's step: a displacement at the end of a round, or None."""

    def quiet_steps(self) -> int:
        """How many steps from now on neither submit nor wait."""

    def finish(self) -> Vector | None:
        """After the last step: what was not submitted yet. From now on every round is due."""

    def sent(self, vector: Vector) -> None:
        """Of the contribution that was just submitted, this is what others will read."""

    def rebase(self, base: Vector, applied: int) -> None:
        """Replies were missed for good: `base` is what all up to `applied` led to."""

    def skip_to(self, round: int) -> None:
        """The next contribution is to `round`: the fleet has gone on without this member."""

    def due(self) -> int | None:
        """The round whose reply has to be applied now, or None."""

    def apply(self, reply: Iterable[Vector]) -> None:
        """Apply the reply of round `applied`, given in consecutive pieces."""

    def follow_up(self) -> Vector | None:
        """A contribution that could not be made before the reply that was just applied, or None."""

    @property
    def local_steps(self) -> int:
        """Steps that are in no contribution yet. Between two rounds there are none: the moment for
        a checkpoint."""

    def rest(self) -> Vector | None:
        """What of the parameters has been sent to nobody, for a checkpoint."""

    def take_up(self, rest: Vector, local_steps: int = 0) -> None:
        """After `start`: the parameters are further than the base by this, unsent. So many of the
        next round's steps are in it."""


@dataclass(frozen=True)
class Strategy:
    """A row of the table."""

    name: str
    contributes: Contributes
    delays: bool
    """Whether `delay` means anything; otherwise it is 0."""
    every: int
    """Default number of local steps in a round."""
    weighted: bool
    """Whether members count by their samples; otherwise all count the same."""
    summary: str
    source: str

    def merge_rule(self, spelled: str = "mean") -> SliceRule | RoundRule:
        """A fresh merge rule for the hub, as `merging` spells them; ConfigError."""
        from edgetrain.strategies import merging

        return merging.parse(spelled, keeps_late=self.contributes == "displacement")

    def member_half(
        self,
        params: Vector,
        gradient: Vector,
        every: int,
        delay: int,
        memory: Vectors | None = None,
        factors: Factors | None = None,
    ) -> MemberHalf:
        """A fresh member's half over a model's flat parameters and gradient (both shared).

        Contributions are made in vectors of `memory`, or of its own. With `factors` gradients are
        averaged in two trips.
        """
        if self.contributes == "gradient" and factors is not None:
            from edgetrain.strategies.factored import Factored

            return Factored(params, gradient, factors, memory)
        if self.contributes == "gradient":
            from edgetrain.strategies.gradient import Gradient

            return Gradient(params, gradient, memory)
        from edgetrain.strategies.displacement import Displacement
        from edgetrain.strategies.uncorrected import Uncorrected

        half = Uncorrected if self.name == UNCORRECTED else Displacement
        return half(params, every, delay, memory)


UNCORRECTED = "dga-uncorrected"

_ROWS = (
    Strategy(
        "sync-sgd", "gradient", False, 1, False,
        "average gradients every step and wait for the mean: what DDP does",
        "Li et al., PyTorch Distributed, VLDB 2020",
    ),
    Strategy(
        "local-sgd", "displacement", False, 5, False,
        "K local steps, then wait for the mean of all members",
        "Stich, Local SGD Converges Fast, ICLR 2019",
    ),
    Strategy(
        "fedavg", "displacement", False, 5, True,
        "local-sgd with members weighted by the samples they hold",
        "McMahan et al., AISTATS 2017",
    ),
    Strategy(
        "dga", "displacement", True, 5, False,
        "K local steps, go on for D more while the mean travels, then correct",
        "Zhu et al., Delayed Gradient Averaging, NeurIPS 2021",
    ),
    Strategy(
        UNCORRECTED, "displacement", True, 5, False,
        "an ablation, not for training: dga without its correction term, so a stale mean is all",
        "Zhu et al., Delayed Gradient Averaging, NeurIPS 2021, what the correction is measured by",
    ),
)  # fmt: skip

TABLE: dict[str, Strategy] = {row.name: row for row in _ROWS}


def find(name: str) -> Strategy:
    """A row by its name; ConfigError with the near miss."""
    try:
        return TABLE[name]
    except KeyError:
        raise ConfigError(f"no strategy '{name}'", did_you_mean(name, TABLE)) from None
