"""Fleets of which one member is a group: what its ranks do, and the same in one process."""

from __future__ import annotations

import time

import children
import numpy as np
import torch
import torch.distributed as dist
from loopback import Loopback

from edgetrain import codecs
from edgetrain.exchange.member.link import Link
from edgetrain.exchange.seam import Request
from edgetrain.jobs.job import Job
from edgetrain.jobs.lookup import buffers_of, task_of, tuning_of, work_of
from edgetrain.jobs.resolved import look_up
from edgetrain.jobs.shares import shares_of, weight_of
from edgetrain.tasks.work import begin_at, optimizer_for, tune
from edgetrain.training.member.member import Member, bind, release_of
from edgetrain.training.member.pacing import Pace
from edgetrain.training.member.train import Made, Place
from edgetrain.training.servers.joined import Op, made_by, prepare_together

STEPS = 8


def beside_members(job: Job, seed: int = 0) -> dict[str, object] | None:
    """Train a fleet whose last member is a group, and the same fleet with one process in its place.
    All ranks call it. On the leader: checksums of each member's base, the two fleets' bases, and
    the parameters that they began with."""
    found, last = look_up(job), job.fleet.members - 1
    words, place = job.servers.placement, Place(last, "servers")
    together = prepare_together(found, place, task_of(job), words, torch.device("cpu"), None)
    if dist.get_rank():
        together.follow()
        return None
    together.lead(Op.PULL)
    begins = together.rank.held.whole.params.copy()
    alone = [_alone(job, index) for index in range(last + 1)]
    mixed = [_alone(job, index) for index in range(last)]
    mixed.append(made_by(together, found, task_of(job)))
    one = _fleet(job, alone, seed)
    sums, base, evaluated = _fleet(job, mixed, seed)
    together.lead(Op.END)
    return {
        "sums": sums, "base": base, "one": one[1], "begins": begins,
        "figures": (one[2], evaluated),
    }  # fmt: skip


def shares_beside_members(job: Job, alone: Job) -> dict[str, object] | None:
    """Train a fleet whose last member is a group with several shares, weighed as the job says, and
    the fleet `alone`, in which each share is a member. All ranks call it. On the leader: the bases,
    and the parameters that they began with."""
    found, last = look_up(job), job.fleet.members - 1
    words, place = job.servers.placement, Place(last, "servers")
    together = prepare_together(found, place, task_of(job), words, torch.device("cpu"), None)
    if dist.get_rank():
        together.follow()
        return None
    together.lead(Op.PULL)
    begins = together.rank.held.whole.params.copy()
    mixed = [_alone(job, index) for index in range(last)]
    mixed.append(made_by(together, found, task_of(job)))
    every = [_alone(alone, index) for index in range(alone.fleet.members)]
    one, base = _fleet(alone, every, 0)[1], _fleet(job, mixed, 0)[1]
    together.lead(Op.END)
    return {"base": base, "one": one, "begins": begins}


def _alone(job: Job, index: int) -> Made:
    task = task_of(job)
    torch.manual_seed(job.seed)
    model = task.model()
    optimizer = optimizer_for(model, job.train.optimizer, task)
    tune(optimizer, tuning_of(job))
    flat = bind(model, optimizer, job.train.frozen, buffers_of(look_up(job)))

    def work(source, begins_at, taken):
        begin_at(optimizer, begins_at)
        return work_of(job, task, model, flat, index, source, taken)

    return Made(look_up(job), task, model, optimizer, flat, Pace(lambda step: 0.0), work)


def _fleet(job: Job, members: list[Made], seed: int):
    """The checksums of all members' bases, the last one's base, and its figures within the fleet's
    model."""
    wires, found = Loopback(), look_up(job)

    def train(index: int, transport) -> tuple[int, np.ndarray, dict]:
        made, link = members[index], Link(transport, time.monotonic)
        weight = weight_of(job, made.task, shares_of(job, index))
        request = Request("", f"m{index}", weight, secure=found.mask_terms or False)
        release = release_of(job.privacy, lambda count: np.full(count, 7, np.uint8).tobytes())
        with Member.join(link, made.flat, made.optimizer, request, release=release) as member:
            local = made.work(None, member.begins_at, member.steps)
            for _ in range(STEPS):
                local.backward()
                member.step()
            member.drain()
            with member.fleet_model():
                figures = local.evaluate()
            return member.half.checksum, member.half.base.copy(), figures

    hub = children.HubThread(
        wires, found.strategy.spelled, len(members), local_steps=found.local_steps,
        delay=found.delay.steps, codec=codecs.parse(job.strategy.codec).name,
    )  # fmt: skip
    with hub.serving():
        ends = [wires.connect() for _ in members]
        ended = children.in_threads(*[lambda i=i: train(i, ends[i]) for i in range(len(members))])
    return [each[0] for each in ended], ended[-1][1], ended[-1][2]
