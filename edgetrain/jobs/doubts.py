"""What goes together in a job, and was measured to be worse than something else."""

from __future__ import annotations

import re
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
    adaptive = [name for name in others if name in _ADAPTIVE]
    is_apart = partition.startswith("dirichlet") and not strategy.has_variates
    if strategy.has_local_steps and adaptive and is_apart:
        found.append(
            f"{adaptive[0]} in each member's own steps, on data that are unequal ({partition}): on "
            "digits, dirichlet(0.3), with adamw, dga ended at 85 % and sync-sgd at 98 in the same "
            "time; scaffold and dga(variates) correct the gradients (docs/how-to/choosing.md)"
        )
    return found


def doubts_of(found: Resolved) -> list[str]:
    job = found.job
    name, partition = job.train.optimizer.get("name", "sgd"), job.data.get("partition", "")
    listed = doubts(found.strategy, [str(name)], str(partition))
    if re.match(r"(topk|dgc|randk)\(1(\.0*)?[,)]", codec := job.strategy.codec):
        listed.append(f"codec {codec} keeps every element: 0.01 is 1 % of them, 1 is all")
    return listed
