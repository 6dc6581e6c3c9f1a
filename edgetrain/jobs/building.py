"""From a job whose names have been looked up to the hub that serves it.

Needs no torch. Nothing is started here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edgetrain.codecs import Codec
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import CHOSEN
from edgetrain.exchange.hub.protocol import Hub, HubPart
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.messages import MAX_ELEMENTS, MAX_HEADER_BYTES
from edgetrain.jobs.fallback import NAME, quorum_of, steps_in
from edgetrain.jobs.job import AUTO, COLLECTIVES, DIRECT, Job
from edgetrain.jobs.resolved import Resolved
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.parts import BASE_PART_ELEMENTS
from edgetrain.vectors.ranges import Stretch, shared

if TYPE_CHECKING:
    from edgetrain.strategies.lbfgs import Lbfgs
    from edgetrain.strategies.outer_rules import OuterRule
    from edgetrain.vectors.noise import Source


def hub_of(
    found: Resolved,
    *,
    any_job: bool = False,
    source: Source | None = None,
    most_elements: int = MAX_ELEMENTS,
    quick_bytes: float | None = None,
    site: int = 0,
    number: int | None = 0,
    part: HubPart | None = None,
) -> Hub:
    """A fresh hub of a job, as `rules.resolve` found it: the one with this number, if there are
    several (`hub.hubs`); None: one that has no ranges yet.

    With `any_job` it admits members whatever job they run. `source` is what noise is made of, if
    the hub adds it; None: the system's. `most_elements`: of the largest model, where the job says
    none.
    `quick_bytes`: see `Delay`; None: as the job's network profiles say. `site`: of the gateway of
    a site with this many members. `part`: where the job has none. ConfigError if its
    noise cannot be worked out.
    """
    job = found.job
    masks = None
    if found.mask_terms is not None:
        from edgetrain.exchange.masks.aggregator import Aggregator

        masks = Aggregator(found.mask_terms)
    terms = _terms(found, any_job, quick_bytes, number)
    terms = replace(terms, gateways=job.fleet.gateways and not site)
    codecs, strategy = (found.codec, found.reply_codec), found.strategy
    outer: OuterRule | Lbfgs | None = strategy.outer_rule()
    # A part is loaded by the jobs that have it.
    if strategy.deals:
        from edgetrain.exchange.hub.dealing import DealingPart

        slices, copies = strategy.argument("slices"), strategy.argument("copies")
        terms = replace(terms, steps=job.train.steps)  # which are its rounds, whoever may join
        outer, stretches = strategy.search(), shared(job.strategy.ranges, found.hubs)
        part = DealingPart(outer, slices * job.fleet.members, copies, stretches)
    elif job.fleet.topology == DIRECT:
        from edgetrain.exchange.hub.direct import DirectPart, share_out

        part = DirectPart(partial(share_out, ranges=job.strategy.ranges))
    elif job.fleet.topology in COLLECTIVES:
        from edgetrain.exchange.hub.collective import CollectivePart

        part = CollectivePart(job.fleet.topology, job.strategy.ranges)
    elif job.cohort is not None:
        from edgetrain.exchange.hub.drawing import CohortPart

        part = CohortPart(job.cohort, source)
    policy, merge = _policy(job, most_elements, site), _merge_rule(found, source)
    hub = Hub(terms, policy, merge, *codecs, masks, outer=outer)
    return hub if part is None else part.attach(hub)


def reducer_of(found: Resolved, first: int, end: int) -> Hub:
    """A hub of the ranges [first, end) of the vector, for a member to host. It waits for members
    that are lost as long as for those of a hub that comes back: its own member is one of them."""
    from edgetrain.exchange.hub.reducer import HostedPart

    job = found.job
    terms = replace(_terms(found), stretch=Stretch(job.strategy.ranges, first, end))
    policy = replace(_policy(job, MAX_ELEMENTS), empty_after_s=job.hub.rejoin_s, status_s=0.0)
    rules = _merge_rule(found, None), found.codec, found.reply_codec
    hub = Hub(terms, policy, *rules, outer=found.strategy.outer_rule())
    return HostedPart().attach(hub)


def _policy(job: Job, most_elements: int, site: int = 0) -> Policy:
    # A site's round has to be on its way while the hub above still waits for it.
    quorum, wait = (1, SITE_WAIT) if site else (quorum_of(job), 1.0)
    return Policy(
        site or job.fleet.members,
        quorum,
        wait * job.hub.longest_deadline_s,
        job.hub.lost_after_s,
        job.hub.heartbeat_s,
        job.hub.rejoin_s,
        job.hub.empty_after_s,
        int(250_000 * job.hub.max_model_mb) or most_elements,
        job.hub.status_s,
        job.hub.deadline_s == AUTO,
        job.fleet.members,
        0 if site else job.hub.min_members,
        job.hub.start_after_s,
        NAME if steps_in(job) else "",
    )


def _terms(
    found: Resolved, any_job: bool = False, quick_bytes: float | None = None, number: int | None = 0
) -> Terms:
    quick = found.quick_bytes if quick_bytes is None else quick_bytes
    job, delay = found.job, replace(found.delay, quick_bytes=quick)
    if any_job and job.strategy.final_sync == AUTO and "partition" not in job.data:
        final_sync = CHOSEN if found.strategy.has_local_steps else 0.0  # whose data are not known
        delay = replace(delay, final_sync=final_sync)
    hubs, ranges = len(job.hub.hubs) or 1, job.strategy.ranges
    stretch = Stretch(ranges, 0, 0) if number is None else shared(ranges, hubs)[number]
    return Terms(
        found.strategy, found.local_steps, delay, "" if any_job else job.digest(),
        0 if any_job else job.train.steps, stretch,
    )  # fmt: skip


LARGEST_PART_BYTES = 1 << 30
"""Of codecs whose parts are as large as the model, which a hub does not know before it listens."""


SITE_WAIT = 0.5
"""Share of `hub.deadline_s` that a gateway waits for late members of its site."""


def message_limit(codec: Codec, gateways: bool = False) -> int:
    """Bytes of the largest frame that a member has a reason to send, if contributions have this
    codec; with `gateways` also in full precision. A connection that announces a larger one is
    closed before anything is allocated for it."""
    try:
        largest, exact = codec.max_bytes(codec.part_elements), 4 * codec.part_elements
    except ConfigError:  # it depends on the shapes of the tensors
        largest = LARGEST_PART_BYTES
        exact = LARGEST_PART_BYTES
    return max(largest, exact if gateways else 0, 4 * BASE_PART_ELEMENTS, MAX_HEADER_BYTES)


def _merge_rule(found: Resolved, source: Source | None) -> SliceRule | RoundRule:
    table = found.job.privacy
    if table.unit != "member" or table.where != "hub":
        return found.strategy.merge_rule(found.job.strategy.merge)
    from edgetrain.jobs.privacy.promise import fix_noise
    from edgetrain.strategies.merging.private import PrivateMean
    from edgetrain.vectors.noise import Gaussian, system

    table, cohort = fix_noise(found).job.privacy, found.job.cohort
    lot = cohort.size if cohort is not None and cohort.is_secret else 0
    mechanism, keeps_late = Gaussian(table.clip, table.noise), found.strategy.keeps_late
    return PrivateMean(mechanism, source or system, keeps_late and not lot, lot)
