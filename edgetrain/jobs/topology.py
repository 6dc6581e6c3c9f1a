"""Which topology averages a job's contributions soonest, and what `fleet.topology = "auto"` takes.

Rows of a table: seconds of one averaging and steps a second, of each topology, from the job's links
and the bytes of its codec (`capacity.averaging`). What is refused is said by `rules`. Pure: nothing
is measured or started here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgetrain.jobs import rules
from edgetrain.jobs.capacity.estimate import CapacityQuestion, answer, averaging_of
from edgetrain.jobs.job import AUTO, COLLECTIVES
from edgetrain.jobs.resolved import Resolved

HUBS = (2, 4)
"""Numbers of hubs that the table asks about, beside those that the job names."""

ROUNDS = 24
"""Rounds that are worked out for a row: slow start is over by then, where it ends."""

SAME = 0.01
"""Topologies whose steps a second differ by less than this share are equally fast."""

MUCH = 0.1
"""Of these one is taken in place of the star if its averaging takes less by this share."""

QUICK_S = 0.001
"""Seconds of a step where nothing says how long it is: this machine's own, not measured."""

_LONGEST = 512
"""Members of whom any two are looked at: more would take minutes, and no memory."""


@dataclass(frozen=True)
class TopologyRow:
    """Cost of one topology for a job, allowed or not."""

    name: str
    """As the table says it: "star", "4 hubs", "gateways"."""
    topology: str
    """As `fleet.topology` says it; "": no value of that key."""
    reducers: int
    """Machines that add up."""
    open_s: float
    """Seconds of one averaging, TCP's windows being open."""
    idle_s: float
    """The same from idle, with slow start."""
    averaging_s: float
    """The same in this job, whose steps are pauses in between."""
    steps_per_second: float
    """Steps a second of each member."""
    wan_bytes: int
    """Bytes of all members across the borders of sites in a round; without sites all bytes."""
    lan_bytes: int
    """Those within sites."""
    refused: str
    """Reason against it in this job; "": none."""
    way_out: str


@dataclass(frozen=True)
class TopologyChoice:
    """The choice of `auto`, and its reason in a line."""

    row: TopologyRow
    topology: str
    """As `fleet.topology` says it."""
    why: str


def table(question: CapacityQuestion, found: Resolved, auto: bool = False) -> list[TopologyRow]:
    """A row for each topology; `auto`: for those that it may take. ConfigError."""
    # (name, topology, question) of each row, in the order of the table
    hubs, members = question.hubs, question.members
    star = replace(question, hubs=replace(hubs, shards=found.hubs))
    kinds = [(f"{found.hubs} hubs" if found.hubs > 1 else "star", "star", star)]
    for count in HUBS:
        if count == found.hubs:
            continue
        shards = replace(hubs, shards=count)
        kinds.append((f"{count} hubs", "", replace(star, hubs=shards)))
    if hubs.uplinks:
        gateways = replace(hubs, shards=1, gateways=hubs.uplinks, uplinks=0)
        kinds.append(("gateways", "", replace(star, hubs=gateways)))
    if members <= _LONGEST:
        hosts = tuple(member for member in range(members) if member not in found.nat)
        if hosts:
            direct = replace(star, topology="direct", reducers=hosts)
            kinds.append(("direct", "direct", direct))
        kinds += [(name, name, replace(star, topology=name)) for name in COLLECTIVES]
    if auto:
        kinds = [each for each in kinds if each[1] in _ALIKE]
    return [_row(name, topology, asked, found) for name, topology, asked in kinds]


_ALIKE = ("star", "direct")
"""Topologies with the same bits, among which `auto` chooses."""


def choose(rows: Sequence[TopologyRow], trusts: bool) -> TopologyChoice:
    """The choice of `auto` among these rows. `trusts`: members may see each other's
    contributions."""
    open_to = [row for row in rows if row.topology in _ALIKE and not row.refused]
    allowed = [row for row in open_to if row.topology == "star" or trusts]
    fastest = max(row.steps_per_second for row in allowed)
    equal = [row for row in allowed if row.steps_per_second >= (1 - SAME) * fastest]
    soonest = min(equal, key=lambda row: row.averaging_s)
    first = equal[0]
    taken = first if soonest.averaging_s >= (1 - MUCH) * first.averaging_s else soonest
    others = [_beside(row, taken) for row in allowed if row is not taken]
    others += [
        f"{row.name} is left out, because {row.refused or 'fleet.topology_trust = false'}"
        for row in rows
        if row.topology in _ALIKE and row not in allowed
    ]
    why = "; ".join([f"with {_figures(taken)}", *others])
    return TopologyChoice(taken, taken.topology, f"topology auto: {taken.name}, {why}")


def settle(found: Resolved, question: CapacityQuestion) -> Resolved:
    """The job with the topology that its "auto" takes among rows for this question of its fleet."""
    choice = choose(table(question, found, auto=True), found.job.fleet.topology_trust)
    return _with(found, choice.topology, choice.why)


def take_star(found: Resolved, because: str) -> Resolved:
    if found.job.fleet.topology != AUTO:
        return found
    return _with(found, "star", f"topology auto: star, because {because}")


def _with(found: Resolved, topology: str, why: str) -> Resolved:
    fleet = replace(found.job.fleet, topology=topology)
    return replace(found, job=replace(found.job, fleet=fleet), topology_choice=why)


def _figures(row: TopologyRow) -> str:
    return f"averaging in {row.averaging_s:.3g} s and {row.steps_per_second:.3g} steps a second"


def _beside(row: TopologyRow, taken: TopologyRow) -> str:
    """What another row has, in so many words as are needed."""
    same = "no sooner" if row.averaging_s >= taken.averaging_s else "hardly sooner"
    return f"{row.name} is {same}, with {_figures(row)}"


def _row(name: str, topology: str, question: CapacityQuestion, found: Resolved) -> TopologyRow:
    seconds = []
    for is_open in (True, False):
        rngs = np.random.default_rng(question.seed).spawn(4)
        averaging = averaging_of(question, rngs, is_open)
        seconds.append(float(averaging.average(np.zeros(question.members)).max()))
    run = answer(replace(question, rounds=ROUNDS))
    refused = rules.why_not_topology(topology or name.rpartition(" ")[2], found)
    what, way_out = refused or ("", "")
    wan, lan = averaging.traffic
    return TopologyRow(
        name=name,
        topology=topology,
        reducers=averaging.reducers,
        open_s=seconds[0],
        idle_s=seconds[1],
        averaging_s=run.averaging_s,
        steps_per_second=1 / run.seconds_per_step,
        wan_bytes=wan,
        lan_bytes=lan,
        refused=what,
        way_out=way_out,
    )
