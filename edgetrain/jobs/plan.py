"""A job with every name in it looked up: what cannot work fails before anything starts.

From a job to the objects and profiles it names. Nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain import strategies
from edgetrain.errors import ConfigError
from edgetrain.fleet import devices, networks
from edgetrain.fleet.assignment import devices_of, networks_of, parse_sites, spread
from edgetrain.fleet.networks import Fault, Site
from edgetrain.fleet.presence import Presence, parse_absences
from edgetrain.jobs.building import hub_of
from edgetrain.jobs.job import Job
from edgetrain.jobs.privacy.promise import Promise, promise, settle
from edgetrain.jobs.rules import check

if TYPE_CHECKING:
    pass


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
    from edgetrain.jobs.lookup import rehearse, samples_of, task_of
    from edgetrain.tasks.work import optimizer_for

    check(job)
    hub_of(job)
    members, job = _members(job)
    task = task_of(job, beside)
    optimizer_for(task.model(), job.train.optimizer)
    for device in set(members):
        devices.load(device)
    links = spread(networks_of(job.fleet.network), len(members), "network")
    loaded = {name: networks.load(name) for name in set(links)}
    profiles = [loaded[name] for name in links]
    sites = parse_sites(job.fleet.sites, len(members))
    faults = networks.parse_faults(job.faults, len(members))
    networks.refuse_idle(faults, profiles)
    congestion = networks.parse_congestion(job.fleet.congestion)
    presence = _presence(job, len(members))
    samples = samples_of(job, task)
    job = settle(replace(job, name=job.name or task.name), samples)
    rehearse(job, task)
    return Plan(
        job, members, links, sites, faults, congestion, presence,
        task.name, task.metric, task.better, task.target, beside, promise(job, samples), samples,
    )  # fmt: skip


def _presence(job: Job, members: int) -> Presence:
    found = Presence(
        parse_absences(job.absences, members), job.fleet.stays_s, job.fleet.away_s, job.seed
    )
    if not found.is_steady and not strategies.find(job.strategy.name).allows_late_join:
        raise ConfigError(
            f"{job.strategy.name}: a device that comes back cannot join, the optimizer's state is "
            "only in the members",
            "leave absences and stays_s out, or choose dga or fedavg",
        )
    return found


def _members(job: Job) -> tuple[tuple[str, ...], Job]:
    """One device per member; a device list with counts also says how many members there are."""
    named = devices_of(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return spread(named, job.fleet.members, "device"), job
