"""What a key of a job may be, beside the fleet, the strategy and the codecs that the job has.

What follows from the properties of two choices is in `pairs`. A rule asks codecs, strategies and
merge rules for their properties, and refuses with a way out. Nothing is built: a job can be checked
without a hub.
"""

from __future__ import annotations

from edgetrain import codecs
from edgetrain.errors import ConfigError, refuse_first, require
from edgetrain.exchange.addresses import split_address
from edgetrain.jobs.fallback import quorum_of, steps_in
from edgetrain.jobs.job import AUTO, DIRECT, Fleet, Job
from edgetrain.jobs.on_member import Refusal, check_mask_terms, check_on_member
from edgetrain.jobs.pairs import check_pairs, why_not_with
from edgetrain.jobs.resolved import Resolved, journal_settings, look_up
from edgetrain.jobs.shares import has_group
from edgetrain.strategies import merging
from edgetrain.vectors.ranges import shared

_FEWEST_ROBUST = 3
"""Contributions of which one that lies can be told from the others."""


def resolve(job: Job) -> Resolved:
    """Look up what a job names (the rest is `plan`'s), and check that it goes together.
    ConfigError."""
    found = look_up(job)
    check(found)
    return found


def check(found: Resolved) -> None:
    """ConfigError for what does not go together in a job. Links are not looked at."""
    job, table = found.job, found.job.strategy
    _check_shares(found)
    if table.cohort or table.cohort_extra or table.sampling != "uniform":
        from edgetrain.jobs.cohorts import check_cohort  # of a job that says so

        check_cohort(found)
    _check_counts(found)
    check_pairs(found)
    _check_strategy(found)
    if job.train.schedule:
        from edgetrain.jobs import schedule

        schedule.parse(job.train.schedule, job.train.steps)
    _check_replies(found)
    _check_ranges(found)
    check_mask_terms(found)
    if found.mask_terms:
        require(
            "strategy.secure = true, on the hub and on every member,", "private", "cryptography"
        )
    journal_settings(job)
    check_on_member(found)
    _check_merged(found)
    check_topology(found)
    if has_group(job):
        from edgetrain.jobs.placement.words import check_group_beside  # of such a job

        check_group_beside(job)
    _check_pipeline(found)


def _check_pipeline(found: Resolved) -> None:
    job = found.job
    if not job.fleet.placement:
        if job.fleet.activations != Fleet.activations:
            raise ConfigError(
                f"fleet.activations = '{job.fleet.activations}' without fleet.placement: members "
                "pass no activations on",
                "leave it out, or say placement = 'pipeline=…'",
            )
        return
    from edgetrain.jobs.pipeline import check_stages

    check_stages(job)


def refuse_group(job: Job, what: str) -> None:
    """ConfigError for a fleet with a group, whose speed is not known, and `what` needs one."""
    if has_group(job):
        raise ConfigError(
            f"fleet.device = '{job.fleet.device}': {what} 'servers', whose speed is not known",
            "edgetrain run emulates them; or name a device of the catalog in their place",
        )


def refuse_fallback(job: Job, what: str) -> None:
    """ConfigError for a fleet that a group may step in for, where `what` cannot have that."""
    if steps_in(job):
        raise ConfigError(
            f"servers.fallback = '{job.servers.fallback}' with servers.data: {what} a group that "
            "steps in",
            "`edgetrain run` and `edgetrain hub` have it; or say servers.fallback=never",
        )


def _check_shares(found: Resolved) -> None:
    job, shares, members = found.job, found.job.servers.shares, found.job.fleet.members
    refuse_first(
        (shares > 1 and not has_group(job), f"servers.shares = {shares}, and no member is a group",
         "name it, as in fleet.device = 'raspberry-pi-4b:6, servers'"),
        (shares > members, f"servers.shares = {shares}: the job has only {members} members",
         f"allowed are 1 to {members}"),
    )  # fmt: skip


# -- strategy, codecs, masks, merge rule ----------------------------------------------------------


def _check_replica(found: Resolved) -> None:
    job = found.job
    if not job.hub.replica:
        return
    split_address(job.hub.replica)
    refuse_first(
        (2 * job.hub.quorum <= job.fleet.members,
         f"hub.quorum = {job.hub.quorum} and hub.replica: fewer than half of the members would "
         "close rounds, and more than half decide who goes on",
         f"say hub.quorum={job.fleet.members // 2 + 1} or more, of {job.fleet.members} members"),
        (job.hub.on_disk_full != "stop",
         f"hub.on_disk_full = '{job.hub.on_disk_full}' and hub.replica: a "
         "replica holds what the hub's journal has", "say hub.on_disk_full=stop"),
    )  # fmt: skip


def _check_counts(found: Resolved) -> None:
    job, few, most = found.job, found.job.hub.min_members, found.job.fleet.members
    least = found.mask_terms.threshold if found.mask_terms else 0
    refuse_first(
        *((count > most, f"hub.{key} = {count}: the job has only {most} members",
           f"allowed are 1 to {most}")
          for key, count in (("quorum", job.hub.quorum), ("min_members", few))),
        *((0 < few < fewest, f"hub.min_members = {few} and {key} = {fewest}: rounds could not "
           "close until more have come", f"say hub.min_members={fewest} or more")
          for key, fewest in (("hub.quorum", quorum_of(job)), ("strategy.threshold", least))),
    )  # fmt: skip
    _check_replica(found)


def _check_strategy(found: Resolved) -> None:
    """What the job's strategy needs of it."""
    strategy, job, table = found.strategy, found.job, found.job.strategy
    partition, head = (
        str(job.data.get("partition", "iid")),
        f"strategy.head_steps = {table.head_steps}",
    )
    refuse_first(
        (table.head_steps and not table.personal, f"{head} without strategy.personal: members have "
         "no layers of their own", "say which, as in personal = 'head.*'"),
        (table.head_steps and table.head_steps >= found.local_steps,
         f"{head} in rounds of {found.local_steps} steps: none is left for what members share",
         f"head_steps = {found.local_steps - 1} or less, or more strategy.local_steps"),
        (strategy.deals and not partition.startswith("shared("), f"data.partition = '{partition}' "
         f"and {strategy.name}: slices are of a batch that all members hold",
         "say partition = 'shared(all)'"),
        *((parameter.most_members and value > job.first_members, f"{strategy.spelled} with "
           f"{job.first_members} members: a round would wait for more than there are",
           f"{parameter.name} = {job.first_members}, or less")
          for parameter, value in zip(strategy.parameters, strategy.arguments, strict=True)),
    )  # fmt: skip


def _check_replies(found: Resolved) -> None:
    """What codecs of replies may be beside those of contributions."""
    codec, reply = found.codec, found.reply_codec
    both = f"strategy.codec = '{codec.name}', strategy.reply_codec = '{reply.name}'"
    refuse_first(
        (codec != reply and (codec.adapts or reply.adapts), f"{both}: members encode as the last "
         "reply was encoded", "leave reply_codec out, or name two codecs"),
        (codec.two_trips != reply.two_trips, f"{both}: both trips of powersgd go both ways",
         "leave reply_codec out"),
        (reply.momentum, f"strategy.reply_codec = '{reply.name}': members have their momentum "
         "already", f"take '{reply.for_replies().name}'"),
    )  # fmt: skip


def _check_ranges(found: Resolved) -> None:
    ranges, hubs = found.job.strategy.ranges, found.job.hub.hubs
    for codec in (found.codec, found.reply_codec):
        codecs.check_ranges(codec, max(found.strategy.ranges, ranges))
        if ranges > 1:
            from edgetrain.codecs.pieces import check_pieces

            check_pieces(codec)
    for address in hubs:
        split_address(address)
    if len(set(hubs)) < len(hubs):
        raise ConfigError(f"hub.hubs = {hubs}: one address twice", "each hub has its own")
    if len(hubs) > 1:
        shared(ranges, len(hubs))


def _check_merged(found: Resolved) -> None:
    job, strategy, text = found.job, found.strategy, found.job.strategy.merge
    fewest, members = int(getattr(merging.parse(text), "fewest", 1)), job.first_members
    if members < fewest:
        raise ConfigError(
            f"strategy.merge = '{text}': it needs at least {fewest} members, the job has {members}",
            f"at least {fewest} members, or merge = 'mean'",
        )
    if strategy.is_synchronous or found.merge.sum_only:
        return
    from edgetrain.strategies.arrivals import ArrivalTerms

    pace = ArrivalTerms(job.fleet.members, found.local_steps, job.hub.longest_deadline_s)
    size, fewest = strategy.closing_rule(pace).size, max(_FEWEST_ROBUST, fewest)
    if size < fewest:
        raise ConfigError(
            f"strategy.merge = '{text}' and {strategy.spelled}: a round has {size} contributions, "
            f"and the rule compares at least {fewest}",
            f"fedbuff with M = {fewest} or more, or merge = 'mean'",
        )


# -- topologies -----------------------------------------------------------------------------------


def check_topology(found: Resolved) -> None:
    """ConfigError for a topology that a job may not have. Links are looked at if they are known."""
    name = found.job.fleet.topology
    if name == AUTO:
        return  # it takes a topology that is not refused
    if refused := why_not_topology(name, found):
        raise ConfigError(f"fleet.topology = '{name}': {refused[0]}", refused[1])


def why_not_topology(name: str, found: Resolved) -> Refusal | None:
    """What speaks against a topology in a job, and the way out; None: nothing does. `name`: as
    `fleet.topology` says it, or "hubs" (several), or "gateways"."""
    if name == "star":
        return None
    if refused := why_not_with(name, found):
        return refused
    if name == DIRECT and (refused := _why_not_direct(found)):
        return refused
    if name in ("hubs", DIRECT) and found.job.strategy.ranges < 2:
        what = "strategy.ranges = 1 leaves several reducers nothing to share"
        return what, "set strategy.ranges = 16"
    return None


def _why_not_direct(found: Resolved) -> Refusal | None:
    links, waits_s = found.links, found.job.hub.longest_deadline_s
    ways = [[link.up.mean_delay_ms for link in links], [link.down.mean_delay_ms for link in links]]
    trip_s = sum(max(way, default=0.0) for way in ways) / 1000
    if waits_s > trip_s:
        return None
    return (
        f"hub.deadline_s = {waits_s:g}, and a contribution takes {trip_s:g} s to another member: "
        "each reducer would close rounds with that of its own machine alone",
        f"a deadline of {2 * trip_s:g} or more, or topology = 'star'",
    )


def refuse_gateways(job: Job) -> None:
    """ConfigError for a job with gateways, where one machine plays all of the fleet, without sites
    that they could stand at."""
    if job.fleet.gateways and not job.fleet.sites:
        raise ConfigError(
            "fleet.gateways = true without sites: no gateway would stand anywhere",
            "say which members are at which site, as in sites = 'home-fixed: 0-3'",
        )
