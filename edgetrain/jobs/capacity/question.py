"""From a job to the question that the estimate answers."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.jobs.capacity.estimate import Kind, Question


def question_of(job: Job, arguments: argparse.Namespace, beside: Path | None) -> Question:
    """What is to be worked out. ConfigError for names and numbers that cannot be."""
    from edgetrain import codecs, strategies
    from edgetrain.fleet import networks
    from edgetrain.fleet.assignment import parse_sites
    from edgetrain.jobs.building import hub_of
    from edgetrain.jobs.capacity.estimate import Exchange, Hubs, Question

    hub_of(job)  # refuses what no hub would take
    strategy = strategies.find(job.strategy.name)
    delay = 0 if not strategy.delays else job.strategy.delay
    kinds, elements = _kinds(job, arguments, beside)
    codec = codecs.parse(job.strategy.codec)
    reply_codec = codecs.parse(job.strategy.reply_codec) if job.strategy.reply_codec else codec
    members = arguments.members or max(job.fleet.members, len(kinds))
    sites = parse_sites(job.fleet.sites, job.fleet.members)
    uplink = networks.load(arguments.uplink) if arguments.uplink else kinds[0].network
    return Question(
        members=members,
        kinds=kinds,
        exchange=Exchange(
            every=job.strategy.every or strategy.every,
            delay=None if delay == "auto" else int(delay),
            elements=elements,
            codec=codec,
            reply_codec=reply_codec,
            ratio=arguments.ratio,
            reply_ratio=arguments.reply_ratio or arguments.ratio,
        ),
        hubs=Hubs(
            shards=arguments.shards,
            gateways=arguments.gateways,
            uplinks=0 if arguments.gateways else arguments.sites or len(sites),
            uplink=sites[0].uplink if sites and not arguments.uplink else uplink,
            rate_mbit=arguments.hub_rate,
            gateway_rate_mbit=arguments.gateway_rate,
            message_s=job.hub.message_s,
            merge_bytes_per_s=arguments.merge_rate * 1e9,
        ),
        rounds=arguments.rounds,
        seed=job.seed,
        quorum=min(job.hub.quorum, members),
        deadline_s=job.hub.deadline_s,
    )


def _kinds(
    job: Job, arguments: argparse.Namespace, beside: Path | None
) -> tuple[tuple[Kind, ...], int]:
    """The kinds of members, in turn, and the model's parameters; measured where nobody said."""
    from edgetrain.fleet import devices, networks
    from edgetrain.fleet.assignment import devices_of, networks_of
    from edgetrain.jobs.capacity.estimate import Kind

    boards = devices_of(job.fleet.device)
    links = networks_of(job.fleet.network)
    step_s, elements = arguments.step_seconds or job.fleet.pace_s, arguments.parameters
    paces = dict.fromkeys(boards, step_s)
    if not step_s or not elements:
        measured, paces_of_task = _measure(job, sorted(set(boards)), beside)
        elements = elements or measured
        paces = paces if step_s else paces_of_task
    kinds = {
        (board, link): Kind(devices.load(board), paces[board], networks.load(link))
        for board in set(boards)
        for link in set(links)
    }
    turns = math.lcm(len(boards), len(links))
    if turns > 1_000_000:
        raise ConfigError(
            f"{len(boards)} devices and {len(links)} networks have no common pattern",
            "name as many devices as networks, or one of either",
        )
    pattern = tuple(kinds[boards[i % len(boards)], links[i % len(links)]] for i in range(turns))
    return pattern, int(elements)


def _measure(job: Job, boards: list[str], beside: Path | None) -> tuple[int, dict[str, float]]:
    """The task's parameters, and a step's seconds on each device. Loads torch and the data."""
    from edgetrain.jobs.lookup import pace_of, task_of

    alone = replace(job, fleet=replace(job.fleet, members=1))
    task = task_of(alone, beside)
    model = task.model()
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return elements, {board: pace_of(alone, board, model, task) for board in boards}
