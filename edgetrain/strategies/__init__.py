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
    from edgetrain.vectors.pool import VectorPool
    from edgetrain.vectors.vector import Vector


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A row of the table: all that other rooms need to know of a strategy, as properties.

    No module outside `edgetrain.strategies` compares a strategy's name, or `contributes`; it asks
    for the property that it depends on. The defaults are those of strategies that exchange
    displacements.
    """

    name: str
    summary: str
    source: str
    every: int = 5
    """Default number of local steps in a round. `jobs` asks."""
    delays: bool = False
    """Whether `delay` means anything; otherwise it is 0. `jobs`, and `cli` for variants, ask."""
    weighted: bool = False
    """Whether members count by their samples; otherwise all count the same. The hub and the member
    (`exchange`, `training`) ask, and `jobs`: a merge rule, or privacy, may not allow weights."""
    contributes: Contributes = "displacement"
    """A word for people (`edgetrain strategies`). Ask for one of the properties below instead."""
    moves_params: bool = True
    """Whether a reply moves the parameters. Otherwise contributions are gradients, and the reply
    takes the gradient's place before the optimizer's step. `jobs` asks, for codecs that are made
    for gradients; the half says it, too, for whatever drives it."""
    hub_keeps_base: bool = True
    """Whether the hub keeps the parameters that all replies lead to, and can send them to a member.
    The hub asks (`exchange`), and the member (`training`): otherwise its checkpoint has them."""
    allows_late_join: bool = True
    """Whether a member may join after the start, or come back without its state. The hub's
    admission asks, `jobs` for absences, chaos tests for devices that lose power."""
    has_local_steps: bool = True
    """Whether members step between two exchanges, so that `every` means something. `jobs` and `cli`
    ask, for variants of a job."""
    keeps_late: bool = True
    """Whether a contribution to a round that has closed goes into the next open one; otherwise it
    is worth nothing any more. The merge rule says it to the hub."""
    adjusts_gradient: bool = False
    """Whether `before_step` reads or changes the gradient. The batched simulator asks, before there
    is a half: it must not step rows before their gradients have been adjusted."""

    def merge_rule(self, spelled: str = "mean") -> SliceRule | RoundRule:
        """A fresh merge rule for the hub, as `merging` spells them; ConfigError."""
        from edgetrain.strategies import merging

        return merging.parse(spelled, keeps_late=self.keeps_late)

    def member_half(
        self,
        params: Vector,
        gradient: Vector,
        every: int,
        delay: int,
        memory: VectorPool | None = None,
        factors: Factors | None = None,
    ) -> MemberHalf:
        """A fresh member's half over a model's flat parameters and gradient (both shared).

        Contributions are made in vectors of `memory`, or of its own. With `factors` gradients are
        averaged in two trips.
        """
        if not self.moves_params and factors is not None:
            from edgetrain.strategies.factored import Factored

            return Factored(params, gradient, factors, memory)
        if not self.moves_params:
            from edgetrain.strategies.gradient import Gradient

            return Gradient(params, gradient, memory)
        from edgetrain.strategies.displacement import Displacement
        from edgetrain.strategies.uncorrected import Uncorrected

        half = Uncorrected if self.name == UNCORRECTED else Displacement
        return half(params, every, delay, memory)


UNCORRECTED = "dga-uncorrected"

_ROWS = (
    Strategy(
        name="sync-sgd",
        summary="average gradients every step and wait for the mean: what DDP does",
        source="Li et al., PyTorch Distributed, VLDB 2020",
        every=1,
        contributes="gradient",
        moves_params=False,
        hub_keeps_base=False,
        allows_late_join=False,
        has_local_steps=False,
        keeps_late=False,
        adjusts_gradient=True,
    ),
    Strategy(
        name="local-sgd",
        summary="K local steps, then wait for the mean of all members",
        source="Stich, Local SGD Converges Fast, ICLR 2019",
    ),
    Strategy(
        name="fedavg",
        summary="local-sgd with members weighted by the samples they hold",
        source="McMahan et al., AISTATS 2017",
        weighted=True,
    ),
    Strategy(
        name="dga",
        summary="K local steps, go on for D more while the mean travels, then correct",
        source="Zhu et al., Delayed Gradient Averaging, NeurIPS 2021",
        delays=True,
    ),
    Strategy(
        name=UNCORRECTED,
        summary="an ablation, not for training: dga without its correction term, so a stale mean "
        "is all",
        source="Zhu et al., Delayed Gradient Averaging, NeurIPS 2021, what the correction is "
        "measured by",
        delays=True,
    ),
)

TABLE: dict[str, Strategy] = {row.name: row for row in _ROWS}


def find(name: str) -> Strategy:
    """A row by its name; ConfigError with the near miss."""
    try:
        return TABLE[name]
    except KeyError:
        raise ConfigError(f"no strategy '{name}'", did_you_mean(name, TABLE)) from None
