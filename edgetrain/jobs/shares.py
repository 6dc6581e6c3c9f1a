"""Whose data each member has: one share of it each, and a group beside devices several. No torch.

The data of a job are divided into as many shares as all members have together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.errors import TaskError
from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.devices import SERVERS
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Task


@dataclass(frozen=True)
class DataShares:
    """The shares of one member, by number, of all `of`."""

    held: tuple[int, ...]
    of: int

    @property
    def count(self) -> int:
        return len(self.held)

    def samples(self, task: Task) -> int:
        """Samples of all shares. Raises TaskError for an empty one."""
        counts = [task.samples(share, self.of) for share in self.held]
        for share, count in zip(self.held, counts, strict=True):
            if not count >= 1:
                raise TaskError(
                    f"samples({share}, {self.of}) of task '{task.name}' returns {count!r}",
                    "each member holds 1 or more: take fewer members, or another partition",
                )
        return sum(counts)


def groups_of(job: Job) -> list[int]:
    named = devices_of(job.fleet.device)
    if len(named) == 1:
        return list(range(job.fleet.members)) if named == [SERVERS] else []
    return [index for index, name in enumerate(named) if name == SERVERS]


def has_group(job: Job) -> bool:
    return SERVERS in devices_of(job.fleet.device)


def shares_of(job: Job, index: int, missing: tuple[int, ...] = ()) -> DataShares:
    """The shares of the member `index`, or of the group that stands in for these `missing`."""
    if missing:
        return DataShares(missing, job.fleet.members)
    if not (more := job.servers.shares - 1):
        return DataShares((index,), job.fleet.members)
    groups = groups_of(job)
    before = sum(group < index for group in groups)
    count = 1 + more * (index in groups)
    first = index + more * before
    return DataShares(tuple(range(first, first + count)), job.fleet.members + more * len(groups))


def weight_of(job: Job, task: Task, own: DataShares) -> float:
    """Weight of a member in a weighted mean."""
    return float(own.count if job.strategy.weighting == "shares" else own.samples(task))
