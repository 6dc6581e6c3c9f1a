"""The leader of a group that is one member of a fleet: attempts, until one comes to its end.

The leader runs what every member runs (`training/member/train.py`) on what `joined` makes of a
group, in its own process, and starts the other ranks through an agent on the same machine.

    state      event                                  next state
    running    the job is over                        finished
    running    a rank is killed, or hangs             again: it joins from the hub's base
    running    a rank reports an error                failed
    again      the hub still has the last process     again, until it has given that one up
    again      MOST attempts without a step           failed
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edgetrain.errors import EdgetrainError, Refused
from edgetrain.fleet.cluster import ServerEntry
from edgetrain.jobs.lookup import samples_of, task_on_servers
from edgetrain.jobs.on_member import settle
from edgetrain.jobs.placement.beside import placed, standing_in
from edgetrain.jobs.placement.words import Placement, check_group_beside
from edgetrain.jobs.resolved import Resolved
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.tasks.protocol import Task
from edgetrain.training.member.train import Made, Place, train
from edgetrain.training.servers.attempt import Attempt
from edgetrain.training.servers.far import There
from edgetrain.training.servers.joined import (
    HERE,
    JoinedRanks,
    Op,
    made_by,
    prepare_together,
)
from edgetrain.training.servers.mesh import open_group, open_store
from edgetrain.training.servers.snapshots import latest

MOST = 3
"""Attempts in a row that may end without a step."""
AGAIN_S = 10.0
"""Besides twice hub.lost_after_s: for how long a group that comes back asks for its own name."""
_CONNECTION = re.compile(r"[Cc]onnection|[Bb]roken pipe|[Ss]ocket|[Tt]imed? ?out|gloo")
_SAID_S, _LOST_S = 5.0, 60.0
"""Seconds within which the agent says that a rank has ended; _LOST_S where the leader's connection
to a rank broke, so that one must have."""
log = logging.getLogger("edgetrain")


def train_joined(
    found: Resolved,
    place: Place,
    hub: str | Sequence[str],
    open_log: Callable[[str, float], MetricsLog],
    folder: Path | None = None,
    **more: Any,
) -> None:
    """Train as the member that is a group, to the end of the job: this process leads, and starts
    the other ranks. `more`: see train. In `folder` snapshots are kept; None: nowhere. Raises what
    `train` raises, and the error of a rank."""
    check_group_beside(found.job)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # It imports torch while the planner looks for a placement.
    others, stuck, number = There(ServerEntry("this machine", "local")), 0, 0
    until: float | None = None  # counted from the first time that the hub knows the name still
    try:
        placement = placed(standing_in(found.job, place.missing), place.beside).placement
        while True:
            number += 1
            attempt = _Attempt(found, place, placement, folder, others)
            try:
                attempt.run(number, partial(train, found, place, hub, open_log, **more))
                return
            except Refused as refused:
                # The hub has not noticed yet that this member's last process is gone.
                is_back = number > 1 or (folder is not None and latest(folder) is not None)
                until = until or time.monotonic() + AGAIN_S + 2 * found.job.hub.lost_after_s
                if refused.code != "name" or not is_back or time.monotonic() > until:
                    raise
                time.sleep(found.job.hub.heartbeat_s)
            except _RankDied as died:
                stuck = 0 if attempt.taken else stuck + 1
                if stuck >= MOST:
                    raise EdgetrainError(
                        f"{died.message} in {stuck} attempts that took no step",
                        "out of memory? see the kernel's log, and what `edgetrain plan` says",
                    ) from None
                log.warning("%s: %s; again, from the hub's base", place.name, died.message)
                until = None
    finally:
        others.close()


class _RankDied(EdgetrainError):
    """A rank was killed, or hangs: the attempt is over."""


class _Attempt:
    """One set of processes, from their start to their end."""

    def __init__(
        self,
        found: Resolved,
        place: Place,
        placement: Placement,
        folder: Path | None,
        others: There,
    ) -> None:
        self._found, self._place, self._placement = found, place, placement
        self._folder, self._others = folder, others
        self._together: JoinedRanks | None = None

    @property
    def taken(self) -> int:
        return 0 if self._together is None else self._together.taken

    def run(self, number: int, train: Callable[..., None]) -> None:
        """Train to the end. _RankDied; what `train` raises; the error of a rank."""
        store, count = open_store(), self._placement.ranks
        beside, folder = self._place.beside, self._folder
        told = Attempt(
            number, self._found.job, beside.resolve() if beside else None,
            (folder or Path()).resolve(), str(self._placement), count, store.host, store.port,
            None, False, self._place.index, folder is not None, self._place.missing,
        )  # fmt: skip
        self._others.start(told, range(1, count))
        try:
            self._wait_for_others(store)
            train(make=partial(self._make, store))
            self._end()
        except EdgetrainError:
            raise
        except Exception as error:
            # Why a rank has ended; None: none has, the error is the leader's own. Others of the
            # ranks may have ended because that one did.
            wait_s = _LOST_S if _CONNECTION.search(str(error)) else _SAID_S
            until = time.monotonic() + wait_s
            while (why := self._told()) is None and time.monotonic() < until:
                time.sleep(0.05)
            if why is None:
                raise
            raise why from error
        finally:
            with contextlib.suppress(RuntimeError):  # to ranks that still listen
                self._end()
            if dist.is_initialized():
                dist.destroy_process_group()
            self._others.stop()

    def _wait_for_others(self, store: TCPStore) -> None:
        while store.add(HERE, 0) < self._placement.ranks - 1:
            if self._others.gone:
                raise EdgetrainError(self._others.problem)
            if why := self._told():
                raise why
            time.sleep(0.01)

    def _make(
        self, store: TCPStore, found: Resolved, place: Place, on_task: Callable[[Task], None]
    ) -> Made:
        job, count = found.job, self._placement.ranks
        device = open_group(
            0, count, store.port, store.host, job.train.accelerator, 0, job.servers.hang_s
        )
        task = task_on_servers(job, place.beside, place.keys)
        on_task(task)
        words = str(self._placement)
        self._together = prepare_together(found, place, task, words, device, self._folder)
        return made_by(self._together, settle(found, samples_of(job, task)), task)

    def _end(self) -> None:
        if self._together is not None and not self._together.is_over:
            self._together.lead(Op.END)

    def _told(self) -> EdgetrainError | None:
        ended = {rank: end for rank, end in self._others.ended().items() if end.code}
        killed = [rank for rank, end in ended.items() if end.code < 0]
        if killed:
            return _RankDied(f"{', '.join(f'rank {rank}' for rank in killed)} was killed")
        own = [(r, e) for r, e in ended.items() if not _CONNECTION.search(e.first)]
        if own:
            return own[0][1].told(f"rank {own[0][0]} of {self._placement}", self._folder)
        return _RankDied(f"rank {next(iter(ended))} lost the others") if ended else None
