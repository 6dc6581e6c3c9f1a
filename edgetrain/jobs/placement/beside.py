"""A group that is one member of a fleet, beside its devices: what it trains, as a job of its own.

A group trains what a fleet of as many members as it has data ranks would train under `sync-sgd`.
Here that fleet is made of one member's share. What runs it is in `training/servers/leading.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import AUTO, Fleet, HubTable, Job, Privacy, StrategyTable
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.search import Found
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.rules import resolve


def standing_in(job: Job, missing: tuple[int, ...], words: str = AUTO) -> Job:
    """The job with the [servers] table of a group that stands in for these members: it has their
    shares of the data, and holds the model as `words` say. Without any: the job."""
    if not missing:
        return job
    # "when-faster": the planner looks for a placement on this machine.
    servers = replace(job.servers, shares=len(missing), placement=words, fallback="when-faster")
    return replace(job, servers=servers)


def parts_of(job: Job) -> int:
    """Parts that data ranks cut each batch into; 1: they have whole ones, as where the planner
    chooses how many there are."""
    if job.servers.placement == AUTO:
        return 1
    return max(1, parse(job.servers.placement).data // job.servers.shares)


def group_job(job: Job) -> Job:
    """The job whose members are the group's shares of the data, or equal parts of their batches."""
    parts = parts_of(job)
    return replace(
        job,
        data={**job.data, **job.servers.data},
        fleet=Fleet(members=job.servers.shares * parts),
        train=replace(job.train, batch=job.train.batch // parts),
        strategy=StrategyTable("sync-sgd"),
        servers=replace(job.servers, shares=1, data={}),  # they are in `data`
        hub=HubTable(),
        privacy=Privacy(),
        faults=[],
        absences=[],
    )


def placed(job: Job, beside: Path | None) -> Found:
    """How the group holds the model, looked at by the planner. Loads the task. ConfigError for what
    does not fit this machine, or what the model, its loss or the batch cannot have."""
    question = question_of(resolve(group_job(job)), beside)
    if job.servers.placement == AUTO:  # devices are gone: it is no question whether they would do
        question = replace(question, edge_problem="its devices are gone")
    decision = decide(question)
    if decision.placement is None:
        raise ConfigError(f"the group of 'servers' fits nowhere: {decision.why}", "edgetrain plan")
    return decision.found[0]
