"""Whose data each member has: one share of it each, and a group beside devices several. No torch.

The data of a job are divided into as many shares as all members have together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.devices import SERVERS
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Task


@dataclass(frozen=True)
class DataShares:
    """The shares of one member: `count` of all `of`, from `first` on."""

    first: int
    count: int
    of: int


def groups_of(job: Job) -> list[int]:
    """The members that are groups."""
    named = devices_of(job.fleet.device)
    if len(named) == 1:
        return list(range(job.fleet.members)) if named == [SERVERS] else []
    return [index for index, name in enumerate(named) if name == SERVERS]


def has_group(job: Job) -> bool:
    """Whether a member of the job is a group."""
    return SERVERS in devices_of(job.fleet.device)


def shares_of(job: Job, index: int) -> DataShares:
    """The shares of the member `index`."""
    more = job.servers.shares - 1
    groups = groups_of(job) if more else []
    before = sum(group < index for group in groups)
    count = 1 + more * (index in groups)
    return DataShares(index + more * before, count, job.fleet.members + more * len(groups))


def samples_of_member(job: Job, task: Task, index: int) -> int:
    """How many samples a member holds."""
    own = shares_of(job, index)
    return sum(task.samples(share, own.of) for share in range(own.first, own.first + own.count))


def weight_of(job: Job, task: Task, index: int) -> float:
    """What a member counts for, where members are weighed."""
    if job.strategy.weigh == "shares":
        return float(shares_of(job, index).count)
    return float(samples_of_member(job, task, index))
