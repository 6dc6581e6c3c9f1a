"""From a job to the hub that serves it: strategy, codecs, merge rule, masks, journal.

Needs no torch. Nothing is started here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgetrain import codecs, strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.journal import Fsync, Settings
from edgetrain.exchange.hub.protocol import Hub
from edgetrain.exchange.hub.terms import Policy, Terms
from edgetrain.exchange.masks import terms as secure
from edgetrain.exchange.messages import MAX_HEADER_BYTES
from edgetrain.jobs.job import Job
from edgetrain.jobs.privacy.promise import settle
from edgetrain.jobs.rules import _codecs, check, why_not_merged
from edgetrain.strategies import merging
from edgetrain.strategies.merging.private import PrivateMean
from edgetrain.strategies.merging.rule import RoundRule, SliceRule
from edgetrain.vectors.noise import Gaussian, Source, system
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
    if not strategy.has_local_steps and every != 1:
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
    check(job)
    return Hub(
        Terms.of_strategy(strategy, every, delay, "" if any_job else job.digest()),
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


def mask_terms_of(job: Job) -> secure.MaskTerms | None:
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
    return secure.MaskTerms(members, threshold, table.span)


def _masks(job: Job) -> Aggregator | None:
    """What adds up masked contributions; ConfigError for what would have to read them."""
    terms = mask_terms_of(job)
    if terms is None:
        return None
    if not codecs.parse(job.strategy.codec).verbatim:
        raise ConfigError(
            f"strategy.codec = '{job.strategy.codec}' and strategy.secure: masked numbers are as "
            "random as noise, and only whole vectors of fixed point numbers can be added under "
            "masks",
            "leave codec out (32 bits an element are sent), and compress replies with reply_codec",
        )
    if not merging.find(job.strategy.merge).sum_only:
        raise ConfigError(
            f"strategy.merge = '{job.strategy.merge}' and strategy.secure: the rule compares the "
            "contributions of single members, and the hub sees only their sum",
            "choose merge = 'mean', or do without secure",
        )
    secure.require()
    from edgetrain.exchange.masks.aggregator import Aggregator

    return Aggregator(terms)


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
    codec = codecs.parse(job.strategy.codec)
    refused = why_not_merged(job.strategy.merge, strategy, job.fleet.members, codec)
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
        keeps_late=strategy.keeps_late,
    )
