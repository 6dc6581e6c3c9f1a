"""A job with every name in it looked up: what cannot work fails before anything starts.

From a job to the objects and profiles it names. Nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain import codecs, strategies
from edgetrain.codecs import Codec, Deep, TwoTrips
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.journal import Fsync, Settings
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.masks import terms as secure
from edgetrain.exchange.messages import MAX_HEADER_BYTES
from edgetrain.fleet import devices, networks
from edgetrain.fleet.networks import Fault, Site
from edgetrain.fleet.presence import Presence, parse_absences
from edgetrain.jobs.privacy import promise as privacy
from edgetrain.jobs.privacy.accounting import promise, settle
from edgetrain.jobs.privacy.promise import Promise
from edgetrain.jobs.reading import Job
from edgetrain.strategies import merging
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.noise import Gaussian, PrivateMean, Source, system
from edgetrain.vectors.parts import BASE_PART_ELEMENTS

if TYPE_CHECKING:
    from edgetrain.exchange.masks.aggregator import Aggregator


def hub_of(job: Job, *, any_job: bool = False, source: Source | None = None) -> Hub:
    """The hub of a job; ConfigError for a strategy, codec or value that cannot be.

    With `any_job` it takes members whatever job they run. `source` of the noise of a hub that adds
    it; None: the operating system's. Needs no torch.
    """
    strategy = strategies.find(job.strategy.name)
    every = job.strategy.every or strategy.every
    if strategy.contributes == "gradient" and every != 1:
        raise ConfigError(
            f"strategy.every = {every}: {strategy.name} exchanges gradients at every step",
            "leave it out, or choose local-sgd",
        )
    if job.hub.quorum > job.fleet.members:
        raise ConfigError(
            f"hub.quorum = {job.hub.quorum}: the job has only {job.fleet.members} members"
        )
    delay = None if job.strategy.delay == "auto" else int(job.strategy.delay)
    if not strategy.delays:
        if delay:
            raise ConfigError(
                f"strategy.delay = {delay}: {strategy.name} waits for every reply",
                "leave it out, or choose dga",
            )
        delay = 0
    codec, reply_codec = _codecs(job, strategy)
    masks = _masks(job)
    journal_settings(job)
    privacy.check(job)
    return Hub(
        Terms(
            strategy.name,
            strategy.contributes,
            strategy.weighted,
            every,
            delay,
            "" if any_job else job.digest(),
        ),
        Policy(
            job.fleet.members,
            job.hub.quorum,
            job.hub.deadline_s,
            job.hub.gone_s,
            job.hub.beat_s,
            job.hub.return_s,
        ),
        _merge_rule(job, strategy, source),
        codec,
        reply_codec,
        masks,
    )


def agreement_of(job: Job) -> secure.Agreement | None:
    """How the job's contributions are masked; None: they are not. ConfigError."""
    table, members = job.strategy, job.fleet.members
    if not table.secure:
        if table.threshold:
            raise ConfigError(
                f"strategy.threshold = {table.threshold} is for masked contributions",
                "say strategy.secure=true, or leave it out",
            )
        return None
    threshold = table.threshold or secure.default_threshold(members)
    refused = secure.why_not(members, threshold)
    if refused:
        raise ConfigError(f"strategy.secure = true: {refused}")
    return secure.Agreement(members, threshold, table.span)


def _masks(job: Job) -> Aggregator | None:
    """What adds up masked contributions; ConfigError for what would have to read them."""
    agreement = agreement_of(job)
    if agreement is None:
        return None
    if codecs.parse(job.strategy.codec).name != "fp32":
        raise ConfigError(
            f"strategy.codec = '{job.strategy.codec}' and strategy.secure: masked numbers are as "
            "random as noise, and only whole vectors of fixed point numbers can be added under "
            "masks",
            "leave codec out (32 bits an element are sent), and compress replies with reply_codec",
        )
    if merging.find(job.strategy.merge).name != "mean":
        raise ConfigError(
            f"strategy.merge = '{job.strategy.merge}' and strategy.secure: the rule compares the "
            "contributions of single members, and the hub sees only their sum",
            "choose merge = 'mean', or do without secure",
        )
    secure.require()
    from edgetrain.exchange.masks.aggregator import Aggregator

    return Aggregator(agreement)


def journal_settings(job: Job) -> Settings:
    """How the job's journal is kept; ConfigError."""
    if job.hub.when_full not in ("stop", "go on"):
        raise ConfigError(f"hub.when_full = '{job.hub.when_full}'", "allowed are 'stop', 'go on'")
    stop = job.hub.when_full == "stop"
    return Settings(Fsync.parse(job.hub.fsync), stop, job.hub.snapshot_every)


LARGEST_PART_BYTES = 1 << 30
"""Of codecs whose parts are as large as the model, which a hub does not know before it listens."""


def message_limit(job: Job) -> int:
    """Bytes of the largest frame that a member of this job has a reason to send. A connection that
    announces a larger one is closed before anything is allocated for it."""
    codec = codecs.parse(job.strategy.codec)
    try:
        largest = codec.max_bytes(codec.part_elements)
    except ConfigError:  # it depends on the shapes of the tensors
        largest = LARGEST_PART_BYTES
    return max(largest, 4 * BASE_PART_ELEMENTS, MAX_HEADER_BYTES)


def _merge_rule(
    job: Job, strategy: strategies.Strategy, source: Source | None
) -> SliceRule | RoundRule:
    """What merges; ConfigError where it does not go together with the rest of the job."""
    refused = merging.why_not(
        job.strategy.merge,
        strategy=strategy.name,
        weighted=strategy.weighted,
        members=job.fleet.members,
        codec=job.strategy.codec,
    )
    if refused:
        raise ConfigError(f"strategy.merge = '{job.strategy.merge}': {refused}")
    if job.privacy.unit == "member" and job.privacy.where == "hub":
        return _private_mean(job, strategy, source)
    return strategy.merge_rule(job.strategy.merge)


def _private_mean(job: Job, strategy: strategies.Strategy, source: Source | None) -> RoundRule:
    table = settle(job).privacy
    return PrivateMean(
        Gaussian(table.clip, table.noise),
        source or system,
        keeps_late=strategy.contributes == "displacement",
    )


def _codecs(job: Job, strategy: strategies.Strategy) -> tuple[Codec, Codec]:
    """Of contributions and of replies. Momentum belongs to the gradients of the members."""
    codec = codecs.parse(job.strategy.codec)
    if isinstance(codec, Deep) and strategy.contributes != "gradient":
        raise ConfigError(
            f"strategy.codec = '{codec.name}': {strategy.name} sends displacements, which have the "
            "optimizer's momentum in them",
            f"take '{codec.plain().name}', or sync-sgd",
        )
    if isinstance(codec, Deep) and codec.momentum and job.train.optimizer.get("momentum"):
        raise ConfigError(
            f"train.optimizer.momentum = {job.train.optimizer['momentum']} and the codec "
            f"'{codec.name}' would count momentum twice",
            "say optimizer.momentum=0: the codec has it, where it can be corrected",
        )
    if isinstance(codec, TwoTrips) and strategy.contributes != "gradient":
        raise ConfigError(
            f"strategy.codec = '{codec.name}': two trips a step are for gradients",
            f"take 'low-rank({codec.rank})', or sync-sgd",
        )
    if not job.strategy.reply_codec:
        return codec, codec.without_momentum() if isinstance(codec, Deep) else codec
    reply_codec = codecs.parse(job.strategy.reply_codec)
    if isinstance(codec, TwoTrips) != isinstance(reply_codec, TwoTrips):
        raise ConfigError(
            f"strategy.reply_codec = '{reply_codec.name}', strategy.codec = '{codec.name}'",
            "both trips of powersgd go both ways: leave reply_codec out",
        )
    if isinstance(reply_codec, Deep) and reply_codec.momentum:
        raise ConfigError(
            f"strategy.reply_codec = '{reply_codec.name}': members have their momentum already",
            f"take '{reply_codec.without_momentum().name}'",
        )
    return codec, reply_codec


@dataclass(frozen=True)
class Plan:
    """A job with every name in it looked up: what cannot work fails before anything starts."""

    job: Job
    devices: tuple[str, ...]
    """The device profile of each member."""
    networks: tuple[str, ...]
    """The network profile of each member."""
    sites: tuple[Site, ...]
    """Members that share an uplink."""
    faults: tuple[Fault, ...]
    """What goes wrong with the links, and when."""
    congestion: str
    """The congestion control of all links."""
    presence: Presence
    """Which devices come and go."""
    name: str
    metric: str
    better: str
    target: float | None
    beside: Path | None
    """The folder of the job file."""
    promise: Promise | None
    """What the job's privacy is worth, if all goes as planned."""
    samples: tuple[int, ...]
    """How many each member holds, where the job's privacy depends on it; else ()."""


def plan(job: Job, beside: Path | None = None) -> Plan:
    """Look up task, devices, network, strategy, codec and optimizer. Loads torch and the data."""
    from edgetrain.training import train

    privacy.check(job)
    hub_of(job)
    members, job = _members(job)
    task = train.task_of(job, beside)
    train.optimizer_for(task.model(), job.train.optimizer)
    for device in set(members):
        devices.load(device)
    links = _spread(networks.parse_fleet(job.fleet.network), len(members), "network")
    loaded = {name: networks.load(name) for name in set(links)}
    profiles = [loaded[name] for name in links]
    sites = networks.parse_sites(job.fleet.sites, len(members))
    faults = networks.parse_faults(job.faults, len(members))
    networks.refuse_idle(faults, profiles)
    congestion = networks.parse_congestion(job.fleet.congestion)
    presence = _presence(job, len(members))
    samples = train.samples_of(job, task)
    job = settle(replace(job, name=job.name or task.name), samples)
    train.rehearse(job, task)
    return Plan(
        job, members, links, sites, faults, congestion, presence,
        task.name, task.metric, task.better, task.target, beside, promise(job, samples), samples,
    )  # fmt: skip


def _presence(job: Job, members: int) -> Presence:
    found = Presence(
        parse_absences(job.absences, members), job.fleet.stays_s, job.fleet.away_s, job.seed
    )
    if not found.is_steady and strategies.find(job.strategy.name).contributes == "gradient":
        raise ConfigError(
            f"{job.strategy.name}: a device that comes back cannot join, the optimizer's state is "
            "only in the members",
            "leave absences and stays_s out, or choose dga or fedavg",
        )
    return found


def _members(job: Job) -> tuple[tuple[str, ...], Job]:
    """One device per member; a device list with counts also says how many members there are."""
    named = devices.parse_fleet(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return _spread(named, job.fleet.members, "device"), job


def _spread(names: list[str], members: int, what: str) -> tuple[str, ...]:
    if len(names) == 1:
        return tuple(names) * members
    if len(names) != members:
        raise ConfigError(
            f"fleet.{what} names {len(names)} members, the job has {members}",
            f"give one {what} for all, or as many as there are members",
        )
    return tuple(names)
