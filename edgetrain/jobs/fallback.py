"""Whether servers step in for devices that go while a job runs. No torch.

When they do is decided in `exchange/hub/fallback.py`; what does not go with it, in `rules`.
"""

from __future__ import annotations

from edgetrain.jobs.job import Job
from edgetrain.jobs.shares import has_group

NAME = "servers"
"""The name that the group has at the hub."""


def why_never(job: Job) -> str:
    """Why no group steps in while the job runs; "": one does, if devices go."""
    servers = job.servers
    if servers.fallback == "never":
        return "servers.fallback = 'never'"
    if has_group(job):
        return f"a group is there (fleet.device = '{job.fleet.device}')"
    if servers.placement != "auto":
        return f"servers.placement = '{servers.placement}'; 'auto' fits the members it stands for"
    if servers.cluster:
        return f"servers.cluster = '{servers.cluster}': the ranks would run on the hub's machine"
    if not servers.data:
        return "servers.data does not say which data the servers have"
    return ""


def steps_in(job: Job) -> bool:
    return not why_never(job)


def in_words(job: Job) -> str:
    """Treatment of lost devices during the job, for people; "": none."""
    if job.servers.fallback == "never":
        return ""
    if why := why_never(job):
        return f"no group steps in while it runs: {why}"
    from edgetrain.exchange.hub.fallback import SLOW  # the rule itself is the hub's

    pace = f", or at less than {SLOW:g} of the servers' pace," if watches_pace(job) else ""
    return (
        f"with fewer than {quorum_of(job)} of {job.fleet.members} members{pace} for "
        f"{job.servers.after_s:g} s a group on the hub's machine steps in for the others"
    )


def watches_pace(job: Job) -> bool:
    """Whether a group also steps in for devices that are slower than it."""
    return job.servers.fallback == "when-faster" and steps_in(job)


def quorum_of(job: Job) -> int:
    """Contributions that a round needs at its deadline, and members without which a group steps in:
    the job's, or half of its members where it says 1 and a group steps in."""
    if job.hub.quorum > 1 or not steps_in(job):
        return job.hub.quorum
    return max(1, job.fleet.members // 2)
