"""A job on a group of processes of this machine: attempts, until one comes to its end.

One attempt is one placement on fresh processes with a store of its own. When a rank dies all of the
attempt is ended, and the next one goes on from the last snapshot; torchrun's restarts are not used.

    state      event                          next state
    running    all ranks end well             finished
    running    a rank reports an error        failed
    running    a rank is killed               again, from the last snapshot
    again      MOST attempts, no progress     failed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from edgetrain.errors import EdgetrainError
from edgetrain.fleet import devices
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import task_of
from edgetrain.jobs.placement.search import Found
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.plan import Plan
from edgetrain.runs.environment import Meter
from edgetrain.runs.folder import (
    metrics_path,
    read_metrics,
    write_environment,
    write_job,
    write_summary,
)
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.summary import summarise
from edgetrain.tasks import weights
from edgetrain.training import processes
from edgetrain.training.loop import EVALUATIONS, Loop, Steps
from edgetrain.training.outcome import recorded, write_errors
from edgetrain.training.pacing import Pace
from edgetrain.training.processes import Child
from edgetrain.training.servers.member import RankMember, RankProgress, RankWork
from edgetrain.training.servers.mesh import join_torchrun, open_group, open_store
from edgetrain.training.servers.rank import prepare_rank
from edgetrain.training.servers.snapshots import Snapshots, latest
from edgetrain.training.trained import write_model
from edgetrain.vectors.allocator import map_large

PRELOAD = ("edgetrain.training.servers.group",)
MOST = 3
"""Attempts in a row that may end at the same snapshot."""
SNAPSHOTS = 10
"""Snapshots in a run unless the job says how often."""


def warm_up() -> None:
    """Start the fork server, which imports torch in the background while this process plans."""
    processes.fork_server(PRELOAD)
    forkserver.ensure_running()


def run(
    planned: Plan,
    chosen: Found,
    folder: Path,
    watch: Callable[[], None] = lambda: None,
    poll_s: float = 0.1,
) -> dict[str, Any]:
    """Run a planned job on a group of ranks of this machine, in `folder`; returns its summary.

    Goes on from the folder's last snapshot, if there is one. Raises the error of a rank. No process
    is left behind in any case.
    """
    with recorded(planned, folder) as outcome:
        outcome.network = {"backend": "none", "reason": "a group of processes of this machine"}
        outcome.extra = {
            "strategy": "sync-sgd",
            "every": 1,
            "placement": str(chosen.placement),
            "predicted_step_s": chosen.seconds,
            "predicted_bytes": max(chosen.bytes),
        }
        group = _Group(planned, chosen, folder, watch, poll_s)
        try:
            outcome.status = group.run()
        finally:
            outcome.extra["attempts"] = group.attempts
            outcome.extra["measured_step_s"] = _step_seconds(folder)
    return outcome.summary


def _step_seconds(folder: Path) -> float | None:
    """The median of a step's seconds on the leader."""
    found = sorted(
        record["compute_s"]
        for record in read_metrics(folder, "step")
        if record["member"] == name_of(0)
    )
    return found[len(found) // 2] if found else None


def name_of(rank: int) -> str:
    """As the metrics call a rank."""
    return f"r{rank}"


class _Group:
    """The attempts of one run."""

    def __init__(
        self, planned: Plan, chosen: Found, folder: Path, watch: Callable[[], None], poll_s: float
    ) -> None:
        self._planned, self._chosen, self._folder = planned, chosen, folder
        self._watch, self._poll_s = watch, poll_s
        self._context = processes.fork_server(PRELOAD)
        self._began: Synchronized[float] = self._context.Value("d", 0.0)
        self.attempts = 0

    def run(self) -> str:
        """Attempts, to the end of one; the status. Raises the error of a rank."""
        stuck = 0
        while True:
            before = latest(self._folder)
            self.attempts += 1
            killed = self._attempt()
            if not killed:
                return "finished"
            stuck = stuck + 1 if latest(self._folder) == before else 0
            went_on = latest(self._folder)
            since = f"from step {went_on[0]}" if went_on else "from the beginning"
            began = self._began.value or time.monotonic()
            reason = f"{', '.join(killed)} was killed; again, {since}"
            write_errors(self._folder, time.monotonic, began, [(killed[0], reason)])
            if stuck >= MOST:
                raise EdgetrainError(
                    f"{killed[0]} was killed in {stuck} attempts that came no further than "
                    f"{since.removeprefix('from ')}",
                    "out of memory? see the kernel's log; `edgetrain plan` says what a rank needs",
                )

    def _attempt(self) -> list[str]:
        """Run all ranks to their end. The names of those that were killed; [] if all went well."""
        store = open_store()
        words, count = str(self._chosen.placement), self._chosen.placement.ranks
        job, beside = self._planned.job, self._planned.beside
        children: list[Child] = []
        try:
            for rank in range(count):
                place = (rank, count, store.port)
                given = (job, beside, self._folder, words, place, self._began)
                name = name_of(rank)
                children.append(processes.start(self._context, name, rank_process, *given))
            self._follow(children)
        finally:
            processes.stop_all(children, 0.5)
        del store
        return self._verdict(children)

    def _follow(self, children: list[Child]) -> None:
        """Until all ranks have ended, or one has ended badly: the others would wait for it."""
        while running := [child for child in children if child.running]:
            self._watch()
            if any(child.exit_code for child in children if not child.running):
                time.sleep(self._poll_s)  # a rank that lost its peer may be about to say so
                break
            running[0].process.join(self._poll_s)
        self._ended = {child.name: child.exit_code for child in children}
        self._watch()

    def _verdict(self, children: list[Child]) -> list[str]:
        killed = [name for name, code in self._ended.items() if code is not None and code < 0]
        if killed:
            return killed
        refused = [c for c in children if self._ended[c.name] == 2 and c.error]
        failed = refused or [c for c in children if self._ended[c.name] and c.error]
        if failed:
            began = self._began.value or time.monotonic()
            last = failed[0].error.strip().splitlines()[-1]
            write_errors(self._folder, time.monotonic, began, [(failed[0].name, last)])
            raise EdgetrainError(f"rank {failed[0].name}: {failed[0].error}")
        return []


# -- what runs in the processes -------------------------------------------------------------------


def rank_process(
    job: Job,
    beside: Path | None,
    folder: Path,
    words: str,
    place: tuple[int, int, int],
    began: Synchronized[float],
) -> None:
    """One rank of an attempt; `place` is its number, how many there are, and the store's port."""
    rank, count, port = place
    device = open_group(rank, count, port, accelerator=job.train.accelerator)

    def start() -> float:
        if rank == 0 and not began.value:
            began.value = time.monotonic()
        dist.barrier()
        return began.value

    train(job, beside, folder, words, device, start)
    dist.barrier()
    dist.destroy_process_group()


def train_as_rank(job: Job, beside: Path | None, folder: Path, words: str) -> None:
    """One rank, started by torchrun: its number and its leader are in the environment."""
    device = join_torchrun(job.train.accelerator)

    def start() -> float:
        dist.barrier()
        return time.monotonic()

    if dist.get_rank() == 0:
        write_job(folder, job.to_dict())
        write_environment(folder)
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
    task = task_of(replace(job, data={**job.data, **job.servers.data}), beside)
    found = latest(folder)
    step = found[0] if found else 0
    rank = prepare_rank(job, task, parse(words), device, step)
    every = job.servers.snapshot_every or max(1, job.train.steps // SNAPSHOTS)
    snapshots = Snapshots(rank, folder, every)
    if found:
        snapshots.load(found[1])
    progress = RankProgress(step)
    work, member = RankWork(task, rank, progress), RankMember(rank, progress, snapshots)
    name = name_of(rank.ranks.rank)
    with MetricsLog(metrics_path(folder), name, time.monotonic, start()) as log:
        log.event("started", f"{words}, step {step}")
        steps = Steps(
            job.train.steps, job.train.evaluate_every or max(1, job.train.steps // EVALUATIONS)
        )
        energy = devices.Energy(devices.load(devices.HOST), time.monotonic)
        Loop(
            steps, work, member, log, Pace(lambda step: 0.0), Meter(), energy, time.monotonic
        ).run()
    model = rank.held.gather()
    if model is not None:
        write_model(model, folder / weights.FILE)
