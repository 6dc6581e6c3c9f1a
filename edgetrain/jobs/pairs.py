"""Which choices of a job do not go together: it follows from the properties of each.

A choice has properties, and bars some: two choices are refused where one bars a property of the
other. What the user reads has the names of both, why, and the way out of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from edgetrain.errors import ConfigError
from edgetrain.jobs.fallback import steps_in
from edgetrain.jobs.job import AUTO, COLLECTIVES, DIRECT
from edgetrain.jobs.on_member import Refusal
from edgetrain.jobs.resolved import Resolved
from edgetrain.jobs.shares import has_group

WHY = {
    "hidden": "masks are removed from the sum of all members' whole vectors, at one hub",
    "compares": "the rule compares members, and has to see the whole contribution of each",
    "once": "the rule counts each member once, and the strategy weighs members",
    "cuts": "the hub has to see contributions, and cuts each to its length",
    "apart": "members are out of step, and have no rounds together",
    "fragments": "members exchange a fragment a round",
    "deals": "the hub hands out work, and sums slices of a batch",
    "few": "members begin together",
    "closed": "no member may join after the start, the optimizer's state is only in the members",
    "ranged": "a gateway has the whole vector",
    "several": "several hubs have a part of the vector each",
    "replica": "a replica stands in for one hub that has the whole vector",
    "sites": "a gateway adds up for its site, and is a member of one hub",
    "among": "members average among themselves, and no hub sees what they give",
    "group": "a group of servers joins one hub yet, and makes steps as any member",
    "private": "members' data are private, and more than contributions would leave them",
    "rated": "it scales the rate with the members, and ranks or stages are not members",
    "rounds": "the next member adds to what one has rounded",
    "coded": "what is added up there has to be whole, and not rounded",
    "recoded": "what is sent back there has to be whole, and not rounded",
    "bound": "its payloads mean something at one hub only",
    "zeros": "the middle of mostly zeros is zero, and the codec sends a few elements of each",
    "lengths": "a gradient is cut by its whole length, which members do not have in common",
    "local": "stages make one step together, as in sync-sgd",
    "drawn": "each of its rounds has all members, or a cohort is not built for it yet",
    "staged": "no contributions are exchanged, and the hub passes activations on",
    "partial": "elements that are left out would count as gradients of zero",
    "moves": "the codec is for gradients, and the strategy sends displacements",
    "momentum": "momentum would count twice",
    "follows": "it follows rounds that all members share, whenever they end",
    "counted": "the strategy says how many contributions make a round",
    "weighed": "the strategy says itself what a contribution counts for",
    "evenly": "how much a member counts depends on when its contributions arrive, as would epsilon",
    "stepwise": "it exchanges gradients at every step, and waits for each reply",
    "waits": "it waits for every reply",
    "varied": "the length of its rounds may change",
    "adjusts": "it adds to the gradient of what members share in every step",
    "small": "samples are taken a few at a time already",
    "stepped": "the hub's search says how long a step is",
}
"""By property: why a choice that bars it cannot be with one that has it."""

_ONE_HUB = frozenset(
    {"hidden", "compares", "cuts", "apart", "fragments", "few", "group", "staged", "drawn"}
)
_AMONG = _ONE_HUB | {"deals", "several", "replica", "sites"}
_BARRED = {
    "hubs": _ONE_HUB | {"replica", "sites"},
    "gateways": _ONE_HUB | {"deals", "ranged", "replica", "bound"},
    DIRECT: _AMONG,
    **dict.fromkeys(COLLECTIVES, _AMONG | {"rounds"}),
}
"""By topology, as `why_not_topology` names it."""


@dataclass(frozen=True)
class JobChoice:
    """A choice of a job, in its user's words, and the way out."""

    said: str
    way_out: str
    has: frozenset[str]
    bars: frozenset[str]

    def why_not(self, other: JobChoice) -> str:
        """Why they do not go together; "": they do."""
        met = (self.bars & other.has) | (other.bars & self.has)
        return next((why for each, why in WHY.items() if each in met), "")


def _topology(name: str, found: Resolved) -> JobChoice:
    words = f"fleet.topology = '{name}'", "say topology = 'star'", "among"
    if name == "hubs":
        words = f"hub.hubs with {len(found.job.hub.hubs)} hubs", "take one hub", "several"
    elif name == "gateways":
        words = "fleet.gateways = true", "say gateways = false", "sites"
    return JobChoice(*words[:2], frozenset(words[2:]), _BARRED[name])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _choices(found: Resolved) -> Iterator[JobChoice]:
    """What the job says, but for its topology."""
    job, strategy, table, train = found.job, found.strategy, found.job.strategy, found.job.train
    hub, unit, codec, merge = job.hub, job.privacy.unit, found.codec, found.merge
    cuts = unit == "member" and job.privacy.where == "hub"
    another, calm, few = "choose dga or fedavg", "choose fedavg or local-sgd", hub.min_members
    spelled, momentum = strategy.spelled, train.optimizer.get("momentum")
    rows: tuple[tuple[object, str, str, str, str], ...] = (
        (job.cohort, f"strategy.cohort = {table.cohort:g}", "leave cohort out", "drawn", ""),
        (found.mask_terms, "strategy.secure", "leave secure out", "hidden",
         "compares coded follows"),
        (not merge.sum_only, f"strategy.merge = '{table.merge}'", "say merge = 'mean'",
         "compares" if merge.weighs else "compares once", "zeros" if merge.elementwise else ""),
        (cuts, "privacy.where = 'hub'", "say where = 'member'", "cuts", ""),
        (unit != "none", f"privacy.unit = '{unit}'", "leave privacy out", "private",
         "small" if unit == "example" else "evenly"),
        (not strategy.is_synchronous, spelled, another, "apart varied evenly",
         "hidden follows counted weighed"),
        (strategy.delays, spelled, calm, "varied", "drawn"),
        (strategy.weighted, strategy.name, "choose dga or local-sgd", "", "once"),
        (strategy.ranges > 1, spelled, another, "fragments", ""),
        (strategy.has_variates, spelled, another, "", "compares partial"),
        (strategy.adjusts_gradient, spelled, calm, "adjusts", ""),
        (strategy.moves_params, spelled, "choose sync-sgd", "moves", ""),
        (not strategy.delays, strategy.name, "choose dga", "waits", ""),
        (not strategy.has_local_steps, strategy.name, "choose local-sgd", "stepwise", ""),
        (strategy.deals, strategy.name, another, "deals",
         "hidden compares group drawn private coded recoded counted weighed small stepped"),
        (strategy.has_local_steps, strategy.name, "choose sync-sgd", "local", ""),
        (job.fleet.placement, f"fleet.placement = '{job.fleet.placement}'", "leave placement out",
         "staged", "private hidden apart local deals compares few replica group rated drawn"),
        (not strategy.allows_late_join, strategy.name, another, "closed", "drawn"),
        (0 < few < job.fleet.members, f"hub.min_members = {few}", "leave min_members out", "few",
         "closed"),
        (hub.quorum > 1, f"hub.quorum = {hub.quorum}", "leave quorum out", "counted", ""),
        (hub.deadline_s == AUTO, "hub.deadline_s = 'auto'", "say seconds: deadline_s = 60",
         "follows", ""),
        (table.ranges > 1, f"strategy.ranges = {table.ranges}", "leave ranges out", "ranged",
         "fragments hidden drawn"),
        (table.weighting, f"strategy.weighting = '{table.weighting}'", "leave weighting out",
         "weighed", ""),
        (found.local_steps != 1, f"strategy.local_steps = {found.local_steps}",
         "leave local_steps out", "", "stepwise"),
        (table.delay not in (0, AUTO), f"strategy.delay = {table.delay}", "leave delay out", "",
         "waits"),
        (table.final_sync not in (0, AUTO), f"strategy.final_sync = {_shown(table.final_sync)}",
         "leave final_sync out", "varied", "apart fragments stepwise"),
        (hub.replica, "hub.replica", "leave replica out", "replica",
         "apart hidden deals drawn"),
        (has_group(job), f"fleet.device = '{job.fleet.device}'", "leave servers out", "group",
         "rated drawn"),
        (steps_in(job), f"servers.fallback = '{job.servers.fallback}' with servers.data",
         "leave servers.data out, then no group steps in while the job runs", "group",
         "closed apart replica hidden private rated drawn"),
        (train.clip and strategy.adjusts_gradient, f"train.clip = {train.clip:g}",
         "leave clip out", "lengths", ""),
        (table.personal, f"strategy.personal = '{table.personal}'", "leave personal out", "",
         "private staged deals group lengths"),
        (table.head_steps, f"strategy.head_steps = {table.head_steps}", "leave head_steps out", "",
         "varied adjusts"),
        (train.hold_out, f"train.hold_out = {train.hold_out:g}", "leave hold_out out", "",
         "deals staged group"),
        (train.accumulate > 1, f"train.accumulate = {train.accumulate}", "leave accumulate out",
         "small", ""),
        (train.lr_reference_batch, f"train.lr_reference_batch = {train.lr_reference_batch}",
         "leave lr_reference_batch out", "rated stepped", "drawn"),
        *((getattr(train, key), f"train.{key} = {getattr(train, key)!r}", f"leave {key} out",
           "stepped", "") for key in ("clip", "schedule")),
        (momentum, f"train.optimizer.momentum = {momentum}", "say optimizer.momentum=0",
         "momentum", ""),
        (codec.sums_only or codec.two_trips, f"strategy.codec = '{codec.name}'",
         "choose fp16, int8 or topk", "bound", "compares" if codec.sums_only else ""),
        (codec.gradients_only, f"strategy.codec = '{codec.name}'",
         f"take '{codec.for_displacements().name}'", "", "moves"),
        (codec.momentum, f"strategy.codec = '{codec.name}'", "take topk", "", "momentum"),
        (codec.adapts, f"strategy.codec = '{codec.name}'", "name a codec: fp16, topk(0.01) | q2",
         "follows", "stepwise"),
        (codec.few_elements, f"strategy.codec = '{codec.name}'", "send all (int8, sign)", "zeros",
         ""),
        *((each.few_elements, f"strategy.{key} = '{each.name}'", "take int8", "partial", "")
          for key, each in (("codec", codec), ("reply_codec", found.reply_codec))),
        *((not each.verbatim, f"strategy.{key} = '{each.name}'", f"leave {key} out",
           (coded if each.lossless else f"{coded} rounds"), "")
          for key, each, coded in (("codec", codec, "coded"),
                                   ("reply_codec", found.reply_codec, "recoded"))),
    )  # fmt: skip
    for holds, said, way_out, has, bars in rows:
        if holds:
            yield JobChoice(said, way_out, frozenset(has.split()), frozenset(bars.split()))


def _others(found: Resolved) -> Iterator[str]:
    """The topologies of the job that stand beside `fleet.topology`."""
    hub, fleet = found.job.hub, found.job.fleet
    if len(hub.hubs) > 1 or (hub.hubs and (hub.replica or fleet.placement)):
        yield "hubs"
    if fleet.gateways:
        yield "gateways"


def check_pairs(found: Resolved) -> None:
    """ConfigError for the first two choices that do not go together."""
    names = [name for name in (found.job.fleet.topology, *_others(found)) if name in _BARRED]
    every = [*(_topology(name, found) for name in names), *_choices(found)]
    for one, other in combinations(every, 2):
        if why := one.why_not(other):
            said = f"{one.said} and {other.said}: {why}"
            raise ConfigError(said, f"{one.way_out}, or {other.way_out}")


def why_not_with(name: str, found: Resolved) -> Refusal | None:
    """The reason against another topology for a job; None: none."""
    own = _topology(name, found)
    others = [_topology(each, found) for each in _others(found) if each != name]
    for other in (*others, *_choices(found)):
        if why := own.why_not(other):
            return f"{other.said}: {why}", other.way_out
    return None
