"""Strategies: a member's half and a merge rule make a name in the table.

The table is data; the halves are pure (no socket, no clock, no thread, no codec). This module
imports neither torch nor numpy until a half is built, so that the command line can list the table
at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError, did_you_mean
from edgetrain.strategies.half import Contributes, MemberHalf

if TYPE_CHECKING:
    from edgetrain.strategies.factored import Factors
    from edgetrain.strategies.merging.rule import RoundRule, SliceRule
    from edgetrain.vectors.pool import Vectors
    from edgetrain.vectors.vector import Vector


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
