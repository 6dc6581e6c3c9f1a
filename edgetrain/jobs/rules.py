"""What does not go together in a job, and why: every such rule stands here.

A rule asks codecs, strategies and merge rules for their properties, and refuses with a way out.
Nothing is built: a job can be checked without a hub.
"""

from __future__ import annotations

from edgetrain import codecs
from edgetrain.errors import ConfigError, refuse_first, require
from edgetrain.exchange.addresses import split_address
from edgetrain.jobs.fallback import quorum_of, steps_in
from edgetrain.jobs.job import (
    AUTO,
    DIRECT,
    Fleet,
    Job,
    ServersTable,
)
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
    _check_weights(found)
    if (table := found.job.strategy).cohort or table.cohort_extra or table.sampling != "uniform":
        from edgetrain.jobs.cohorts import check_cohort  # of a job that says so

        check_cohort(found)
    _check_pace(found)
    check_pairs(found)
    _check_head_steps(found)
    _check_accumulated(found)
    if found.job.train.schedule:
        from edgetrain.jobs import schedule

        schedule.parse(found.job.train.schedule, found.job.train.steps)
    _check_codecs(found)
    _check_ranges(found)
    _check_masked(found)
    journal_settings(found.job)
    check_on_member(found)
    _check_merged(found)
    _check_out_of_step(found)
    _check_dealt(found)
    check_topology(found)
    check_group_beside(found.job)
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


def _check_weights(found: Resolved) -> None:
    job, shares, weighting = found.job, found.job.servers.shares, found.job.strategy.weighting
    members = job.fleet.members
    refuse_first(
        (shares > 1 and not has_group(job), f"servers.shares = {shares}, and no member is a group",
         "name it, as in fleet.device = 'raspberry-pi-4b:6, servers'"),
        (shares > members, f"servers.shares = {shares}: the job has only {members} members",
         f"allowed are 1 to {members}"),
        (weighting and not found.strategy.is_synchronous, f"strategy.weighting = '{weighting}': "
         f"{found.strategy.name} says itself what a contribution counts for",
         "leave it out, or choose dga or fedavg"),
    )  # fmt: skip


def check_group_beside(job: Job) -> None:
    """ConfigError for what a group that is one member of the fleet cannot have."""
    servers = job.servers
    if not has_group(job):
        return
    from edgetrain.jobs.placement.words import EDGE, parse

    what = f"fleet.device = '{job.fleet.device}'"
    if servers.placement in ("auto", EDGE):
        table = "the job has no [servers]" if servers == ServersTable() else (
            f"servers.placement = '{servers.placement}' does not say how many processes it is"
        )  # fmt: skip
        raise ConfigError(f"{what}, and {table}", "as in [servers] placement = 'data=2'")
    data, shares = parse(servers.placement).data, servers.shares
    if not _divide(data, shares, job.train.batch):
        near = max(d for d in range(1, data) if _divide(d, shares, job.train.batch))
        raise ConfigError(
            f"servers.placement: data={data} ranks have {shares} "
            f"{'batch' if shares == 1 else 'batches'} of train.batch = {job.train.batch} samples "
            "in a step, and cannot have equal parts of them",
            f"data={near}",
        )
    refused = (
        (servers.cluster, "servers.cluster: ranks of a member run on its own machine yet"),
        (servers.fallback != "never", f"servers.fallback = '{servers.fallback}': it is there"),
        (job.privacy.unit == "example", "privacy.unit = 'example': a group clips no examples"),
    )
    refuse_first(
        *((holds, f"{what}, and {why}", "leave one of both out") for holds, why in refused)
    )


def _divide(data: int, shares: int, batch: int) -> bool:
    """Whether data ranks have whole batches of as many shares, or equal parts of one."""
    return shares % data == 0 or (data % shares == 0 and batch % (data // shares) == 0)


def _check_accumulated(found: Resolved) -> None:
    if found.job.train.accumulate > 1 and found.job.privacy.unit == "example":
        raise ConfigError(
            f"train.accumulate = {found.job.train.accumulate} with privacy.unit = 'example'",
            "raise train.batch: examples are taken a few at a time already, whatever it is",
        )


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


def _check_pace(found: Resolved) -> None:
    strategy, job = found.strategy, found.job
    final_sync, delay = job.strategy.final_sync, job.strategy.delay
    syncs, spelled = final_sync not in (0, AUTO), f"strategy.final_sync = {_shown(final_sync)}"
    refuse_first(
        (not strategy.has_local_steps and found.local_steps != 1,
         f"strategy.local_steps = {found.local_steps}: {strategy.name} exchanges gradients at "
         "every step", "leave it out, or choose local-sgd"),
        (job.hub.quorum > job.fleet.members,
         f"hub.quorum = {job.hub.quorum}: the job has only {job.fleet.members} members", ""),
    )  # fmt: skip
    _check_start(found)
    _check_replica(found)
    refuse_first(
        (not strategy.delays and delay not in (0, AUTO),
         f"strategy.delay = {delay}: {strategy.name} waits for every reply",
         "leave it out, or choose dga"),
        (syncs and not strategy.has_local_steps, f"{spelled}: {strategy.name} waits for every "
         "reply at every step, to the end", "leave it out, or choose dga or fedavg"),
        (syncs and strategy.ranges > 1, f"{spelled}: {strategy.spelled} exchanges a fragment at a "
         "time, and rounds of all at the end are not built",
         "leave it out, or choose dga or fedavg"),
    )  # fmt: skip


def _check_head_steps(found: Resolved) -> None:
    table, strategy = found.job.strategy, found.strategy
    if not (steps := table.head_steps):
        return
    spelled, way_out = f"strategy.head_steps = {steps}", "choose fedavg or local-sgd"
    refuse_first(
        (not table.personal, f"{spelled} without strategy.personal: members have no layers of "
         "their own", "say which, as in personal = 'head.*'"),
        (steps >= found.local_steps,
         f"{spelled} in rounds of {found.local_steps} steps: none is left for what members share",
         f"head_steps = {found.local_steps - 1} or less, or more strategy.local_steps"),
        (strategy.delays or not strategy.is_synchronous,
         f"{spelled} and {strategy.spelled}: the length "
         "of its rounds may change", way_out),
        (strategy.adjusts_gradient, f"{spelled} and {strategy.spelled}: it adds to the gradient of "
         "what members share in every step", way_out),
        (table.final_sync not in (0, AUTO), f"{spelled} and strategy.final_sync = "
         f"{_shown(table.final_sync)}: the last rounds are shorter", "leave final_sync out"),
    )  # fmt: skip


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _check_start(found: Resolved) -> None:
    job, few = found.job, found.job.hub.min_members
    least = found.mask_terms.threshold if found.mask_terms else 0
    refuse_first(
        (few > job.fleet.members,
         f"hub.min_members = {few}: the job has only {job.fleet.members} members",
         "leave it out: 0 begins with all of them"),
        *((0 < few < fewest, f"hub.min_members = {few} and {key} = {fewest}: rounds could not "
           "close until more have come", f"say hub.min_members={fewest} or more")
          for key, fewest in (("hub.quorum", quorum_of(job)), ("strategy.threshold", least))),
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


def _check_codecs(found: Resolved) -> None:
    """Codecs made for gradients. Momentum belongs to the gradients of the members."""
    strategy, codec, reply_codec = found.strategy, found.codec, found.reply_codec
    momentum, named = found.job.train.optimizer.get("momentum"), f"strategy.codec = '{codec.name}'"
    _check_auto(found)
    instead = f"take '{codec.for_displacements().name}', or sync-sgd"
    refuse_first(
        *((strategy.has_variates and each.few_elements, f"strategy.{key} = '{each.name}': "
           f"{strategy.spelled} compares contributions with replies, and elements that are left "
           "out would count as gradients of zero", "take int8, or fedavg")
          for key, each in (("codec", codec), ("reply_codec", reply_codec))),
        (codec.gradients_only and strategy.moves_params and not codec.two_trips,
         f"{named}: {strategy.name} sends displacements, which have the optimizer's momentum in "
         "them", instead),
        (codec.momentum and momentum, f"train.optimizer.momentum = {momentum} and the codec "
         f"'{codec.name}' would count momentum twice",
         "say optimizer.momentum=0: the codec has it, where it can be corrected"),
        (codec.two_trips and strategy.moves_params, f"{named}: two trips a step are for gradients",
         instead),
        (codec.two_trips != reply_codec.two_trips,
         f"strategy.reply_codec = '{reply_codec.name}', {named}",
         "both trips of powersgd go both ways: leave reply_codec out"),
        (reply_codec.momentum, f"strategy.reply_codec = '{reply_codec.name}': members have their "
         "momentum already", f"take '{reply_codec.for_replies().name}'"),
    )  # fmt: skip


def _check_auto(found: Resolved) -> None:
    """A codec that follows what links carry while a round is computed."""
    strategy, codec, reply_codec = found.strategy, found.codec, found.reply_codec
    is_auto = codec.adapts
    refuse_first(
        (codec != reply_codec and (is_auto or reply_codec.adapts),
         f"strategy.codec = '{codec.name}', strategy.reply_codec = '{reply_codec.name}': members "
         "encode as the last reply was encoded", "leave reply_codec out, or name two codecs"),
        (is_auto and not strategy.has_local_steps, f"strategy.codec = '{codec.name}': "
         f"{strategy.name} waits for each message at each step, so there is no time in which a "
         "denser one would cost nothing",
         "choose dga, fedavg or local-sgd, or a codec: topk(0.01) | q2"),
    )  # fmt: skip


def _check_masked(found: Resolved) -> None:
    check_mask_terms(found)
    if found.mask_terms is None:
        return
    table = found.job.strategy
    refuse_first(
        (found.job.hub.deadline_s == AUTO, "hub.deadline_s = 'auto' and strategy.secure: a masked "
         "contribution that comes late counts in no round",
         "say how many seconds a round waits: hub.deadline_s = 60"),
        (not found.codec.verbatim, f"strategy.codec = '{table.codec}' and strategy.secure: masked "
         "numbers are as random as noise, and only whole vectors of fixed point numbers can be "
         "added under masks",
         "leave codec out (32 bits an element are sent), and compress replies with reply_codec"),
    )  # fmt: skip
    require("strategy.secure = true, on the hub and on every member,", "private", "cryptography")


def _check_merged(found: Resolved) -> None:
    text = found.job.strategy.merge
    fewest, members = int(getattr(merging.parse(text), "fewest", 1)), found.job.first_members
    if members < fewest:
        raise ConfigError(
            f"strategy.merge = '{text}': it needs at least {fewest} members, the job has {members}"
        )


def _check_out_of_step(found: Resolved) -> None:
    """What needs rounds that have one contribution of each member."""
    strategy, job = found.strategy, found.job
    if strategy.is_synchronous:
        return
    final_sync, spelled = job.strategy.final_sync, strategy.spelled
    refuse_first(
        (final_sync not in (0, AUTO), f"strategy.final_sync = {_shown(final_sync)} and {spelled}: "
         "members come to the end at different times", "leave it out, or choose dga or fedavg"),
        (job.hub.quorum > 1, f"hub.quorum = {job.hub.quorum} and {spelled}: the strategy says how "
         "many contributions make a reply", "leave quorum out, or choose dga or fedavg"),
        (job.hub.deadline_s == AUTO, f"hub.deadline_s = 'auto' and {spelled}: no member is late "
         "where each goes at its own pace", "say seconds, or leave it out"),
    )  # fmt: skip
    from edgetrain.strategies.arrivals import ArrivalTerms

    members = job.fleet.members
    pace = ArrivalTerms(members, found.local_steps, job.hub.longest_deadline_s)
    rule = strategy.closing_rule(pace)
    for parameter, value in zip(strategy.parameters, strategy.arguments, strict=True):
        if parameter.most_members and value > job.first_members:
            raise ConfigError(
                f"{strategy.spelled} with {job.first_members} members: a round would wait for more "
                "than there are",
                f"{parameter.name} = {job.first_members}, or less",
            )
    refuse_first(
        (job.privacy.unit == "member", f"privacy.unit = 'member' and {strategy.spelled}: how much "
         "a member counts depends on when its contributions arrive, and epsilon would, too",
         "choose dga or local-sgd, or unit = 'example'"),
        (found.codec.adapts, f"strategy.codec = '{found.codec.name}' and "
         f"{strategy.spelled}: its rung follows the trips of rounds that all members share",
         "name a codec: fp16, int8, topk(0.01) | q2"),
    )  # fmt: skip
    fewest = max(_FEWEST_ROBUST, int(getattr(merging.parse(job.strategy.merge), "fewest", 1)))
    if not found.merge.sum_only and rule.size < fewest:
        raise ConfigError(
            f"strategy.merge = '{job.strategy.merge}' and {strategy.spelled}: a round has "
            f"{rule.size} contributions, and the rule compares at least {fewest}",
            f"fedbuff with M = {fewest} or more, or merge = 'mean'",
        )


def _check_dealt(found: Resolved) -> None:
    strategy, job = found.strategy, found.job
    if not strategy.deals:
        return
    table, partition = job.strategy, str(job.data.get("partition", "iid"))
    name = strategy.name
    refuse_first(
        (not partition.startswith("shared("), f"data.partition = '{partition}' and {name}: slices "
         "are of a batch that all members hold", "say partition = 'shared(all)'"),
        (not (found.codec.verbatim and found.reply_codec.verbatim),
         f"strategy.codec = '{found.codec.name}', reply_codec = '{found.reply_codec.name}' and "
         f"{name}: differences of gradients make the history, and a codec's rounding would be in "
         "them", "leave codec and reply_codec out (fp32)"),
        (job.privacy.unit != "none", f"privacy.unit = '{job.privacy.unit}' and {name}: a search "
         "looks at the same data again and again, and epsilon does not count that",
         "choose dga or local-sgd"),
        (table.weighting,
         f"strategy.weighting = '{table.weighting}' and {name}: slices count by their "
         "samples", "leave it out"),
        (job.hub.quorum > 1, f"hub.quorum = {job.hub.quorum} and {name}: a round has every slice, "
         "whoever computes it", "leave it out"),
        (job.train.accumulate > 1, f"train.accumulate = {job.train.accumulate} and {name}: a "
         "slice is computed train.batch samples at a time", "leave it out"),
        *((getattr(job.train, key), f"train.{key} = {getattr(job.train, key)!r} and {name}: the "
           "hub's search says how long a step is, and members' optimizers take none",
           "leave it out") for key in ("clip", "schedule", "lr_reference_batch")),
    )  # fmt: skip


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
        what = "strategy.ranges = 1, and reducers share ranges of the vector"
        return what, "strategy.ranges = 16"
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
