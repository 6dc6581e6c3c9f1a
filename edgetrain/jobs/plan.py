"""A job with every name in it looked up: what cannot work fails before anything starts.

`check` does without torch and data: a misspelt name costs no second. `with_task` adds what only the
task knows. Nothing is started here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain.errors import refuse_first
from edgetrain.fleet import devices, networks
from edgetrain.fleet.assignment import devices_of, members_of, networks_of, parse_sites, spread
from edgetrain.fleet.networks.nodes import by_node
from edgetrain.fleet.presence import Presence, parse_absences
from edgetrain.jobs import bundles
from edgetrain.jobs.job import AUTO, COLLECTIVES, Job
from edgetrain.jobs.on_member import settle
from edgetrain.jobs.optimizers import check_optimizer
from edgetrain.jobs.privacy.promise import promise
from edgetrain.jobs.resolved import Resolved, look_up, with_all_members
from edgetrain.jobs.rules import check_topology, resolve
from edgetrain.tasks import spelling
from edgetrain.vectors.ranges import Ranges

if TYPE_CHECKING:
    from edgetrain.tasks.protocol import Task


def check(job: Job) -> Resolved:
    """Look up what a job names but its task, and check that it goes together. ConfigError,
    NetworkError. Loads neither torch nor the task.
    """
    found = resolve(with_all_members(job))
    job, count = found.job, found.job.fleet.members
    check_optimizer(job)
    _check_task(job)
    boards = spread(devices_of(job.fleet.device), count, "device")
    links = spread(networks_of(job.fleet.network), count, "network")
    profiles = {name: networks.load(name) for name in set(links)}
    hubs = spread(networks_of(job.fleet.hub_network), found.hubs, "hub_network", "hubs")
    hub_links = tuple(map(networks.load, hubs))
    faults = networks.parse_faults(job.faults, count, len(hub_links))
    networks.refuse_idle(faults, by_node([profiles[name] for name in links], hub_links))
    absences = parse_absences(job.absences, count)
    presence = Presence(absences, job.fleet.online_s, job.fleet.offline_s, job.seed)
    # ConfigError for absences that end a membership, or let training never begin
    strategy = found.strategy
    here = job.fleet.members
    if not presence.is_steady:
        here = sum(not presence.is_off_at_first(index) for index in range(here))
    comes_back, topology = not presence.is_steady, job.fleet.topology
    refuse_first(
        (job.hub.min_members and here < job.first_members, f"absences: {here} devices are there at "
         f"first, and hub.min_members is {job.hub.min_members}: training would never begin",
         f"say hub.min_members={here}, or let absences begin later"),
        (comes_back and not strategy.allows_late_join, f"{strategy.name}: a device that comes back "
         "cannot join, the optimizer's state is only in the members",
         "leave absences and online_s out, or choose dga or fedavg"),
        (comes_back and topology in COLLECTIVES and strategy.outer_rule() is not None,
         f"{strategy.name} in a {topology}: a device that comes back cannot join: what the outer "
         "rule remembers is only in the members",
         "leave absences and online_s out, or choose dga or fedavg, or topology = 'star'"),
    )  # fmt: skip
    found = replace(
        found,
        devices=boards,
        device_profiles={name: devices.load(name) for name in set(boards)},
        networks=links,
        network_profiles=profiles,
        hub_links=hub_links,
        nat=members_of(job.fleet.nat, count),
        sites=parse_sites(job.fleet.sites, count),
        faults=faults,
        congestion=networks.parse_congestion(job.fleet.congestion),
        presence=presence,
    )
    check_topology(found)
    return found


def check_names(job: Job) -> Resolved:
    """ConfigError for a name that does not exist; NetworkError for a network's. Whether the names
    go together is not checked. Loads neither torch nor the task."""
    found = look_up(job)
    devices_of(job.fleet.device)
    networks_of(job.fleet.network)
    networks_of(job.fleet.hub_network)
    check_optimizer(job)
    _check_task(job)
    return found


def _check_task(job: Job) -> None:
    """TaskError for what is wrong with the job's task and can be said before it is loaded."""
    if bundles.named(job.task) is None:
        spelling.check(job.task, job.data)


def plan(job: Job, beside: Path | None = None) -> Resolved:
    """Look up all that a job names, `beside` its file. ConfigError, NetworkError, TaskError."""
    return with_task(check(job), beside)


def with_task(found: Resolved, beside: Path | None = None) -> Resolved:
    """A job that `check` has looked up, with its task, and its optimizer built. Loads torch and
    the data. The model is built without memory, where it can be. ConfigError, TaskError."""
    from edgetrain.jobs.lookup import (
        buffers_of,
        rehearse,
        rehearse_private,
        samples_of,
        target_of,
        task_of,
    )
    from edgetrain.tasks.flat import measured_elements, trained_of
    from edgetrain.tasks.meta import outline_of
    from edgetrain.tasks.work import optimizer_for

    job = found.job
    task = task_of(job, beside)
    outline = outline_of(task)
    parameters, statistics = outline.parameters, measured_elements(outline.model)
    if job.strategy.personal:
        parameters = sum(p.numel() for _, p in trained_of(outline.model))
    elements = (parameters + statistics) * (1 + found.strategy.has_variates)
    # ConfigError for more than there are blocks
    Ranges(elements, max(found.strategy.ranges, job.strategy.ranges))
    optimizer_for(outline.model, job.train.optimizer, task)
    samples = samples_of(job, task)
    fixed = settle(replace(found, job=replace(job, name=job.name or task.name)), samples)
    rehearse(fixed.job, task)
    rehearse_private(fixed, task)
    return _settled(
        replace(
            fixed,
            name=task.name,
            metric=task.metric,
            better=task.better,
            target=target_of(job, task),
            beside=beside,
            promise=promise(fixed, samples),
            samples=samples,
            buffers=buffers_of(fixed) if statistics else None,
            parameters=parameters,
        ),
        elements,
        task,
    )


def _settled(found: Resolved, elements: int, task: Task) -> Resolved:
    """The job with the topology that its "auto" takes on links like its own."""
    from edgetrain.jobs import topology
    from edgetrain.jobs.capacity.question import Options, question_of
    from edgetrain.jobs.lookup import pace_of

    job = found.job
    if job.fleet.gateways:
        return topology.take_star(found, "the job has gateways (fleet.gateways)")
    if found.strategy.deals:
        return topology.take_star(found, f"the hub of {found.strategy.name} hands out work")
    if job.fleet.topology != AUTO or not found.strategy.is_synchronous:
        return topology.take_star(found, "members are out of step and have no averaging of all")
    model = task.model()
    paces = (pace_of(job, board, model, task) for board in set(found.devices))
    step_s = max(paces) or topology.QUICK_S
    options = Options(parameters=elements, step_s=step_s, hub_rate_mbit=0.0)
    return topology.settle(found, question_of(found, options, found.beside))
