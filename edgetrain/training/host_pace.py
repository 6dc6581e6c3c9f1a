"""How long a step takes on this machine, for simulated fleets of machines like it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgetrain.fleet import devices
from edgetrain.fleet.assignment import devices_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.resolved import Resolved

_WARM_UP, _STEPS = 3, 15


def measured(
    job: Job,
    beside: Path | None,
    tell: Callable[[float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Job:
    """The job with `fleet.pace_s` as measured here, if its devices are this machine and it has no
    pace; else the job itself. Jobs that step alike are measured once in a process;
    `tell` is called with the seconds when they are.

    Loads torch and the task if there is something to measure. ConfigError, TaskError.
    """
    here = {devices.HOST, devices.here()}
    if job.fleet.pace_s or not set(devices_of(job.fleet.device)) <= here:
        return job
    alike = Job(task=job.task, data=job.data, seed=job.seed, train=job.train)
    key = repr((alike, beside))
    if key not in MEASURED:
        MEASURED[key] = float(f"{_measure(alike, beside, clock):.3g}")
        tell(MEASURED[key])
    return replace(job, fleet=replace(job.fleet, pace_s=MEASURED[key]))


def paced(
    found: Resolved, beside: Path | None, tell: Callable[[float], None] = lambda seconds: None
) -> Resolved:
    """The same of a job whose names are looked up."""
    return replace(found, job=measured(found.job, beside, tell))


MEASURED: dict[str, float] = {}
"""Seconds of a step by what they depend on."""


def _measure(job: Job, beside: Path | None, clock: Callable[[], float]) -> float:
    """The median of a few steps, after a few that warm up: the gradient and the optimizer's step,
    with the threads that the job gives a member."""
    import torch

    from edgetrain.jobs.lookup import task_of
    from edgetrain.tasks import batches_from
    from edgetrain.tasks.work import optimizer_for

    task = task_of(job, beside)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(job.train.threads)
        model = task.model()
        optimizer = optimizer_for(model, job.train.optimizer, task)
        batches = batches_from(task, 0, 1, job.train.batch, job.seed)
        seconds = []
        for _ in range(_WARM_UP + _STEPS):
            began = clock()
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(clock() - began)
    torch.set_num_threads(threads)
    return statistics.median(seconds[_WARM_UP:])
