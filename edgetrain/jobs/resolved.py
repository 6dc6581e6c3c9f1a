"""What a job's [strategy] table names, looked up once: the strategy, codecs, merge rule and masks.

Whether they go together is checked in `rules`. Needs neither torch nor data.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgetrain import codecs, strategies
from edgetrain.codecs import Codec
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.delay import APART_SHARE, SHARE
from edgetrain.exchange.hub.journal import Fsync, Settings
from edgetrain.exchange.masks.terms import MaskTerms, default_threshold
from edgetrain.jobs.job import Job, StrategyTable
from edgetrain.strategies import Strategy, merging
from edgetrain.strategies.merging import RuleRow

SHORTEST = 16
"""A run has at least this many rounds where the job says neither how long they are nor the delay.
So one round, and a delay of one, fit into the share of a run that `exchange.hub.delay` allows."""


_BY_GRADIENT = ("sgd",)
"""Optimizers with which rounds as long as the delay were measured to be better than short ones:
their steps are as long as gradients are. With AdamW they are worse (docs/decisions/023)."""

_SAMPLES = 8
"""In a step. With fewer, members with equal data ended up to 12 points below FedAvg where a round
and the delay were an eighth of the run; with so many, 4 at most (docs/decisions/004)."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A job, and the objects that its [strategy] table names. `rules.resolve` makes it."""

    job: Job
    strategy: Strategy
    every: int
    """Local steps in a round: the job's; or the strategy's default, less in a short run whose delay
    is measured."""
    delay: int | None
    """Local steps that a reply may take; None: measured. 0 where the strategy has no delay."""
    codec: Codec
    """Of contributions; not bound to tensors yet."""
    reply_codec: Codec
    merge: RuleRow
    mask_terms: MaskTerms | None
    """How contributions are masked; None: they are not."""

    @property
    def one_in_flight(self) -> bool:
        """Whether rounds become as long as a measured delay. The job's `every` is kept, and the
        default with optimizers whose steps do not follow the size of gradients."""
        by_gradient = str(self.job.train.optimizer.get("name", "")).lower() in _BY_GRADIENT
        return self.strategy.wants_one_in_flight and by_gradient and not self.job.strategy.every

    @property
    def keeps_together(self) -> bool:
        """Whether members' steps lead the same way: their samples are known to be drawn from the
        same, and enough of them are in a step. A task of one's own may read any files, unless its
        `partition` says so."""
        own_files = not self.job.task.startswith("edgetrain.tasks:")
        partition = self.job.data.get("partition", None if own_files else "iid")
        is_equal = partition == "iid" or str(partition).startswith("shared(")
        return is_equal and self.job.train.batch * self.job.train.accumulate >= _SAMPLES

    @property
    def share(self) -> int:
        """An automatic delay and a round together are at most one in so many of the steps."""
        return SHARE if self.keeps_together else APART_SHARE

    @property
    def rounds(self) -> int:
        """Contributions that each member makes, at most."""
        return -(-self.job.train.steps // self.every)


def look_up(job: Job) -> Resolved:
    """The objects that a job names. ConfigError for a name or an argument that does not exist."""
    table = job.strategy
    strategy = strategy_of(table)
    codec = codecs.parse(table.codec)
    delay = table.fixed_delay if strategy.delays else 0
    every = strategy.every
    if delay is None and job.train.steps:
        every = min(every, max(1, job.train.steps // SHORTEST))
    return Resolved(
        job=job,
        strategy=strategy,
        every=table.every or every,
        delay=delay,
        codec=codec,
        reply_codec=codecs.parse(table.reply_codec) if table.reply_codec else codec.for_replies(),
        merge=merging.find(table.merge),
        mask_terms=mask_terms_of(job),
    )


def strategy_of(table: StrategyTable) -> Strategy:
    """The strategy that a [strategy] table names, with its correction. ConfigError."""
    found = strategies.find(table.name)
    if not table.correction:
        return found
    if found.spelled != found.name and found.correction not in ("", table.correction):
        raise ConfigError(
            f"strategy.name = '{table.name}' and strategy.correction = '{table.correction}'",
            "say one of them",
        )
    return found.corrected(table.correction)


def journal_settings(job: Job) -> Settings:
    """How the job's journal is kept; ConfigError."""
    if job.hub.when_full not in ("stop", "go on"):
        raise ConfigError(f"hub.when_full = '{job.hub.when_full}'", "allowed are 'stop', 'go on'")
    stop = job.hub.when_full == "stop"
    return Settings(Fsync.parse(job.hub.fsync), stop, job.hub.snapshot_every)


def mask_terms_of(job: Job) -> MaskTerms | None:
    """How the job's contributions are masked; None: they are not."""
    table, members = job.strategy, job.fleet.members
    if not table.secure:
        return None
    return MaskTerms(members, table.threshold or default_threshold(members), table.span)
