"""A job with every name in it looked up: what cannot work fails before anything starts.

Nothing is started here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgetrain.fleet import devices, networks
from edgetrain.fleet.assignment import devices_of, networks_of, parse_sites, spread
from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks import Fault, Profile, Site
from edgetrain.fleet.presence import Presence, parse_absences
from edgetrain.jobs.job import Job
from edgetrain.jobs.privacy.promise import Promise, fix_noise, promise
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.rules import check_on_member, refuse_absences, resolve


@dataclass(frozen=True, kw_only=True)
class Plan(Resolved):
    """A job, and the objects that it names. Its noise is known, and its name is not empty."""

    devices: tuple[str, ...]
    """The device profile of each member."""
    device_profiles: dict[str, Device]
    """Those profiles, by name."""
    networks: tuple[str, ...]
    """The network profile of each member."""
    network_profiles: dict[str, Profile]
    """Those profiles, by name."""
    sites: tuple[Site, ...]
    """Members that share an uplink."""
    faults: tuple[Fault, ...]
    """What goes wrong with the links, and when."""
    congestion: str
    """The congestion control of all links."""
    presence: Presence
    """Which devices come and go."""
    name: str
    """The task's."""
    metric: str
    better: str
    target: float | None
    beside: Path | None
    """The folder of the job file."""
    promise: Promise | None
    """What the job's privacy is worth, if all goes as planned."""
    samples: tuple[int, ...]
    """How many each member holds, where the job's privacy depends on it; else ()."""
    buffers: str | None
    """What becomes of running statistics, "mean" or "local"; None: the model measures none."""
    parameters: int
    """Of the model, trained ones, tied ones once."""
    notes: tuple[str, ...] = ()
    """What the owner of the job may want to know of the plan itself."""

    @property
    def links(self) -> list[Profile]:
        """The network profile of each member."""
        return [self.network_profiles[name] for name in self.networks]


def plan(job: Job, beside: Path | None = None) -> Plan:
    """Look up task, devices, network, strategy, codec and optimizer. Loads torch and the data.

    The model is built without memory, where it can be.

    `beside` is the folder of the job file. ConfigError, NetworkError, TaskError.
    """
    from edgetrain.jobs.lookup import buffers_of, rehearse, samples_of, task_of
    from edgetrain.tasks.flat import statistics_of
    from edgetrain.tasks.meta import outline_of
    from edgetrain.tasks.work import optimizer_for

    boards, job = _members(job)
    found = resolve(job)
    task = task_of(job, beside)
    outline = outline_of(task)
    optimizer_for(outline.model, job.train.optimizer)
    device_profiles = {name: devices.load(name) for name in set(boards)}
    links = spread(networks_of(job.fleet.network), len(boards), "network")
    network_profiles = {name: networks.load(name) for name in set(links)}
    sites = parse_sites(job.fleet.sites, len(boards))
    faults = networks.parse_faults(job.faults, len(boards))
    networks.refuse_idle(faults, [network_profiles[name] for name in links])
    congestion = networks.parse_congestion(job.fleet.congestion)
    presence = _presence(found, len(boards))
    samples = samples_of(job, task)
    found = fix_noise(replace(found, job=replace(job, name=job.name or task.name)), samples)
    check_on_member(found)
    rehearse(found.job, task)
    return Plan(
        **vars(found),
        devices=boards,
        device_profiles=device_profiles,
        networks=links,
        network_profiles=network_profiles,
        sites=sites,
        faults=faults,
        congestion=congestion,
        presence=presence,
        name=task.name,
        metric=task.metric,
        better=task.better,
        target=task.target,
        beside=beside,
        promise=promise(found, samples),
        samples=samples,
        buffers=buffers_of(found.job) if statistics_of(outline.model) else None,
        parameters=outline.parameters,
        notes=tuple(filter(None, [outline.problem])),
    )


def _presence(found: Resolved, members: int) -> Presence:
    job = found.job
    absences = parse_absences(job.absences, members)
    presence = Presence(absences, job.fleet.stays_s, job.fleet.away_s, job.seed)
    refuse_absences(found.strategy, presence)
    return presence


def _members(job: Job) -> tuple[tuple[str, ...], Job]:
    """One device per member; a device list with counts also says how many members there are."""
    named = devices_of(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return spread(named, job.fleet.members, "device"), job
