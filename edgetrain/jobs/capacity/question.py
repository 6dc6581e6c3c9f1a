"""From a job to the question that the estimate answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import ConfigError
from edgetrain.jobs.job import Job

if TYPE_CHECKING:
    from edgetrain.codecs.auto import Auto
    from edgetrain.fleet.networks import Profile, Site
    from edgetrain.jobs.capacity.estimate import CapacityQuestion, Kind
    from edgetrain.jobs.capacity.parcels import ExchangeSizes
    from edgetrain.jobs.resolved import Resolved


@dataclass(frozen=True)
class Options:
    """A question's options beyond its job. Rates are in Mbit/s, each way; 0: no limit."""

    members: int | None = None
    """None: the job's."""
    rounds: int = 100
    parameters: int | None = None
    """Number in the model; None: the task's, to be loaded."""
    step_s: float | None = None
    """Seconds of a step; None: the job's pace_s, else measured from the task for each device."""
    gateways: int = 0
    sites: int = 0
    """Sites without a gateway; 0: the job's."""
    uplink: str | None = None
    """The network profile between a site or gateway and the hub; None: that of the job's site, or
    of its first member."""
    shards: int = 1
    hub_rate_mbit: float = 1000.0
    gateway_rate_mbit: float = 1000.0
    merge_bytes_per_s: float = 2e9
    """float32 bytes that a hub merges in a second; 0: no limit."""
    ratio: float = 0.0
    """Ratio of contributions to float32, as measured; 0: the codec's upper bound."""
    reply_ratio: float = 0.0
    """Ratio of replies; 0: as of contributions."""

    def measures(self, job: Job) -> bool:
        """Whether the task has to be loaded, which decides what is left open here."""
        return not (self.step_s or job.fleet.pace_s) or not self.parameters


def question_of(
    found: Resolved, options: Options = Options(), beside: Path | None = None
) -> CapacityQuestion:
    """The question about a job's fleet. `beside` is the folder of the job file.

    ConfigError for names and numbers that cannot be. Loads the task if the options leave open what
    it decides.
    """
    from edgetrain.codecs.auto import Auto
    from edgetrain.fleet import networks
    from edgetrain.fleet.assignment import networks_of, parse_sites
    from edgetrain.jobs.capacity.averaging import Hubs
    from edgetrain.jobs.capacity.estimate import CapacityQuestion
    from edgetrain.jobs.capacity.parcels import ExchangeSizes

    job = found.job
    strategy = found.strategy
    if not strategy.is_synchronous:
        raise ConfigError(
            f"capacity of {strategy.spelled}: how often a reply goes to all depends on when "
            "contributions arrive",
            "simulate it: edgetrain simulate, or ask about dga or fedavg",
        )
    kinds, elements = _kinds(job, options, beside)
    members = options.members or max(job.fleet.members, len(kinds))
    sites = parse_sites(job.fleet.sites, job.fleet.members)
    homes, lines = _homes(sites, members, options)
    uplink = networks.load(options.uplink) if options.uplink else kinds[0].network
    exchange = ExchangeSizes(
        local_steps=found.local_steps,
        delay=replace(found.delay, final_sync=0.0),
        final_sync=bool(found.delay.final_sync),
        ranges=job.strategy.ranges,
        elements=-(-elements // found.strategy.ranges),
        codec=found.codec,
        reply_codec=found.reply_codec,
        ratio=options.ratio,
        reply_ratio=options.reply_ratio or options.ratio,
    )
    if isinstance(found.codec, Auto):
        exchange = on_rung(exchange, found.codec, kinds, members, options)
    return CapacityQuestion(
        members=members,
        kinds=kinds,
        exchange=exchange,
        hubs=Hubs(
            shards=options.shards,
            gateways=options.gateways,
            uplinks=0 if options.gateways else options.sites or len(lines),
            link=networks.load(networks_of(job.fleet.hub_network)[0]),
            homes=homes,
            lines=lines,
            uplink=sites[0].uplink if sites and not options.uplink else uplink,
            rate_mbit=options.hub_rate_mbit,
            gateway_rate_mbit=options.gateway_rate_mbit,
            message_s=job.hub.message_s,
            merge_bytes_per_s=options.merge_bytes_per_s,
        ),
        rounds=options.rounds,
        seed=job.seed,
        quorum=min(job.hub.quorum, members),
        deadline_s=job.hub.longest_deadline_s,
    )


def _homes(
    sites: Sequence[Site], members: int, options: Options
) -> tuple[tuple[int, ...], tuple[Profile, ...]]:
    """The site of each member, and its uplink, as the job says; (): it does not, or options say
    something else. A member without a site has one of its own, whose uplink is no limit."""
    from edgetrain.jobs.capacity.averaging import NO_LINK

    if not sites or options.members or options.gateways or options.sites or options.uplink:
        return (), ()
    named = {member: place for place, site in enumerate(sites) for member in site.members}
    alone = [member for member in range(members) if member not in named]
    named |= {member: len(sites) + place for place, member in enumerate(alone)}
    lines = (*(site.uplink for site in sites), *(NO_LINK for _ in alone))
    return tuple(named[member] for member in range(members)), lines


def on_rung(
    exchange: ExchangeSizes,
    codec: Auto,
    kinds: Sequence[Kind],
    members: int,
    options: Options,
) -> ExchangeSizes:
    """Final codec of `codec = "auto"`: the hub's decision for the slowest of these links."""
    from edgetrain.codecs.auto import element_bytes
    from edgetrain.exchange.hub.delay import AgreedDelay
    from edgetrain.exchange.hub.density import rung_for, spare_s

    steps = options.rounds * exchange.local_steps
    most_delay = AgreedDelay(exchange.local_steps, exchange.delay, steps).most
    step_s = max(kind.step_s for kind in kinds)
    port_s = 8e-6 * members / options.hub_rate_mbit if options.hub_rate_mbit else 0.0
    rung = 0
    for network in {kind.network for kind in kinds}:
        spare = spare_s(exchange.local_steps, step_s, network.rtt_ms / 1000, most_delay)
        ways = (network.up.mean_rate_mbit, network.down.mean_rate_mbit)
        byte_s = sum((8e-6 / rate if rate else 0.0) + port_s for rate in ways) / 2
        rate = 1 / byte_s if byte_s else math.inf
        rung = max(rung, rung_for(exchange.elements, rate, spare, codec.floor))
    ratio = options.ratio or 4 / element_bytes(rung)
    reply_ratio = options.reply_ratio or ratio
    chosen = codec.at(rung)
    return replace(exchange, codec=chosen, reply_codec=chosen, ratio=ratio, reply_ratio=reply_ratio)


def _kinds(job: Job, options: Options, beside: Path | None) -> tuple[tuple[Kind, ...], int]:
    """The kinds of members, in turn, and the model's parameters; measured where they are open."""
    from edgetrain.fleet import devices, networks
    from edgetrain.fleet.assignment import devices_of, networks_of
    from edgetrain.jobs.capacity.estimate import Kind
    from edgetrain.jobs.pipeline import refuse_pipeline
    from edgetrain.jobs.rules import refuse_group

    refuse_group(job, "capacity is not known of")
    refuse_pipeline(job, "contributions are sized, and there are none in")
    boards = devices_of(job.fleet.device)
    links = networks_of(job.fleet.network)
    step_s, elements = options.step_s or job.fleet.pace_s, options.parameters
    paces = dict.fromkeys(boards, step_s)
    if not step_s or not elements:  # as `Options.measures` says
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
    from edgetrain.jobs.lookup import built, pace_of, task_of
    from edgetrain.tasks.flat import trained_of

    alone = replace(job, fleet=replace(job.fleet, members=1))
    task = task_of(alone, beside)
    model = built(task)
    elements = sum(p.numel() for _, p in trained_of(model))
    return elements, {board: pace_of(alone, board, model, task) for board in boards}
