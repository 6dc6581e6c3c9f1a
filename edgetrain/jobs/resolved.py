"""What a job names, looked up once and handed on: strategy, codecs, devices, links, task.

`look_up` fills in what the [strategy] table names. Whether that goes together is checked in
`rules`, and `plan` adds the fleet and the task. Needs neither torch nor data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgetrain import codecs, extensions, strategies
from edgetrain.errors import ConfigError
from edgetrain.exchange.delay import (
    APART_SHARE,
    CHOSEN,
    CHOSEN_ALIKE,
    FIRST_WINDOW_BYTES,
    MAX_IN_FLIGHT,
    SHARE,
    SYNCED_SHARE,
    Delay,
)
from edgetrain.fleet.assignment import devices_of
from edgetrain.fleet.presence import Presence
from edgetrain.jobs.job import Job, StrategyTable
from edgetrain.strategies import Strategy, merging
from edgetrain.strategies.spelling import split
from edgetrain.vectors.ranges import shared

if TYPE_CHECKING:
    from edgetrain.codecs import Codec
    from edgetrain.exchange.hub.journal import JournalSettings
    from edgetrain.exchange.masks.terms import MaskTerms
    from edgetrain.fleet.devices import Device
    from edgetrain.fleet.networks import Fault, Profile, Site
    from edgetrain.jobs.pipeline import StagePlan
    from edgetrain.jobs.privacy.accounting import Promise
    from edgetrain.strategies.merging import RuleRow

SHORTEST = 16
"""A run has at least this many rounds where the job says neither how long they are nor the delay.
So one round, and a delay of one, fit into the share of a run that `exchange.hub.delay` allows."""


_BY_GRADIENT = ("sgd",)
"""Optimizers with which rounds as long as the delay were measured to be better than short ones:
their steps are as long as gradients are. With AdamW they are worse (docs/decisions/023)."""

_WITHOUT_VELOCITY = ("sgd", "adagrad", "adadelta", "rmsprop", "rprop", "asgd", "lbfgs")
"""Optimizers that carry nothing of a step on into the next ones, unless `momentum` says so."""

_SAMPLES = 8
"""In a step. With fewer, members with equal data ended up to 12 points below FedAvg where a round
and the delay were an eighth of the run; with so many, 4 at most (docs/decisions/004)."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A job, and the objects that it names.

    Hubs and members know what `rules.resolve` finds; `plan.check` adds the fleet, `plan.plan` the
    task. What has not been looked up is empty.
    """

    job: Job
    """Planned, its noise is known and its name is not empty."""
    strategy: Strategy
    local_steps: int
    """Local steps in a round: the job's, or one of as many parts of it as there are ranges; or the
    strategy's default, less in a short run whose delay is measured."""
    delay: Delay
    codec: Codec
    """Codec of contributions; not bound to tensors yet."""
    reply_codec: Codec
    merge: RuleRow
    mask_terms: MaskTerms | None
    """How contributions are masked; None: they are not."""

    devices: tuple[str, ...] = ()
    """The device profile of each member."""
    device_profiles: dict[str, Device] = field(default_factory=dict)
    networks: tuple[str, ...] = ()
    """The network profile of each member."""
    network_profiles: dict[str, Profile] = field(default_factory=dict)
    hub_links: tuple[Profile, ...] = ()
    """The network profile of each hub's own link, the lead's first."""
    nat: tuple[int, ...] = ()
    """Members to which nobody can connect."""
    sites: tuple[Site, ...] = ()
    """Members that share an uplink."""
    faults: tuple[Fault, ...] = ()
    """Faults of the links, and their times."""
    congestion: str = ""
    """The congestion control of all links."""
    presence: Presence = field(default_factory=Presence)
    """Presence of the devices."""

    name: str = ""
    """The task's."""
    metric: str = ""
    better: str = ""
    target: float | None = None
    beside: Path | None = None
    """The folder of the job file."""
    promise: Promise | None = None
    """The job's planned privacy promise."""
    samples: tuple[int, ...] = ()
    """How many each member holds, where the job's privacy depends on it; else ()."""
    buffers: str | None = None
    """What becomes of running statistics, "mean" or "local"; None: the model measures none."""
    parameters: int = 0
    """Number of trained parameters in the model, tied ones once."""
    stages: StagePlan | None = None
    """How members share the model, once that is planned; None: each holds all of it."""
    topology_choice: str = ""
    """The choice of `fleet.topology = "auto"`, with its reason; "": the job names a topology."""

    @property
    def hubs(self) -> int:
        """Hubs that have a machine of their own."""
        return max(1, len(self.job.hub.hubs))

    @property
    def gateways(self) -> int:
        """Gateways that one machine plays: one at each site of a job that has any."""
        return len(self.sites) if self.job.fleet.gateways else 0

    @property
    def all_hub_links(self) -> tuple[Profile, ...]:
        """The network profile of each hub's own link, and behind them of each gateway's within its
        site, which is as good as none."""
        from edgetrain.fleet.networks.profile import BARE  # of a job whose links are known

        return (*self.hub_links, *[BARE] * self.gateways)

    @property
    def all_sites(self) -> tuple[Site, ...]:
        if not self.gateways:
            return self.sites
        first = len(self.hub_links)
        return tuple(replace(site, hubs=(first + i,)) for i, site in enumerate(self.sites))

    def gateway_of(self, member: int) -> int | None:
        """The number, in `all_hub_links`, of the gateway that a member joins; None: a hub."""
        sites = [i for i, site in enumerate(self.sites) if member in site.members]
        return len(self.hub_links) + sites[0] if self.gateways and sites else None

    def is_off_at_first(self, member: int) -> bool:
        """Whether a simulation, whose training begins without some, begins without this member."""
        return self.job.hub.min_members > 0 and self.presence.is_off_at_first(member)

    def reducers_in_words(self, site: int = 0) -> str:
        """Who adds up what, for people; "": one hub adds up everything. `site`: the members of the
        gateway that says so."""
        if site:
            return f"this gateway: {site} members; the hub above: the sums of sites"
        if self.hubs > 1:
            stretches = shared(self.job.strategy.ranges, self.hubs)
            return "; ".join(f"hub {i + 1}: {each}" for i, each in enumerate(stretches))
        counts = [len(each.members) for each in self.sites] if self.gateways else []
        inner = "; ".join(f"gateway {i}: {count} members" for i, count in enumerate(counts))
        outside = self.job.fleet.members - sum(counts)
        alone = f" and of {outside} members" if counts and outside else ""
        above = f"the hub: the sums of sites{alone}" if self.job.fleet.gateways else ""
        return "; ".join(filter(None, (above, inner)))

    def __setstate__(self, state: dict[str, object]) -> None:
        """In another process, what the job names of a user's own is loaded there, too."""
        self.__dict__.update(state)
        look_beside(self.beside)
        load_own_of(self.job)

    @property
    def links(self) -> list[Profile]:
        return [self.network_profiles[name] for name in self.networks]

    @property
    def quick_bytes(self) -> float:
        """Bytes that TCP sends at once after a pause, as all of these links say; inf: it keeps its
        windows."""
        ways = [way for link in self.links for way in (link.up, link.down)]
        if ways and not any(way.slow_start_after_idle for way in ways):
            return math.inf
        from edgetrain.fleet.networks.links.window import MSS  # of a job whose links are known

        firsts = [way.first_window * MSS or FIRST_WINDOW_BYTES for way in ways]
        return min(firsts, default=FIRST_WINDOW_BYTES)

    @property
    def rounds(self) -> int:
        """Contributions that each member makes, at most; 0: the length of the run is not known."""
        steps, ranges = self.job.train.steps, self.strategy.ranges
        if not steps:
            return 0
        from edgetrain.exchange.hub.delay import AgreedDelay  # the plan asks

        # A measured one may end with a final sync, or not.
        delays = self.delay, replace(self.delay, final_sync=0.0)
        return max(AgreedDelay(self.local_steps, d, steps, ranges).end_after(0) for d in delays)


_place: tuple[Path | None, Path | None] = None, None
"""Where this process looks for what jobs spell as `module:object`: see `look_beside`."""


def look_beside(beside: Path | None, keys: Path | None = None) -> None:
    """From now on jobs' own code is found in the folder `beside`, that of the job file, and in the
    bundles that `keys`, the folder of this machine's keys, allows (None: the usual one)."""
    global _place
    _place = beside, keys


def load_own(*names: str) -> None:
    """Import what these spell as `module:object`. ConfigError."""
    for text in names:
        extensions.load(text, _place[0], _bundle_at)


def load_own_of(job: Job) -> None:
    """Import what the job names of a user's own, in whatever process. ConfigError."""
    table, fleet = job.strategy, job.fleet
    load_own(table.name, table.merge, table.outer, table.sampling, job.train.schedule, fleet.device,
             fleet.network, fleet.hub_network, str(job.data.get("partition", "")))  # fmt: skip
    for text in (table.codec, table.reply_codec):
        codecs.load_own(text, _place[0], _bundle_at)


def _bundle_at(spec: str) -> Path:
    from edgetrain.exchange.keys.pairs import keys_folder
    from edgetrain.jobs import bundles
    from edgetrain.jobs.reading import placed

    bundle, (beside, keys) = bundles.named(f"{spec}#"), _place
    assert bundle is not None
    allowed = bundles.Allowed(keys_folder(keys))
    return bundles.opened(placed(bundle.path, beside), allowed, bundle.pin)


def look_up(job: Job) -> Resolved:
    """The objects that a job names. ConfigError for a name or an argument that does not exist, and
    for a user's own that is not what it says (`edgetrain.testing`)."""
    load_own_of(job)
    table = job.strategy
    strategy, merge = strategy_of(table), merging.find(table.merge)
    if table.weighting:
        strategy = replace(strategy, weighted=table.weighting != "alike")
    if job.privacy.unit == "member" or strategy.outer or not merge.sum_only:
        # A reply is not the mean of the members' own contributions.
        strategy = strategy.without_choice()
    codec = codecs.parse(table.codec)
    delay = _delay_of(job, strategy)
    local_steps = table.local_steps or strategy.local_steps
    ranges = strategy.ranges
    if local_steps % ranges and table.local_steps:
        raise ConfigError(
            f"strategy.local_steps = {local_steps}: {strategy.spelled} begins a round of the next "
            f"fragment every {local_steps}/{ranges} steps",
            f"take a multiple of {ranges}, as {-(-local_steps // ranges) * ranges}",
        )
    local_steps = -(-local_steps // ranges)
    if delay.is_measured and job.train.steps and not table.local_steps:
        local_steps = min(local_steps, max(1, job.train.steps // SHORTEST))
    _check_own(job, strategy, codec)
    return Resolved(
        job=job,
        strategy=strategy,
        local_steps=local_steps,
        delay=delay,
        codec=codec,
        reply_codec=codecs.parse(table.reply_codec) if table.reply_codec else codec.for_replies(),
        merge=merge,
        mask_terms=mask_terms_of(job),
    )


def _check_own(job: Job, strategy: Strategy, codec: Codec) -> None:
    """ConfigError for the first law that something of a user's own does not keep."""
    spelled = strategy.name, strategy.outer, job.strategy.merge, codec.name
    own = [extensions.is_own(split(text)[0]) for text in spelled]
    if not any(own):
        return
    from edgetrain import testing

    if own[0] or own[1]:
        testing.check_strategy(strategy)
    if own[2]:
        testing.check_merge_rule(job.strategy.merge)
    if own[3]:
        testing.check_codec(codec)


def _delay_of(job: Job, strategy: Strategy) -> Delay:
    """The job's delay. Rounds get as long as a measured one where the job does not say how long
    they are, with an optimizer whose steps follow the size of gradients."""
    steps = job.strategy.delay if strategy.delays else 0
    final_sync = _final_sync_of(job, strategy)
    if isinstance(steps, int):
        return Delay(steps, final_sync=final_sync)
    if not strategy.is_synchronous:  # no reply to every round, whose trip could be measured
        return Delay(MAX_IN_FLIGHT * (job.strategy.local_steps or strategy.local_steps))
    by_gradient = str(job.train.optimizer.get("name", "")).lower() in _BY_GRADIENT
    syncs = final_sync != 0 and not _has_equal_data(job) and _has_samples(job)
    # Samples drawn from the same, and enough of them in a step, lead members the same way.
    together = _has_equal_data(job) and _has_samples(job)
    is_free = by_gradient and not job.strategy.local_steps
    share = SHARE if together else SYNCED_SHARE if syncs else APART_SHARE
    one_in_flight = strategy.wants_one_in_flight(together) and is_free
    return Delay(0, True, share, one_in_flight, final_sync, syncs and is_free)


def _final_sync_of(job: Job, strategy: Strategy) -> float:
    """The share of the steps that the job's final sync takes. Chosen: only where data may be
    unequal, or a delay meets an optimizer with a velocity, which carries members past the mean."""
    share = job.strategy.final_sync
    if isinstance(share, float) or job.strategy.head_steps:
        return share if isinstance(share, float) else 0.0
    syncs = strategy.has_local_steps and strategy.is_synchronous and strategy.ranges == 1
    if syncs and not _has_equal_data(job):
        return CHOSEN
    return CHOSEN_ALIKE if syncs and strategy.delays and _has_velocity(job) else 0.0


def _has_velocity(job: Job) -> bool:
    optimizer = job.train.optimizer
    has_own = str(optimizer.get("name", "")).lower() not in _WITHOUT_VELOCITY
    return has_own or bool(optimizer.get("momentum", 0))


def _has_samples(job: Job) -> bool:
    return job.train.batch * job.train.accumulate >= _SAMPLES


def _has_equal_data(job: Job) -> bool:
    """Whether members' samples are known to be drawn from the same. A task of one's own may read
    any files, unless its `partition` says so."""
    own_files = not job.task.startswith("edgetrain.tasks:")
    partition = job.data.get("partition", None if own_files else "iid")
    return str(partition).startswith(("iid", "sizes(", "shared("))


def with_all_members(job: Job) -> Job:
    """One device per member: a device list with counts also says how many members there are."""
    named = devices_of(job.fleet.device)
    if len(named) > 1:
        job = replace(job, fleet=replace(job.fleet, members=len(named)))
    return job


def strategy_of(table: StrategyTable) -> Strategy:
    """The strategy that a [strategy] table names, with its correction and outer rule, which the
    name may have as well. ConfigError."""
    found = given = strategies.find(table.name)
    row = strategies.row_of(found.name)
    for key, change in (("correction", Strategy.corrected), ("outer", Strategy.stepped)):
        text = getattr(table, key)
        if not text:
            continue
        given = change(given, text)
        if getattr(found, key) not in (getattr(row, key), getattr(given, key)):
            raise ConfigError(
                f"strategy.name = '{table.name}' and strategy.{key} = '{text}'", "say one of them"
            )
    return given


def journal_settings(job: Job) -> JournalSettings:
    from edgetrain.exchange.hub.journal import Fsync, JournalSettings  # members have no journal

    stop = job.hub.on_disk_full == "stop"
    return JournalSettings(Fsync.parse(job.hub.fsync), stop, job.hub.snapshot_every)


def mask_terms_of(job: Job) -> MaskTerms | None:
    """How the job's contributions are masked; None: they are not."""
    table = job.strategy
    if not table.secure:
        return None
    members = job.cohort.size if job.cohort else job.fleet.members
    from edgetrain.exchange.masks.terms import MaskTerms, default_threshold

    return MaskTerms(members, table.threshold or default_threshold(members), table.clip_range)
