"""What runs in the process of a rank: its group joined, its part trained to the end of the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from edgetrain.errors import ConfigError
from edgetrain.fleet import devices
from edgetrain.fleet.devices.energy import Energy
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_on_servers
from edgetrain.jobs.placement.words import parse
from edgetrain.runs.environment import Meter
from edgetrain.runs.folder import (
    metrics_path,
    read_job,
    write_environment,
    write_job,
    write_summary,
)
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.summary import summarise
from edgetrain.tasks import weights
from edgetrain.training.member.loop import Loop, Steps
from edgetrain.training.member.pacing import Pace
from edgetrain.training.servers import beats
from edgetrain.training.servers.attempt import Attempt
from edgetrain.training.servers.checking import check_group
from edgetrain.training.servers.joined import follow
from edgetrain.training.servers.member import RankMember, RankProgress, RankWork, diverged
from edgetrain.training.servers.mesh import join_torchrun, open_group
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.snapshots import Snapshots, leaders_step
from edgetrain.vectors.allocator import map_large
from edgetrain.vectors.vector import all_finite


def name_of(rank: int) -> str:
    return f"r{rank}"


def rank_process(attempt: Attempt, rank: int, local: int, began: Synchronized[float]) -> None:
    """One rank of an attempt, the `local`-th of its machine."""
    if attempt.member >= 0:
        follow(attempt, rank, local)
        return
    job = attempt.job
    end = beats.begin(attempt.host, attempt.port, rank, job.servers.hang_s)
    place = (rank, attempt.count, attempt.port, attempt.host)
    device = open_group(*place, accelerator=job.train.accelerator, local=local)

    def start() -> float:
        dist.barrier()
        if rank == 0 and not began.value:
            began.value = time.monotonic()
        # Machines have different clocks: the leader says how long ago it was.
        elapsed = torch.tensor([time.monotonic() - began.value if rank == 0 else 0.0]).double()
        dist.broadcast(elapsed, 0)
        return time.monotonic() - float(elapsed)

    attempt.folder.mkdir(parents=True, exist_ok=True)
    if attempt.is_trial:
        task = task_on_servers(job, attempt.beside)
        check_group(job, task, prepare_rank(job, task, parse(attempt.words), device))
    else:
        train(job, attempt.beside, attempt.folder, attempt.words, device, start)
    dist.barrier()
    dist.destroy_process_group()
    end()


def train_as_rank(job: Job, beside: Path | None, folder: Path, words: str) -> None:
    """One rank, started by torchrun: its number and its leader are in the environment."""
    device = join_torchrun(job.train.accelerator)

    def start() -> float:
        dist.barrier()
        if dist.get_rank() == 0:
            write_job(folder, job.to_dict())
            write_environment(folder)
        return time.monotonic()

    train(job, beside, folder, words, device, start)
    dist.barrier()
    if dist.get_rank() == 0:
        write_summary(folder, summarise(folder, {"placement": words, "strategy": "sync-sgd"}))
    dist.destroy_process_group()


def train(
    job: Job,
    beside: Path | None,
    folder: Path,
    words: str,
    device: torch.device,
    start: Callable[[], float],
) -> None:
    """Train one rank, in a process group that is there, to the end of the job.

    `start` is called when all ranks are ready; it gives the time that the metrics count from. The
    leader writes the trained model.
    """
    map_large()
    torch.set_num_threads(job.train.threads)
    task = task_on_servers(job, beside)
    step = leaders_step(folder)
    if step and dist.get_rank() == 0:
        _check_optimizer(job, read_job(folder))
    rank = prepare_rank(job, task, parse(words), device, step)
    left_out = check_group(job, task, rank) if job.servers.check != "off" else ""
    snapshots = Snapshots.of(job, rank, folder)
    if step:
        snapshots.load(step)
    progress = RankProgress(step)
    work, member = RankWork(task, rank, progress), RankMember(rank, progress, snapshots)
    name = name_of(rank.ranks.rank)
    with MetricsLog(metrics_path(folder), name, time.monotonic, start()) as log:
        said = f"; {left_out}" if left_out else ""
        log.event("started", f"{words}, step {step}{said}")
        if rank.ranks.rank == 0:
            snapshots.report_to(partial(log.event, "error"))
        steps = Steps.of(job, 0)  # all ranks evaluate together
        energy = Energy(devices.load(devices.HOST), time.monotonic)
        Loop(
            steps, work, member, log, Pace(lambda step: 0.0), Meter(), energy, time.monotonic
        ).run()
    model = rank.held.gather()
    if rank.held.whole is not None and not all_finite(rank.held.whole.params):
        raise diverged("the trained model", job.train.steps)
    if model is not None:
        weights.save(model, folder / weights.FILE)


def _check_optimizer(job: Job, before: Mapping[str, Any]) -> None:
    """ConfigError for another optimizer than that of the run which wrote the snapshots."""
    theirs = before.get("train", {}).get("optimizer", {}).get("name")
    ours = job.train.optimizer.get("name")
    if theirs is not None and str(theirs).lower() != str(ours).lower():
        raise ConfigError(
            f"optimizer '{ours}' goes on from snapshots of '{theirs}', whose values it cannot use",
            f"optimizer={theirs}, or a new run with start=runs/…/{weights.FILE}",
        )
