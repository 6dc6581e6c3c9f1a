"""A group that is one member of a fleet, beside its devices: what it trains, as a job of its own.

A group trains what a fleet of as many members as it has data ranks would train under `sync-sgd`.
Here that fleet is made of one member's share. What runs it is in `training/servers/leading.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.devices import SERVERS
from edgetrain.jobs.job import Fleet, HubTable, Job, Privacy, StrategyTable
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.words import Placement, parse
from edgetrain.jobs.rules import resolve


def has_group(job: Job) -> bool:
    """Whether a member of the job is a group."""
    return SERVERS in devices_of(job.fleet.device)


def parts_of(job: Job) -> int:
    """Parts that data ranks cut each batch of their member into."""
    return parse(job.servers.placement).data


def group_job(job: Job) -> Job:
    """The job whose members are the parts of one member's batches."""
    parts = parts_of(job)
    return replace(
        job,
        data={**job.data, **job.servers.data},
        fleet=Fleet(members=parts),
        train=replace(job.train, batch=job.train.batch // parts),
        strategy=StrategyTable("sync-sgd"),
        hub=HubTable(),
        privacy=Privacy(),
        faults=[],
        absences=[],
    )


def placed(job: Job, beside: Path | None) -> Placement:
    """How the group holds the model, looked at by the planner. Loads the task. ConfigError for what
    does not fit this machine, or what the model, its loss or the batch cannot have."""
    decision = decide(question_of(resolve(group_job(job)), beside))
    if decision.placement is None:
        raise ConfigError(f"the group of 'servers' fits nowhere: {decision.why}", "edgetrain plan")
    return decision.placement
