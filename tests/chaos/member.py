"""What runs in a member's process: a stand-in, or the job's own task; with a ledger of its sending.

`training.processes` starts it. Torch is imported only if a task is trained.

    outcome of a life                                       what the process leaves
    it trained to the end                                   an `End` with its base
    its name was still taken, or it never reached the hub   exit status START_AGAIN
    it failed otherwise                                     an `End` with the error
    it was killed                                           nothing but its ledger
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.clock import Clock
from chaos.ledger import End, Ledger
from chaos.standin import StandIn
from edgetrain.errors import HubUnreachable, Refused
from edgetrain.exchange.keys.pairs import Credentials
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Submission
from edgetrain.exchange.zeromq.member_socket import MemberSocket
from edgetrain.jobs.job import Job
from edgetrain.vectors.vector import Buffer, Vector

ELEMENTS = 2000
"""Elements of a stand-in's vector."""

START_AGAIN = 75
"""Exit status of a process that could not join yet: it is to be started again."""

_PAUSE_S = 0.2
"""Seconds before it exits so."""


@dataclass(frozen=True)
class Post:
    """Who a member is, and where."""

    job: Job
    task: bool
    """Whether it trains the job's task; otherwise it is a stand-in."""
    beside: Path | None
    """The folder of the job file."""
    device: str
    index: int
    life: int
    """Its number among this member's processes, from 1; 0: none has been started."""
    hub: str
    """The address that it connects to, its forwarder's."""
    credentials: Credentials
    folder: Path
    """The schedule's folder, with ledgers, clocks, logs and ends."""

    @property
    def name(self) -> str:
        """As the hub calls it."""
        return f"m{self.index}"

    def path(self, what: str) -> Path:
        """The file `what` of this member, shared by all its lives."""
        return self.folder / f"{self.name}.{what}"

    def ledger(self, life: int) -> Path:
        """The ledger of one life."""
        return self.folder / f"{self.name}.{life}.gave"


class NotedSocket(MemberSocket):
    """A socket that notes contributions and bases in a ledger before it sends them."""

    def __init__(self, address: str, credentials: Credentials, ledger: Ledger) -> None:
        super().__init__(address, credentials=credentials)
        self._ledger = ledger

    def send(self, frames: Sequence[Buffer]) -> None:
        self._ledger.note(frames)
        super().send(frames)


class PromisingLink(Link):
    """A link that notes in a ledger that a contribution was made, before it is encoded and sent."""

    def __init__(
        self, socket: NotedSocket, clock: Callable[[], float], hub_timeout_s: float, ledger: Ledger
    ) -> None:
        super().__init__(socket, clock, hub_timeout_s=hub_timeout_s)
        self._ledger = ledger

    def submit(self, submission: Submission) -> Vector | None:
        self._ledger.promise(submission.round)
        return super().submit(submission)


class _Entered:
    """Whether training has begun in this process."""

    def __init__(self) -> None:
        self.yet = False


def run(post: Post) -> None:
    """Train to the end and leave an `End`; or exit with START_AGAIN if it could not join yet."""
    logging.basicConfig(
        filename=post.path("log"), level=logging.INFO, format=f"{post.life}: %(message)s"
    )
    logging.info("process %d", os.getpid())
    ledger, clock, entered = Ledger(post.ledger(post.life)), Clock(post.path("clock")), _Entered()
    socket = NotedSocket(post.hub, post.credentials, ledger)
    train = _task if post.task else _stand_in
    try:
        end = train(post, socket, clock, ledger, entered)
    except Exception as error:
        logging.info("%s", traceback.format_exc())
        taken = isinstance(error, Refused) and error.code == "name"
        lost = isinstance(error, HubUnreachable) and not entered.yet
        if taken or lost:
            time.sleep(_PAUSE_S)
            os._exit(START_AGAIN)  # at once: its connection must not join by itself
        end = End(error=f"{type(error).__name__}: {error}")
    finally:
        ledger.close()
    end.write(post.path("end"))


def _stand_in(
    post: Post, socket: NotedSocket, clock: Callable[[], float], ledger: Ledger, entered: _Entered
) -> End:
    link = PromisingLink(socket, clock, post.job.hub.hub_timeout_s, ledger)
    driver = StandIn(post.index, ELEMENTS).join(link, clock)
    entered.yet = True
    half = driver.half
    while driver.progress < post.job.train.steps:
        driver.step()
        time.sleep(post.job.fleet.pace_s)
    driver.drain()
    driver.leave("done")
    return End(half.applied, f"{half.checksum:016x}")


def _task(
    post: Post, socket: NotedSocket, clock: Callable[[], float], ledger: Ledger, entered: _Entered
) -> End:
    """The loop that a user would write around `edgetrain.join`; nothing is measured."""
    import torch

    from edgetrain.jobs.lookup import task_of, work_of
    from edgetrain.jobs.resolved import look_up
    from edgetrain.training.member.member import Member, release_of
    from edgetrain.training.member.train import Place, prepare, request_of
    from edgetrain.vectors.noise import system

    found, job, place = look_up(post.job), post.job, Place(post.index, post.device, post.beside)
    torch.set_num_threads(job.train.threads)
    task = task_of(job, post.beside)
    model, optimizer, flat, pace = prepare(found, place, task)
    request = request_of(found, place, task)
    with Member.join(
        Link(socket, clock, hub_timeout_s=job.hub.hub_timeout_s),
        flat,
        optimizer,
        request,
        clock=clock,
        release=release_of(job.privacy, system),
    ) as member:
        entered.yet = True
        work = work_of(job, task, model, flat, post.index, system, member.steps)
        for _ in range(min(member.begins_at, job.train.steps), job.train.steps):
            began = time.monotonic()
            work.backward()()
            pace.hold(began)
            member.step()
        member.drain()
        return End(member.half.applied, f"{member.half.checksum:016x}")
