"""A job with every name in it looked up: what cannot work fails before anything starts.

Nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job
from edgetrain.jobs.named import Named, name_all
from edgetrain.jobs.privacy.promise import Promise, fix_noise, promise
from edgetrain.jobs.rules import check_on_member

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Task


@dataclass(frozen=True, kw_only=True)
class Plan(Named):
    """A job, and the objects that it names. Its noise is known, and its name is not empty."""

    name: str
    """The task's."""
    metric: str
    better: str
    target: float | None
    beside: Path | None
    """The folder of the job file."""
    promise: Promise | None
    """What the job's privacy is worth, if all goes as planned."""
    samples: tuple[int, ...]
    """How many each member holds, where the job's privacy depends on it; else ()."""
    buffers: str | None
    """What becomes of running statistics, "mean" or "local"; None: the model measures none."""
    parameters: int
    """Of the model, trained ones, tied ones once."""
    notes: tuple[str, ...] = ()
    """What the owner of the job may want to know of the plan itself."""


def target_of(job: Job, task: Task) -> float | None:
    """The figure at which a run counts as trained: the job's, else the task's; None: neither
    says. ConfigError for an accuracy over 1."""
    wanted = job.train.target
    if wanted > 1 and task.metric.endswith("accuracy"):
        raise ConfigError(
            f"train.target = {wanted:g}",
            f"{task.metric} is a share of 1: {wanted / 100:g} is {wanted:g} %",
        )
    return wanted or task.target


def plan(job: Job, beside: Path | None = None) -> Plan:
    """Look up task, devices, network, strategy, codec and optimizer. Loads torch and the data.

    The model is built without memory, where it can be.

    `beside` is the folder of the job file. ConfigError, NetworkError, TaskError.
    """
    from edgetrain.jobs.lookup import buffers_of, rehearse, samples_of, task_of
    from edgetrain.tasks.flat import statistics_of
    from edgetrain.tasks.meta import outline_of
    from edgetrain.tasks.work import optimizer_for

    found = name_all(job)
    job = found.job
    task = task_of(job, beside)
    outline = outline_of(task)
    optimizer_for(outline.model, job.train.optimizer, task)
    samples = samples_of(job, task)
    named = replace(found, job=replace(job, name=job.name or task.name))
    fixed = fix_noise(named, samples)
    check_on_member(fixed)
    rehearse(fixed.job, task)
    return Plan(
        **vars(fixed),
        name=task.name,
        metric=task.metric,
        better=task.better,
        target=target_of(job, task),
        beside=beside,
        promise=promise(fixed, samples),
        samples=samples,
        buffers=buffers_of(fixed.job) if statistics_of(outline.model) else None,
        parameters=outline.parameters,
        notes=tuple(filter(None, [outline.problem])),
    )
