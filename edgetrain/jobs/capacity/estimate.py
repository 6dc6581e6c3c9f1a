"""Capacity planning: how long the rounds of a fleet take, without training anything.

Only sizes and times: a round of all members is a few array operations (`flows`), so that 100,000
members and 100 rounds take seconds. Gateways and hubs of which each has a part of the vector are
included. Approximations are named in docs/simulation.md. Pure: no file, no clock, no torch, no
greenlet; the same question has the same answer, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.codecs import Codec
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.delay import AgreedDelay, Delay, is_turn
from edgetrain.exchange.hub.landing import CLOSE
from edgetrain.exchange.messages import Contribute, Message, Reply, pack
from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks import Profile
from edgetrain.jobs.capacity.flows import AccessStreams, Array, Ports, StepTimesOfMany, wire_bytes

MARGIN = 1.1
"""An automatic delay is so much longer than the round trip, as on a member."""

COUNTS = (10, 100, 1_000, 10_000, 100_000)
"""Fleets that a table of capacity compares."""

_U64 = (1 << 64) - 1
_STEADY = (
    0.5  # the last part of the rounds, in which slow start and a delay being measured are over
)


@dataclass(frozen=True)
class Kind:
    """One kind of member: its device, an undisturbed step's seconds there, its access network."""

    device: Device
    step_s: float
    network: Profile


@dataclass(frozen=True)
class ExchangeSizes:
    """What members exchange, and when. A vector has `elements` float32 numbers.

    `codec` and `reply_codec` say how many bytes it takes at most; a `ratio` above 0, measured
    somewhere, says how many times fewer than float32 it takes instead.
    """

    every: int
    delay: Delay
    elements: int
    codec: Codec
    reply_codec: Codec
    ratio: float = 0.0
    reply_ratio: float = 0.0
    lands: bool = False
    """Whether the run may land, which these figures leave out."""


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
    uplink: Profile = dataclasses.field(default_factory=lambda: Profile("none"))
    """Between a gateway or a site and the hub."""
    rate_mbit: float = 0.0
    gateway_rate_mbit: float = 0.0
    message_s: float = 0.0
    merge_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class CapacityQuestion:
    """A fleet to plan for. Members are of these kinds, in turn."""

    members: int
    kinds: tuple[Kind, ...]
    exchange: ExchangeSizes
    hubs: Hubs = Hubs()
    rounds: int = 100
    seed: int = 0
    quorum: int = 1
    deadline_s: float = 60.0

    def check(self) -> None:
        """ConfigError for a number that cannot be, or a fleet that cannot be built."""
        hubs = self.hubs
        allowed = (
            ("members", self.members, 1, 1_000_000),
            ("rounds", self.rounds, 1, 1_000_000),
            ("shards", hubs.shards, 1, max(1, self.exchange.elements)),
            ("gateways", hubs.gateways, 0, self.members),
            ("sites with a shared uplink", hubs.uplinks, 0, self.members),
            ("quorum", self.quorum, 1, self.members),
            ("parameters", self.exchange.elements, 1, 1 << 40),
        )
        for what, value, low, high in allowed:
            if not low <= value <= high:
                raise ConfigError(f"{what} = {value:,}", f"allowed are {low:,} to {high:,}")
        if hubs.gateways and hubs.uplinks:
            raise ConfigError(
                "gateways and shared uplinks exclude each other",
                "a gateway has its site's uplink for itself",
            )
        for kind in self.kinds:
            if not kind.step_s > 0:
                raise ConfigError(
                    f"device '{kind.device.name}' has no speed that could be simulated",
                    "name a board (device=raspberry-pi-4b), or say pace_s=0.02",
                )


@dataclass(frozen=True)
class Answer:
    """How that fleet does. Seconds, bytes and fractions; a step's figures are means over members.

    The whole run ends when the last reply has been applied. `wait_share` is of the whole run,
    `steady_wait_share` of its second half without that end.
    """

    members: int
    rounds: int
    steps: int
    delay: int
    """Local steps, in the last round."""
    seconds: float
    round_seconds: tuple[float, ...]
    """From one round's end to the next on an average member."""
    seconds_per_step: float
    seconds_per_step_median: float
    seconds_per_step_p95: float
    compute_s: float
    wait_s: float
    wait_share: float
    steady_wait_share: float
    speed_up: float
    """Steps a second of the whole fleet, against one member that trains alone."""
    member_sent_bytes: int
    member_received_bytes: int
    hub_received_bytes_per_s: float
    """Of one shard."""
    hub_sent_bytes_per_s: float
    busy: dict[str, float]
    """Of each resource, the part of the time in which its busiest instance works."""
    late: int
    """Contributions that a deadline closed a round without."""
    bottleneck: str
    left_out: str
    """In words: what members would do that these figures leave out; empty: nothing."""

    @property
    def efficiency(self) -> float:
        """Speed-up over members: 1 is what no fleet can beat."""
        return self.speed_up / self.members


def answer(question: CapacityQuestion) -> Answer:
    """Plan. Deterministic in the question. Raises ConfigError, NetworkError."""
    question.check()
    return _Run(question).run()


def answers(question: CapacityQuestion, counts: Sequence[int] = COUNTS) -> list[Answer]:
    """The same fleet with other numbers of members; gateways and sites are at most as many."""
    return [answer(_of_size(question, count)) for count in counts]


def _of_size(question: CapacityQuestion, members: int) -> CapacityQuestion:
    hubs = dataclasses.replace(
        question.hubs,
        gateways=min(question.hubs.gateways, members),
        uplinks=min(question.hubs.uplinks, members),
    )
    quorum = min(question.quorum, members)
    return dataclasses.replace(question, members=members, hubs=hubs, quorum=quorum)


# -- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """A vector on its way: messages (its parts) and their bytes in a TCP stream."""

    parts: int
    bytes: int


def contribution(elements: int, codec: Codec, ratio: float = 0.0) -> Parcel:
    """What a member sends for a round, as `messages.pack` and ZMTP frame it."""
    example = Contribute(
        round=100, part=0, parts=1, weight=1.0, applied=100, checksum=_U64, wanted_delay=20,
        payload=b"",
    )  # fmt: skip
    return _parcel(example, elements, codec, ratio)


def reply(elements: int, codec: Codec, ratio: float = 0.0) -> Parcel:
    """What the hub sends back to each member."""
    example = Reply(
        round=100, part=0, parts=1, members=100, delay=20, checksum=_U64, settled=True,
        payload=b"",
    )  # fmt: skip
    return _parcel(example, elements, codec, ratio)


def _parcel(example: Message, elements: int, codec: Codec, ratio: float) -> Parcel:
    kind, header, _ = (memoryview(frame).nbytes for frame in pack(example))
    framing = sum(size + _frame_bytes(size) for size in (kind, header))
    total = 0
    for size, count in _payloads(elements, codec, ratio):
        total += count * (framing + size + _frame_bytes(size))
    return Parcel(-(-elements // codec.part_elements), total)


def _payloads(elements: int, codec: Codec, ratio: float) -> list[tuple[int, int]]:
    """(bytes, how many) of the parts' payloads."""
    whole, rest = divmod(elements, codec.part_elements)
    found = [(codec.part_elements, whole), (rest, 1 if rest else 0)]
    if ratio:
        return [(max(1, math.ceil(4 * size / ratio)), n) for size, n in found if n]
    return [(codec.max_bytes(size), n) for size, n in found if n]


def _frame_bytes(size: int) -> int:
    """ZMTP 3.1: a flag, and a length of one byte or eight."""
    return 2 if size < 256 else 9


# -- one run --------------------------------------------------------------------------------------


class _Tier:
    """Hubs that each serve a part of the children: what comes in, the merge, what goes out."""

    def __init__(
        self,
        children: int,
        hubs: int,
        parcels: tuple[Parcel, Parcel],
        rate_mbit: float,
        speed: Hubs,
        elements: int,
    ) -> None:
        """`parcels` come in and go out, each hub merges vectors of so many elements."""
        self._up, self._down = parcels
        merge = 4 * elements / speed.merge_bytes_per_s if speed.merge_bytes_per_s else 0.0
        self._merge_s = merge
        self.taking = Ports(children, hubs, wire_bytes(self._up.bytes) * _byte_s(rate_mbit))
        self.merging = Ports(children, hubs, self._up.parts * speed.message_s + merge)
        self._each_s = wire_bytes(self._down.bytes) * _byte_s(rate_mbit)
        self._closed = np.full(hubs, -math.inf)
        self._given = np.full(hubs, -math.inf)
        self._rounds = 0

    @property
    def giving_s(self) -> float:
        """What the port of the busiest hub was busy with sending."""
        return float(self.taking.sizes.max()) * self._each_s * self._rounds

    @property
    def working_s(self) -> float:
        """What the processor of the busiest hub was busy."""
        return self.merging.busy_s + self._merge_s * self._rounds

    def take(self, first: Array, last: Array) -> tuple[Array, Array]:
        """When each child's contribution is merged: (begin, end)."""
        first, last = self.taking.serve(first, last)
        return self.merging.serve(first, last, self.merging.service_s / self._up.parts)

    def close(self, ready: Array, quorum: int, deadline_s: float) -> tuple[Array, int]:
        """When each hub has closed its round, and how many contributions are late for it."""
        rows = self.taking.grid(ready)
        whole = np.where(np.isfinite(rows), rows, -math.inf).max(axis=1)
        opened = rows.min(axis=1)
        closed = whole
        overdue = whole - opened > deadline_s
        if overdue.any():
            enough = np.partition(rows, quorum - 1, axis=1)[:, quorum - 1]
            closed = np.where(overdue, np.maximum(opened + deadline_s, enough), whole)
        self._closed = np.maximum(closed, self._closed)
        late = int(np.count_nonzero(ready > self._closed[self.taking.port]))
        return self._closed + self._merge_s, late

    def give(self, closed: Array) -> tuple[Array, Array]:
        """When each child's reply leaves its hub: (begin, end). All first parts go first."""
        self._rounds += 1
        ports, parts = self.taking, self._down.parts
        begin = np.maximum(closed, self._given)
        self._given = begin + ports.sizes * self._each_s
        ahead = (ports.sizes * ((parts - 1) / parts))[ports.port]
        turn = ports.rank / parts
        start = begin[ports.port]
        return start + turn * self._each_s, start + (ahead + turn + 1 / parts) * self._each_s


@dataclass(frozen=True)
class _Flight:
    """A round that was submitted and not yet replied to. Arrays over members."""

    step: int
    submitted: Array
    arrives: Array
    delay: int
    """In force once this round's reply is applied."""


class _Run:
    """The state of one plan. Arrays over members: `now`, the time at which each one is."""

    def __init__(self, question: CapacityQuestion) -> None:
        self.question = question
        hubs, exchange, members = question.hubs, question.exchange, question.members
        kinds = [question.kinds[i % len(question.kinds)] for i in range(members)]
        rng, *rngs = np.random.default_rng(question.seed).spawn(5)
        self.steps = StepTimesOfMany([k.device for k in kinds], [k.step_s for k in kinds], rng)
        self.whole = _parcels(exchange, 1)
        self.share = _parcels(exchange, hubs.shards)
        connections = 1 if hubs.gateways else hubs.shards
        far_s = hubs.uplink.rtt_ms / 1000
        trips = np.array([k.network.rtt_ms for k in kinds]) / 1000
        trips += far_s if hubs.uplinks else 0.0
        self.up = AccessStreams([k.network.up for k in kinds], trips, rngs[0], connections)
        self.down = AccessStreams([k.network.down for k in kinds], trips, rngs[1], connections)
        farthest_s = float(trips.max())
        children = hubs.gateways or members
        part = -(-exchange.elements // hubs.shards)
        self.root = _Tier(children, 1, self.share, hubs.rate_mbit, hubs, part)
        self.sites: _Tier | None = None
        if hubs.gateways:
            near = hubs.gateway_rate_mbit
            self.sites = _Tier(members, hubs.gateways, self.whole, near, hubs, exchange.elements)
        # Between a site and the hub: a connection of the gateway's own, or a line that is shared.
        far, trips = [hubs.uplink] * hubs.gateways, np.full(hubs.gateways, far_s)
        self.far_up = AccessStreams([f.up for f in far], trips, rngs[2], hubs.shards)
        self.far_down = AccessStreams([f.down for f in far], trips, rngs[3], hubs.shards)
        self.shared: tuple[Ports, Ports] | None = None
        if hubs.uplinks:
            self.shared = (
                Ports(members, hubs.uplinks, self._line_s(0, hubs.uplink.up.mean_rate_mbit)),
                Ports(members, hubs.uplinks, self._line_s(1, hubs.uplink.down.mean_rate_mbit)),
            )
        self.now = np.zeros(members)
        self.computed = np.zeros(members)
        self.waited = np.zeros(members)
        self.wanted = max(1, math.ceil(MARGIN * farthest_s / float(np.max(self.steps.seconds))))
        steps = question.rounds * exchange.every
        self.agreed = AgreedDelay(exchange.every, exchange.delay, steps)
        self.delay = self.agreed.delay
        self.late = 0
        self.trips: list[float] = []
        self.spreads: list[float] = []

    def _line_s(self, way: int, rate_mbit: float) -> float:
        return wire_bytes(self._bytes()[way]) * _byte_s(rate_mbit)

    def _bytes(self) -> tuple[int, int]:
        """What a member sends and receives in a round."""
        if self.question.hubs.gateways:
            return self.whole[0].bytes, self.whole[1].bytes
        shards = self.question.hubs.shards
        return shards * self.share[0].bytes, shards * self.share[1].bytes

    # -- the rounds --------------------------------------------------------------------------------

    def run(self) -> Answer:
        """All steps of all members, round by round."""
        every, rounds = self.question.exchange.every, self.question.rounds
        flights: deque[_Flight] = deque()
        ends, waits = [], []
        ahead, delay = 0, self.delay
        for step in range(1, rounds * every + 1):
            ahead += 1
            if step % every == 0:
                ahead = self._compute(ahead)
                flights.append(self._exchange(step))
            while flights and step - flights[0].step >= delay:
                ahead = self._compute(ahead)
                delay = self._apply(flights.popleft(), delay)
            if step % every == 0:
                ends.append(float(self.now.mean()))
                waits.append(float(self.waited.mean()))
        for flight in flights:
            self._wait(flight.arrives)
        return self._answer(ends, waits, delay)

    def _compute(self, steps: int) -> int:
        if steps:
            spent = self.steps.take(steps)
            self.now = self.now + spent
            self.computed += spent
        return 0

    def _wait(self, arrives: Array) -> None:
        self.waited += np.maximum(arrives - self.now, 0)
        self.now = np.maximum(self.now, arrives)

    def _apply(self, flight: _Flight, delay: int) -> int:
        """Wait for a reply and take it in; the delay from now on."""
        if not self.question.exchange.delay.is_measured:
            self._wait(flight.arrives)
            return delay
        # Replies are taken in at a step's end, unless somebody waits for them.
        took = flight.arrives - flight.submitted
        steps = took / self.steps.seconds
        steps = np.where(flight.arrives > self.now, steps, np.ceil(steps))
        self.wanted = max(1, math.ceil(MARGIN * float(steps.max())))
        self._wait(flight.arrives)
        return flight.delay

    def _exchange(self, step: int) -> _Flight:
        """One round, from its submission to the arrival of its replies."""
        question, submitted = self.question, self.now
        first, last = self._up(submitted)
        first, last = self.root.take(first, last)
        closed, late = self.root.close(last, question.quorum, question.deadline_s)
        arrives = self._down(*self.root.give(closed))
        self.late += late
        self.trips.append(float((arrives - submitted).min()))
        self.spreads.append(float(submitted.max() - submitted.mean()))
        if question.exchange.delay.is_measured and is_turn(step // question.exchange.every - 1):
            self.delay = min(self.wanted, self.agreed.most)
        return _Flight(step, submitted, arrives, self.delay)

    def _up(self, at: Array) -> tuple[Array, Array]:
        """Members' contributions, or those of their gateways, up to the hub's port."""
        first, last = self.up.send(at, self._bytes()[0])
        if self.shared is not None:
            first, last = self.shared[0].serve(first, last)
            delay = self.question.hubs.uplink.up.mean_delay_ms / 1000
            return first + delay, last + delay
        if self.sites is None:
            return first, last
        _, merged = self.sites.take(first, last)
        closed, late = self.sites.close(merged, 1, self.question.deadline_s)
        self.late += late
        return self.far_up.send(closed, self.question.hubs.shards * self.share[0].bytes)

    def _down(self, begin: Array, end: Array) -> Array:
        """Replies from the hub's port down to the members; when each is there."""
        if self.shared is not None:
            begin, end = self.shared[1].serve(begin, end)
            delay = self.question.hubs.uplink.down.mean_delay_ms / 1000
            begin, end = begin + delay, end + delay
        if self.sites is not None:
            size = self.question.hubs.shards * self.share[1].bytes
            _, there = self.far_down.forward(begin, end, size)
            begin, end = self.sites.give(there)
        return self.down.forward(begin, end, self._bytes()[1])[1]

    # -- the answer --------------------------------------------------------------------------------

    def _answer(self, ends: list[float], waits: list[float], delay: int) -> Answer:
        question = self.question
        every, rounds = question.exchange.every, question.rounds
        seconds, steps = float(self.now.mean()), rounds * every
        durations = np.diff([0.0, *ends])
        compute, wait = float(self.computed.mean()), float(self.waited.mean())
        half = int(rounds * _STEADY)
        lasted = ends[-1] - (ends[half - 1] if half else 0.0)
        steady = (waits[-1] - (waits[half - 1] if half else 0.0)) / lasted
        busy = self._busy(seconds)
        sent, received = self._bytes()
        children = question.hubs.gateways or question.members
        found = Answer(
            members=question.members,
            rounds=rounds,
            steps=steps,
            delay=delay,
            seconds=seconds,
            round_seconds=tuple(float(d) for d in durations),
            seconds_per_step=seconds / steps,
            seconds_per_step_median=float(np.median(durations)) / every,
            seconds_per_step_p95=float(np.percentile(durations, 95)) / every,
            compute_s=compute / steps,
            wait_s=wait / steps,
            wait_share=wait / seconds,
            steady_wait_share=steady,
            speed_up=question.members * compute / seconds,
            member_sent_bytes=sent * rounds,
            member_received_bytes=received * rounds,
            hub_received_bytes_per_s=children * self.share[0].bytes * rounds / seconds,
            hub_sent_bytes_per_s=children * self.share[1].bytes * rounds / seconds,
            busy=busy,
            late=self.late,
            bottleneck="",
            left_out=self._not_modelled(),
        )
        return dataclasses.replace(found, bottleneck=self._bottleneck(found))

    def _not_modelled(self) -> str:
        """In words: what members would do that the figures leave out."""
        every, delay = self.question.exchange.every, self.question.exchange.delay
        left_out = []
        if delay.is_measured and self.wanted > self.agreed.most:
            left_out.append(
                f"members would make rounds longer than {every} steps, which these figures leave "
                f"out (try every={2 * every})"
            )
        if self.question.exchange.lands and every + self.delay > CLOSE:
            left_out.append(
                "the landing at the end of a run, of which each round waits for its reply, is left "
                "out (landing=0)"
            )
        return "; ".join(left_out)

    def _busy(self, seconds: float) -> dict[str, float]:
        """What is in use, by name; what has no limit is never busy."""
        used = {
            "hub's port, receiving": self.root.taking.busy_s,
            "hub's port, sending": self.root.giving_s,
            "hub's processor": self.root.working_s,
            "members' uplinks": float(self.up.busy_s.max()),
            "members' downlinks": float(self.down.busy_s.max()),
        }
        if self.sites is not None:
            used |= {
                "gateways' ports, receiving": self.sites.taking.busy_s,
                "gateways' ports, sending": self.sites.giving_s,
                "gateways' processors": self.sites.working_s,
                "gateways' uplinks": float(self.far_up.busy_s.max()),
                "gateways' downlinks": float(self.far_down.busy_s.max()),
            }
        if self.shared is not None:
            used |= {
                "sites' uplinks": self.shared[0].busy_s,
                "sites' downlinks": self.shared[1].busy_s,
            }
        return {name: min(busy / seconds, 1.0) for name, busy in used.items()}

    def _bottleneck(self, found: Answer) -> str:
        """In words: what to change first."""
        trip, spread = float(np.median(self.trips)), float(np.median(self.spreads))
        # A long delay puts the waiting off to the end of the run; one round trip is no sign of it.
        waits = max(found.steady_wait_share, found.wait_share - 2 * self.trips[0] / found.seconds)
        if waits < 0.02:
            return f"computing: under way members wait {100 * waits:.1f} % of the time"
        name, busy = max(found.busy.items(), key=lambda item: item[1])
        if busy > 0.6:
            return f"{name}: {100 * busy:.0f} % busy"
        if spread > trip:
            return f"slow members: the last one submits {spread:.3g} s after the average one"
        covers = found.delay * float(self.steps.seconds.mean())
        return f"the round trip of {trip:.3g} s, of which the delay covers {covers:.3g} s"


def _parcels(exchange: ExchangeSizes, shards: int) -> tuple[Parcel, Parcel]:
    """A contribution to one of so many hubs, and its reply."""
    elements = -(-exchange.elements // shards)
    return (
        contribution(elements, exchange.codec, exchange.ratio),
        reply(elements, exchange.reply_codec, exchange.reply_ratio),
    )


def _byte_s(rate_mbit: float) -> float:
    return 8e-6 / rate_mbit if rate_mbit else 0.0
