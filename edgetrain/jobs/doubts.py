"""What goes together in a job, and was measured to be worse than something else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgetrain.jobs.resolved import Resolved
    from edgetrain.strategies import Strategy

_ADAPTIVE = ("adam", "adamw", "adamax", "nadam", "radam")


def doubts(strategy: Strategy, optimizers: Iterable[str], partition: str = "") -> list[str]:
    """A line for each. `optimizers`: their names; `partition`: the data's, "": it is not known."""
    others = sorted({name.lower() for name in optimizers} - {"sgd"})
    found = []
    if strategy.has_variates and others:
        found.append(
            f"{strategy.name} is made for SGD, and the optimizer is {others[0]}: with adamw it "
            "ended 6 points below fedavg on digits of which members hold unequal shares "
            "(docs/jobs.md)"
        )
    adaptive = [name for name in others if name in _ADAPTIVE]
    if strategy.has_local_steps and adaptive and partition.startswith("dirichlet"):
        found.append(
            f"{adaptive[0]} in each member's own steps, on data that are unequal ({partition}): on "
            "digits, dirichlet(0.3), no strategy with local steps ended above 83 % with adamw, and "
            "sync-sgd ended at 99; dga with SGD and momentum at 98 (docs/choosing.md)"
        )
    return found


def doubts_of(found: Resolved) -> list[str]:
    job = found.job
    name, partition = job.train.optimizer.get("name", "sgd"), job.data.get("partition", "")
    return doubts(found.strategy, [str(name)], str(partition))
