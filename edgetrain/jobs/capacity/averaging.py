"""One averaging, by topology: when every member has the mean, once all have contributed.

A topology is a few lines (`flows.AccessStreams`) and queues (`flows.Ports`) in a row. What lies
between two averagings, steps and delays, is for `estimate`; what a job may take is for
`jobs.topology`. Pure: sizes and times. Nothing here is drawn but losses.

Every machine has an access link, a hub too: from one machine to another a message goes up the link
of one and down that of the other, and over the uplinks of their sites where these differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgetrain.exchange.peers.schedules import SEGMENT, SumOrder
from edgetrain.fleet.networks import Profile
from edgetrain.fleet.networks.links.window import MSS, TURN_BYTES
from edgetrain.fleet.networks.profile import Direction
from edgetrain.jobs.capacity.flows import (
    AccessStreams,
    Array,
    Ports,
    Random,
    byte_s,
    column,
    wire_bytes,
)
from edgetrain.jobs.capacity.parcels import ExchangeSizes, Parcel, contribution, reply

Indices = npt.NDArray[np.intp]
NO_LINK = Profile("none")


@dataclass(frozen=True)
class Hubs:
    """What members send to: shards of a hub, gateways or shared uplinks in between, their speed.

    Rates are those of a machine's port, each way. A hub needs `message_s` for each message it gets,
    as in a job, and merges `merge_bytes_per_s` of float32. 0 stands for no limit and no time.
    """

    shards: int = 1
    """Hubs that each have an equal part of the vector."""
    gateways: int = 0
    """Each merges for an equal part of the members and is one member to the hub."""
    uplinks: int = 0
    """Sites without a gateway: their members share the way to the hub."""
    uplink: Profile = NO_LINK
    """Link between a gateway or a site and the hub."""
    rate_mbit: float = 0.0
    gateway_rate_mbit: float = 0.0
    message_s: float = 0.0
    merge_bytes_per_s: float = 0.0
    link: Profile = NO_LINK
    """A hub's own access link; its rates, if it has some, come in place of `rate_mbit`."""
    homes: tuple[int, ...] = ()
    """The site of each member; empty: members are dealt to sites in blocks of equal size."""
    lines: tuple[Profile, ...] = ()
    """The uplink of each site; empty: each has `uplink`."""

    @property
    def sites(self) -> int:
        return self.gateways or self.uplinks

    @property
    def uplinks_of_sites(self) -> Sequence[Profile]:
        return self.lines or (self.uplink,) * self.sites

    @property
    def port_rates(self) -> tuple[float, float]:
        """Mbit/s that a hub's port takes and gives."""
        ways = self.link.down.mean_rate_mbit, self.link.up.mean_rate_mbit
        return ways if any(ways) else (self.rate_mbit, self.rate_mbit)

    def work_s(self, parts: int, elements: int) -> float:
        """Seconds of a hub's processor for a contribution to these elements in so many messages."""
        return parts * self.message_s + self.merge_s(elements)

    def merge_s(self, elements: int) -> float:
        return 4 * elements / self.merge_bytes_per_s if self.merge_bytes_per_s else 0.0


@dataclass(frozen=True)
class Patience:
    """When a hub closes a round without the late ones, as in a job."""

    quorum: int = 1
    deadline_s: float = 60.0


class Averaging(Protocol):
    """One topology, with the state that its connections and queues have after some rounds."""

    late: int
    """Contributions that a deadline closed a round without."""
    sent_bytes: int
    """Most bytes sent by a member in a round; `received_bytes` likewise."""
    received_bytes: int
    hub_bytes: tuple[int, int]
    """Bytes received and sent by a hub in a round."""
    farthest_s: float
    """The longest round trip of a message and its answer, without load."""
    traffic: tuple[int, int]
    """Bytes of all members and hubs in a round: between sites, and within them. Without sites all
    are between."""
    reducers: int
    """Machines that add up."""

    def average(self, at: Array) -> Array:
        """When each member has the mean of contributions that are ready at these times."""

    def busy_s(self) -> dict[str, float]:
        """Seconds for which each resource has worked, its busiest instance."""


class _Tier:
    """Hubs that each serve a part of the children: what comes in, the merge, what goes out."""

    def __init__(
        self,
        ports: Indices | int,
        hubs: int,
        parcels: tuple[Parcel, Parcel],
        rates_mbit: tuple[float, float],
        speed: Hubs,
        elements: int,
    ) -> None:
        """`ports`: the hub of each child, or the number of children. `parcels` come in and go out
        at these rates, each hub merges vectors of so many elements."""
        self._up, self._down = parcels
        self._merge_s = speed.merge_s(elements)
        children, port = (ports, None) if isinstance(ports, int) else (len(ports), ports)
        come_s, go_s = (
            wire_bytes(parcel.bytes) * byte_s(Direction(rate_mbit=rate))
            for parcel, rate in zip(parcels, rates_mbit, strict=True)
        )
        self.taking = Ports(children, hubs, come_s, port)
        self.giving = Ports(children, hubs, go_s, port)
        work_s = speed.work_s(self._up.parts, elements)
        self.merging = Ports(children, hubs, work_s, port)
        self._tail_s = work_s / self._up.parts
        self._closed = np.full(hubs, -math.inf)
        self._rounds = 0

    @property
    def working_s(self) -> float:
        """Busy seconds of the busiest hub's processor."""
        return self.merging.busy_s + self._merge_s * self._rounds

    def take(self, first: Array, last: Array) -> tuple[Array, Array]:
        """When each child's contribution is merged: (begin, end)."""
        first, last = self.taking.serve(first, last)
        return self.merging.serve(first, last, self._tail_s)

    def close(self, ready: Array, patience: Patience) -> tuple[Array, int]:
        """When each hub has closed its round, and how many contributions are late for it."""
        rows = self.taking.grid(ready)
        whole = np.where(np.isfinite(rows), rows, -math.inf).max(axis=1)
        opened = rows.min(axis=1)
        closed = whole
        overdue = whole - opened > patience.deadline_s
        if overdue.any():
            enough = np.partition(rows, patience.quorum - 1, axis=1)[:, patience.quorum - 1]
            closed = np.where(overdue, np.maximum(opened + patience.deadline_s, enough), whole)
        self._closed = np.maximum(closed, self._closed)
        late = int(np.count_nonzero(ready > self._closed[self.taking.port]))
        return self._closed + self._merge_s, late

    def give(self, closed: Array, on: AccessStreams) -> tuple[Array, Array]:
        """When each child's reply leaves its hub, for the line that it is `on`: (begin, end)."""
        self._rounds += 1
        begin = closed[self.giving.port]
        return self.giving.share(begin, begin, on.turns(begin, self._down.bytes))


class Star:
    """One hub, or several that each have a part of the vector; gateways or shared uplinks."""

    def __init__(
        self,
        links: Sequence[Profile],
        exchange: ExchangeSizes,
        hubs: Hubs,
        patience: Patience,
        rngs: Sequence[Random],
        is_open: bool = False,
    ) -> None:
        """`links` of the members; `rngs`: for members' ways and those of gateways, up and down."""
        self._hubs, self._patience, members = hubs, patience, len(links)
        self.whole = _parcels(exchange, exchange.elements)
        self.share = _parcels(exchange, part := -(-exchange.elements // hubs.shards))
        connections = 1 if hubs.gateways else hubs.shards
        self._home = _homes(members, hubs)
        lines = hubs.uplinks_of_sites
        far_s = np.array([line.rtt_ms for line in lines]) / 1000
        hub_s = hubs.link.rtt_ms / 1000
        trips = np.array([link.rtt_ms for link in links]) / 1000
        if not hubs.gateways:
            trips = trips + hub_s + (far_s[self._home] if hubs.uplinks else 0.0)
        self.farthest_s = float(trips.max())
        ups, downs = [link.up for link in links], [link.down for link in links]
        self.up = AccessStreams(ups, trips, rngs[0], connections, is_open)
        self.down = AccessStreams(downs, trips, rngs[1], connections, is_open)
        self.root = _Tier(hubs.gateways or members, 1, self.share, hubs.port_rates, hubs, part)
        """The upper tier, for one part of the vector: all are alike."""
        self.sites: _Tier | None = None
        if hubs.gateways:
            near, size = (hubs.gateway_rate_mbit,) * 2, exchange.elements
            self.sites = _Tier(self._home, hubs.gateways, self.whole, near, hubs, size)
        # Between a site and the hub: a connection of the gateway's own, or a line that is shared.
        far = lines if hubs.gateways else ()
        trips = np.array([line.rtt_ms for line in far]) / 1000 + hub_s
        self.far_up = AccessStreams([f.up for f in far], trips, rngs[2], hubs.shards, is_open)
        self.far_down = AccessStreams([f.down for f in far], trips, rngs[3], hubs.shards, is_open)
        self.sent_bytes, self.received_bytes = self._bytes()
        children = hubs.gateways or members
        self.hub_bytes = (children * self.share[0].bytes, children * self.share[1].bytes)
        self.reducers = hubs.shards + hubs.gateways
        self.traffic = hubs.shards * sum(self.hub_bytes), 0
        if hubs.gateways:
            inside = sum(lines[site] is not NO_LINK for site in self._home)
            self.traffic = self.traffic[0], inside * (self.sent_bytes + self.received_bytes)
        self.shared: tuple[Ports, Ports] | None = None
        if hubs.uplinks:
            self.shared = (
                self._shared(self.sent_bytes, [line.up for line in lines]),
                self._shared(self.received_bytes, [line.down for line in lines]),
            )
            self._far_up_s, self._far_down_s = (
                column(ways, lambda way: way.mean_delay_ms / 1000)[self._home]
                for ways in ([line.up for line in lines], [line.down for line in lines])
            )
        self._hub_down_s = hubs.link.down.mean_delay_ms / 1000
        self._hub_up_s = hubs.link.up.mean_delay_ms / 1000
        self.late = 0

    def _shared(self, size: int, ways: Sequence[Direction]) -> Ports:
        service_s = wire_bytes(size) * column(ways, byte_s)
        return Ports(len(self._home), len(ways), service_s, self._home)

    def _bytes(self) -> tuple[int, int]:
        if self._hubs.gateways:
            return self.whole[0].bytes, self.whole[1].bytes
        shards = self._hubs.shards
        return shards * self.share[0].bytes, shards * self.share[1].bytes

    def average(self, at: Array) -> Array:
        first, last = self._up(at)
        # Connections of one line share it: parts of all hubs begin together, and end together.
        _, merged = self.root.take(first + self._hub_down_s, last + self._hub_down_s)
        closed, late = self.root.close(merged, self._patience)
        self.late += late
        begin, end = self.root.give(closed, self.down if self.sites is None else self.far_down)
        return self._down(begin + self._hub_up_s, end + self._hub_up_s)

    def _up(self, at: Array) -> tuple[Array, Array]:
        """Members' contributions, or those of their gateways, up to the hub's port."""
        first, last = self.up.send(at, self.sent_bytes)
        if self.shared is not None:
            first, last = self.shared[0].serve(first, last)
            return first + self._far_up_s, last + self._far_up_s
        if self.sites is None:
            return first, last
        _, merged = self.sites.take(first, last)
        closed, late = self.sites.close(merged, dataclasses.replace(self._patience, quorum=1))
        self.late += late
        return self.far_up.send(closed, self._hubs.shards * self.share[0].bytes)

    def _down(self, begin: Array, end: Array) -> Array:
        """Replies from the hub's port down to the members; when each is there."""
        if self.shared is not None:
            turns = self.down.turns(begin, self.share[1].bytes)
            begin, end = self.shared[1].share(begin, end, turns)
            begin, end = begin + self._far_down_s, end + self._far_down_s
        if self.sites is not None:
            size = self._hubs.shards * self.share[1].bytes
            _, there = self.far_down.forward(begin, end, size)
            begin, end = self.sites.give(there, self.down)
        return self.down.forward(begin, end, self.received_bytes)[1]

    def busy_s(self) -> dict[str, float]:
        used = {
            "hub's port, receiving": self.root.taking.busy_s,
            "hub's port, sending": self.root.giving.busy_s,
            "hub's processor": self.root.working_s,
            "members' uplinks": float(self.up.busy_s.max()),
            "members' downlinks": float(self.down.busy_s.max()),
        }
        if self.sites is not None:
            used |= {
                "gateways' ports, receiving": self.sites.taking.busy_s,
                "gateways' ports, sending": self.sites.giving.busy_s,
                "gateways' processors": self.sites.working_s,
                "gateways' uplinks": float(self.far_up.busy_s.max()),
                "gateways' downlinks": float(self.far_down.busy_s.max()),
            }
        if self.shared is not None:
            used |= {
                "sites' uplinks": self.shared[0].busy_s,
                "sites' downlinks": self.shared[1].busy_s,
            }
        return used


# -- between any two machines ---------------------------------------------------------------------


class Mesh:
    """The ways from one member to another: up the link of one and down that of the other."""

    def __init__(self, links: Sequence[Profile], hubs: Hubs, is_open: bool) -> None:
        """`is_open`: an ideal, in which lines pass bytes on as they come."""
        self._links, self._known = links, dict[tuple[int, ...], Direction]()
        self.home = _homes(len(links), hubs) if hubs.sites else np.arange(len(links))
        self._lines = hubs.uplinks_of_sites
        self._whole = 0 if is_open else _WHOLE_SEGMENTS

    def crosses(self, source: Indices, to: Indices) -> npt.NDArray[np.bool_]:
        """Whether these ways leave the site of the one for that of the other."""
        crossing: npt.NDArray[np.bool_] = self.home[source] != self.home[to]
        return crossing

    def ways(self, source: Indices, to: Indices, narrow: bool = True) -> list[Direction]:
        """The way of each pair. `narrow`: each as slow as its slowest part, a site's uplink shared
        by the pairs that cross it; else as fast as the sender's link."""
        out, into = self._crossing(source, to)
        return [
            self._way(int(i), int(j), int(out[place]), int(into[place]), narrow)
            for place, (i, j) in enumerate(zip(source, to, strict=True))
        ]

    def trips_s(self, source: Indices, to: Indices) -> Array:
        """Round trips of these pairs, without load."""
        there, back = (self.delays_s(*pair) for pair in ((source, to), (to, source)))
        return there + back

    def delays_s(self, source: Indices, to: Indices) -> Array:
        ways = self.ways(source, to, narrow=False)
        return column(ways, lambda way: way.mean_delay_ms / 1000)

    def _crossing(self, source: Indices, to: Indices) -> tuple[Indices, Indices]:
        """For each pair, how many of these leave its sender's site, and enter its receiver's."""
        home, cross = self.home, self.crosses(source, to)
        sites = int(home.max()) + 1
        out = np.bincount(home[source[cross]], minlength=sites)[home[source]]
        into = np.bincount(home[to[cross]], minlength=sites)[home[to]]
        return np.where(cross, out, 0), np.where(cross, into, 0)

    def _way(self, i: int, j: int, out: int, into: int, narrow: bool) -> Direction:
        one, other = self._links[i], self._links[j]
        lines = (int(self.home[i]), int(self.home[j])) if self._lines and out else (-1, -1)
        key = (id(one), id(other), *lines, out, into, narrow)
        if key not in self._known:
            shared = [(one.up, 1), (other.down, 1)]
            if self._lines and out:
                shared.append((self._lines[lines[0]].up, out))
                shared.append((self._lines[lines[1]].down, into))
            self._known[key] = _in_a_row(shared, narrow, self._whole)
        return self._known[key]


_WHOLE_SEGMENTS = 2
"""Segments that a line has to have whole before it passes them on to the next one."""


def _in_a_row(ways: Sequence[tuple[Direction, int]], narrow: bool, whole: int) -> Direction:
    """Lines one behind the other, each shared by so many: delays and losses add up, and the slowest
    says the rate (`narrow`), or the first. Each but the first passes `whole` segments on at once.
    """
    rates = [way.mean_rate_mbit / shared for way, shared in ways if way.mean_rate_mbit]
    first = ways[0][0]
    arrives = math.prod(1 - way.mean_loss_percent / 100 for way, _ in ways)
    return dataclasses.replace(
        first,
        delay_ms=sum(way.mean_delay_ms for way, _ in ways)
        + sum(1e3 * whole * byte_s(way) * float(wire_bytes(MSS)) for way, _ in ways[1:]),
        delay_trace="",
        jitter_ms=math.sqrt(sum(way.jitter_ms**2 for way, _ in ways)),
        rate_mbit=min(rates, default=0.0) if narrow else first.mean_rate_mbit,
        rate_trace="",
        loss_percent=0.0 if first.burst else 100 * (1 - arrives),
    )


class _Funnel:
    """Lines at whose end many streams of a round come together; only the last one counts."""

    def __init__(self, line: Indices, total_s: Array) -> None:
        self._line, self._total_s = line, total_s
        self._free = np.full(len(total_s), -math.inf)
        self.busy_s = np.zeros(len(total_s))

    def gather(self, first: Array, last: Array) -> Array:
        """When all streams of each line are through, whose bytes arrive from `first` to `last`."""
        begin, end = np.full(len(self._total_s), math.inf), np.full(len(self._total_s), -math.inf)
        np.minimum.at(begin, self._line, first)
        np.maximum.at(end, self._line, last)
        self.busy_s += self._total_s
        through = np.maximum(end, np.maximum(begin, self._free) + self._total_s)
        self._free = np.where(np.isfinite(begin), through, self._free)
        return self._free


class Direct:
    """Members that each add up one part of the vector, for all."""

    def __init__(
        self,
        links: Sequence[Profile],
        exchange: ExchangeSizes,
        hubs: Hubs,
        rngs: Sequence[Random],
        reducers: Sequence[int] = (),
        is_open: bool = False,
    ) -> None:
        """`reducers`: the members that add up, an equal part each; (): all. Members that do not are
        clients. `hubs`: the speed at which a machine merges, and the sites."""
        members = len(links)
        chosen = np.array(reducers or range(members), np.intp)
        self.reducers = len(chosen)
        part = -(-exchange.elements // self.reducers)
        up, down = _parcels(exchange, part)
        mesh = Mesh(links, hubs, is_open)
        pairs = np.stack(np.meshgrid(np.arange(members), chosen, indexing="ij"), -1)
        pairs = pairs.reshape(-1, 2)
        self._member, self._reducer = pairs[pairs[:, 0] != pairs[:, 1]].T.astype(np.intp)
        there, back = (self._member, self._reducer), (self._reducer, self._member)
        self._sends, self._replies = (
            _Shared(mesh, links, pair, parcel.bytes, rng, is_open)
            for pair, parcel, rng in zip((there, back), (up, down), rngs, strict=False)
        )
        others = np.bincount(self._reducer, minlength=members).astype(np.float64)
        work_s = hubs.work_s(up.parts, part)
        self._working = _Funnel(self._reducer, others * work_s)
        self._tail_s = work_s / up.parts
        self._merge_s = hubs.merge_s(part)
        many = self.reducers - 1
        self.sent_bytes = many * up.bytes + (members - 1) * down.bytes
        self.received_bytes = many * down.bytes + (members - 1) * up.bytes
        self.hub_bytes = 0, 0
        self.farthest_s = float(mesh.trips_s(*there).max(initial=0.0))
        across = int(mesh.crosses(*there).sum())
        both = up.bytes + down.bytes
        self.traffic = across * both, (len(self._member) - across) * both
        self.late = 0

    def average(self, at: Array) -> Array:
        if not len(self._member):
            return at
        first, last = self._sends.carry(at)
        there = self._sends.whole(first, last)
        ready = np.maximum(self._working.gather(first, last), there + self._tail_s)
        closed = np.maximum(ready, at)  # a reducer's own contribution, too
        first, last = self._replies.carry(closed + self._merge_s)
        return np.maximum(self._replies.whole(first, last), closed)

    def busy_s(self) -> dict[str, float]:
        return {
            "members' uplinks": float((self._sends.busy_s + self._replies.busy_s).max()),
            "members' downlinks": float((self._sends.end.busy_s + self._replies.end.busy_s).max()),
            "reducers' processors": float(self._working.busy_s.max()),
        }


class _Shared:
    """Messages of many pairs at once: each sender's link is shared by its connections, each
    receiver's by what comes in, each site's uplink by what crosses it."""

    def __init__(
        self,
        mesh: Mesh,
        links: Sequence[Profile],
        pairs: tuple[Indices, Indices],
        size: int,
        rng: Random,
        is_open: bool,
    ) -> None:
        self._source, self._to, self._size = *pairs, size
        sends = np.bincount(self._source, minlength=len(links))
        takes = np.bincount(self._to, minlength=len(links))
        self._connections = sends[self._source].astype(np.float64)
        ways = mesh.ways(*pairs, narrow=False)
        trips = mesh.trips_s(*pairs)
        self._streams = AccessStreams(ways, trips, rng, self._connections, is_open)
        down_s = column([link.down for link in links], byte_s)
        up_s = column([link.up for link in links], byte_s)
        wire = float(wire_bytes(float(size)))
        self.end = _Funnel(self._to, takes * wire * down_s)
        self._each_s = sends * wire * up_s
        self.busy_s = np.zeros(len(links))
        cross = mesh.crosses(*pairs)
        self._lines = [
            (
                _Funnel(home[cross], np.bincount(home[cross], minlength=len(rates)) * wire * rates),
                home,
            )
            for home, rates in (
                (mesh.home[self._source], _rates(mesh, "up")),
                (mesh.home[self._to], _rates(mesh, "down")),
            )
            if len(rates) and cross.any()
        ]
        self._cross = cross

    def carry(self, at: Array) -> tuple[Array, Array]:
        """When the first and the last byte of each pair's message come to the receiver's link."""
        self.busy_s += self._each_s
        first, last = self._streams.send(at[self._source], self._connections * self._size)
        for line, home in self._lines:
            through = line.gather(first[self._cross], last[self._cross])
            last = np.where(self._cross, np.maximum(last, through[home]), last)
        return first, last

    def whole(self, first: Array, last: Array) -> Array:
        """When each receiver has all that was sent to it; -inf: nothing was."""
        return self.end.gather(first, last)


def _rates(mesh: Mesh, way: str) -> Array:
    return column([getattr(line, way) for line in mesh._lines], byte_s)


# -- collectives ----------------------------------------------------------------------------------


MOST_PIECES = 64
"""Segments of a vector that are looked at one by one, about; longer ones are taken together."""


@dataclass(frozen=True)
class _Sending:
    """Segments that leave at once, in one step: the n-th of each transfer."""

    source: Indices
    to: Indices
    segment: Indices
    size: int
    """Bytes of the longest."""
    streams: AccessStreams
    is_first: npt.NDArray[np.bool_]
    """Whether the sender sends this segment for the first time, of those that it sends at once."""
    through_s: Array
    """How long this one takes on the sender's line, which connections to others share."""
    all_s: Array
    """Likewise, all that are sent at once."""


def _steps(order: SumOrder) -> Iterator[tuple[Indices, Indices, Indices, int, bool]]:
    """Senders, receivers, segments, the elements of the longest, and whether these are added to the
    receivers' own, of each sending."""
    lengths = [each.stop - each.start for each in order.segments]
    for step in order.steps():
        found = [(t.sender, t.receiver, list(order.segments_of(t.chunks))) for t in sorted(step)]
        adds = step[0].adds
        for turn in range(max((len(segments) for *_, segments in found), default=0)):
            here = [(a, b, each[turn]) for a, b, each in found if turn < len(each)]
            source, to, segment = (np.array(ends, np.intp) for ends in zip(*here, strict=True))
            yield source, to, segment, max(lengths[each] for each in segment), adds


class Collective:
    """Members that hand sums on to each other, segment by segment, once the hub has all votes; and
    the hub's word that the round counts, once all have said that they have the mean."""

    def __init__(
        self,
        name: str,
        links: Sequence[Profile],
        exchange: ExchangeSizes,
        hubs: Hubs,
        rng: Random,
        is_open: bool = False,
    ) -> None:
        """`name`: one of `schedules.SHAPES`."""
        mesh, members = Mesh(links, hubs, is_open), len(links)
        self.reducers, across, within = members, 0, 0
        longest = max(SEGMENT, exchange.elements // MOST_PIECES)
        order = SumOrder(name, members, exchange.elements, longest)
        self._segments, self._sendings = len(order.segments), list[_Sending]()
        self.to_hub_s, self.from_hub_s = _hub_delays(links, mesh.home, hubs)
        self._work_s = members * hubs.message_s
        self._down_s = column([link.down for link in links], byte_s)
        known: dict[tuple[bytes, bytes], AccessStreams] = {}
        sent, received = np.zeros(members, np.int64), np.zeros(members, np.int64)
        self._each_s, self._busy_s = np.zeros(members), np.zeros(members)
        up_s = column([link.up for link in links], byte_s)
        farthest = float((self.to_hub_s + self.from_hub_s).max())
        copies = np.zeros((members, self._segments))  # of the mean; a sum goes to one member
        for source, _, segment, _, adds in _steps(order):
            copies[source, segment] += not adds
        gone = np.zeros(copies.shape)
        for source, to, segment, elements, adds in _steps(order):
            key = (source.tobytes(), to.tobytes())
            if key not in known:
                ways, trips = mesh.ways(source, to), mesh.trips_s(source, to)
                known[key] = AccessStreams(ways, trips, rng, is_open=is_open)
                farthest = max(farthest, 2 * float(mesh.delays_s(source, to).max()))
            size = contribution(elements, exchange.codec, exchange.ratio).bytes
            sent[source] += size
            received[to] += size
            self._each_s[source] += float(wire_bytes(float(size))) * up_s[source]
            crossing = int(mesh.crosses(source, to).sum())
            across += crossing * size
            within += (len(source) - crossing) * size
            many = np.ones(len(source)) if adds else copies[source, segment]
            place = np.zeros(len(source)) if adds else gone[source, segment]
            gone[source, segment] += not adds
            last = wire_bytes(float((size - 1) % TURN_BYTES + 1))
            all_s = many * wire_bytes(float(size)) * known[key].byte_s
            through_s = all_s - (many - 1 - place) * last * known[key].byte_s
            self._sendings.append(
                _Sending(source, to, segment, size, known[key], place == 0, through_s, all_s)
            )
        self.sent_bytes, self.received_bytes = int(sent.max()), int(received.max())
        self.hub_bytes = 0, 0
        self.farthest_s = farthest
        self.traffic = across, within
        self.late = 0

    def average(self, at: Array) -> Array:
        self._busy_s += self._each_s
        begins = self._hub_says(at)
        ready = np.repeat(begins[:, None], self._segments, axis=1)
        begun = np.empty_like(ready)
        # One uplink each, whoever it sends to, and one downlink.
        free, taken = np.full(len(at), -math.inf), np.full(len(at), -math.inf)
        for sending in self._sendings:
            source, to, segment = sending.source, sending.to, sending.segment
            leaves = np.maximum(ready[source, segment], free[source])
            leaves = np.where(sending.is_first, leaves, begun[source, segment])
            begun[source, segment] = leaves
            streams = sending.streams
            _, arrives = streams.send(leaves, sending.size)
            arrives = np.maximum(arrives, leaves + sending.through_s + streams.delay_s)
            free[source] = np.maximum(streams.free, leaves + sending.all_s)
            line_s = float(wire_bytes(sending.size)) * self._down_s[to]
            is_ahead = arrives < taken[to] - line_s  # of what the line takes last
            arrives = np.where(is_ahead, arrives, np.maximum(arrives, taken[to] + line_s))
            taken[to] = np.maximum(taken[to], arrives)
            ready[to, segment] = np.maximum(ready[to, segment], arrives)
        return self._hub_says(np.maximum(begins, ready.max(axis=1, initial=-math.inf)))

    def _hub_says(self, at: Array) -> Array:
        """When each member hears from the hub, which heard from all who spoke at these times."""
        return float((at + self.to_hub_s).max()) + self._work_s + self.from_hub_s

    def busy_s(self) -> dict[str, float]:
        return {"members' uplinks": float(self._busy_s.max())}


def _hub_delays(links: Sequence[Profile], home: Indices, hubs: Hubs) -> tuple[Array, Array]:
    """Seconds one way from each member to the hub, and back, without load."""

    def delay(way: Direction) -> float:
        return way.mean_delay_ms / 1000

    up = column([link.up for link in links], delay) + delay(hubs.link.down)
    down = column([link.down for link in links], delay) + delay(hubs.link.up)
    if hubs.sites:
        up = up + column([line.up for line in hubs.uplinks_of_sites], delay)[home]
        down = down + column([line.down for line in hubs.uplinks_of_sites], delay)[home]
    return up, down


def _homes(members: int, hubs: Hubs) -> Indices:
    if hubs.homes:
        return np.array(hubs.homes, np.intp)
    return Ports(members, max(1, hubs.sites), 0.0).port


def _parcels(exchange: ExchangeSizes, elements: int) -> tuple[Parcel, Parcel]:
    """A contribution to so many elements, and its reply, in as many ranges as these are."""
    ranges = max(1, round(exchange.ranges * elements / exchange.elements))
    each = -(-elements // ranges)
    up = contribution(each, exchange.codec, exchange.ratio)
    down = reply(each, exchange.reply_codec, exchange.reply_ratio)
    return up.times(ranges), down.times(ranges)
