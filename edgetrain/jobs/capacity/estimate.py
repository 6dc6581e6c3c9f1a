"""Capacity planning: how long the rounds of a fleet take, without training anything.

Only sizes and times: a round of all members is a few array operations (`flows`), so that 100,000
members and 100 rounds take seconds. Gateways and hubs of which each has a part of the vector are
included. Approximations are named in docs/explanation/simulation.md. Pure: no file, no clock, no
torch, no greenlet; the same question has the same answer, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.delay import AgreedDelay, is_turn
from edgetrain.exchange.hub.final_sync import CLOSE
from edgetrain.fleet.devices import Device
from edgetrain.fleet.networks import Profile
from edgetrain.jobs.capacity.averaging import (
    Averaging,
    Collective,
    Direct,
    Hubs,
    Patience,
    Star,
)
from edgetrain.jobs.capacity.flows import Array, Random, StepTimesOfMany
from edgetrain.jobs.capacity.parcels import ExchangeSizes
from edgetrain.jobs.job import COLLECTIVES

MARGIN = 1.1
"""An automatic delay is so much longer than the round trip, as on a member."""

COUNTS = (10, 100, 1_000, 10_000, 100_000)
"""Fleets that a table of capacity compares."""

LONG_BYTES, VARYING_MS = 100_000, 4.0
"""Of what a member sends in a round, and of a link's jitter, from which on slow start's early end
(HyStart, 4 ms and more) makes rounds much longer: docs/explanation/simulation.md."""

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
class CapacityQuestion:
    """A fleet to plan for. Members are of these kinds, in turn."""

    members: int
    kinds: tuple[Kind, ...]
    exchange: ExchangeSizes
    hubs: Hubs = dataclasses.field(default_factory=Hubs)
    rounds: int = 100
    seed: int = 0
    quorum: int = 1
    deadline_s: float = 60.0
    topology: str = "star"
    """A star has `hubs`; with the others only their speed counts, and sites."""
    reducers: tuple[int, ...] = ()
    """Members that add up, of `direct`; (): all."""

    @property
    def links(self) -> list[Profile]:
        return [self.kinds[i % len(self.kinds)].network for i in range(self.members)]

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
    averaging_s: float
    """From the last contribution to the last reply, in the median of the second half's rounds."""
    speed_up: float
    """Steps a second of the whole fleet, against one member that trains alone."""
    member_sent_bytes: int
    member_received_bytes: int
    hub_received_bytes_per_s: float
    """Bytes a second received by one shard."""
    hub_sent_bytes_per_s: float
    busy: dict[str, float]
    """Share of the time of each resource's busiest instance."""
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
    hubs = question.hubs
    if members != question.members:
        hubs = dataclasses.replace(
            hubs,
            gateways=min(hubs.gateways, members),
            uplinks=min(hubs.uplinks, members),
            homes=(),
            lines=(),
        )
    quorum = min(question.quorum, members)
    return dataclasses.replace(question, members=members, hubs=hubs, quorum=quorum)


# -- one run --------------------------------------------------------------------------------------


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
        exchange, members = question.exchange, question.members
        kinds = [question.kinds[i % len(question.kinds)] for i in range(members)]
        rng, *rngs = np.random.default_rng(question.seed).spawn(5)
        self.steps = StepTimesOfMany([k.device for k in kinds], [k.step_s for k in kinds], rng)
        self.averaging = averaging_of(question, rngs)
        self.now = np.zeros(members)
        self.computed = np.zeros(members)
        self.waited = np.zeros(members)
        self.wanted = max(
            1, math.ceil(MARGIN * self.averaging.farthest_s / float(np.max(self.steps.seconds)))
        )
        steps = question.rounds * exchange.local_steps
        self.agreed = AgreedDelay(exchange.local_steps, exchange.delay, steps)
        self.delay = self.agreed.delay
        self.trips: list[float] = []
        self.spreads: list[float] = []
        self.averagings: list[float] = []

    # -- the rounds --------------------------------------------------------------------------------

    def run(self) -> Answer:
        local_steps, rounds = self.question.exchange.local_steps, self.question.rounds
        flights: deque[_Flight] = deque()
        ends, waits = [], []
        ahead, delay = 0, self.delay
        for step in range(1, rounds * local_steps + 1):
            ahead += 1
            if step % local_steps == 0:
                ahead = self._compute(ahead)
                question, submitted = self.question, self.now
                arrives = self.averaging.average(submitted)
                self.averagings.append(float(arrives.max() - submitted.max()))
                self.trips.append(float((arrives - submitted).min()))
                self.spreads.append(float(submitted.max() - submitted.mean()))
                exchange = question.exchange
                if exchange.delay.is_measured and is_turn(step // exchange.local_steps - 1):
                    self.delay = min(self.wanted, self.agreed.most)
                flights.append(_Flight(step, submitted, arrives, self.delay))
            while flights and step - flights[0].step >= delay:
                ahead = self._compute(ahead)
                delay = self._apply(flights.popleft(), delay)
            if step % local_steps == 0:
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

    # -- the answer --------------------------------------------------------------------------------

    def _answer(self, ends: list[float], waits: list[float], delay: int) -> Answer:
        question = self.question
        local_steps, rounds = question.exchange.local_steps, question.rounds
        seconds, steps = float(self.now.mean()), rounds * local_steps
        durations = np.diff([0.0, *ends])
        compute, wait = float(self.computed.mean()), float(self.waited.mean())
        half = int(rounds * _STEADY)
        lasted = ends[-1] - (ends[half - 1] if half else 0.0)
        steady = (waits[-1] - (waits[half - 1] if half else 0.0)) / lasted
        sent, received = self.averaging.sent_bytes, self.averaging.received_bytes
        come, go = self.averaging.hub_bytes
        found = Answer(
            members=question.members,
            rounds=rounds,
            steps=steps,
            delay=delay,
            seconds=seconds,
            round_seconds=tuple(float(d) for d in durations),
            seconds_per_step=seconds / steps,
            seconds_per_step_median=float(np.median(durations)) / local_steps,
            seconds_per_step_p95=float(np.percentile(durations, 95)) / local_steps,
            compute_s=compute / steps,
            wait_s=wait / steps,
            wait_share=wait / seconds,
            steady_wait_share=steady,
            averaging_s=float(np.median(self.averagings[half:])),
            speed_up=question.members * compute / seconds,
            member_sent_bytes=sent * rounds,
            member_received_bytes=received * rounds,
            hub_received_bytes_per_s=come * rounds / seconds,
            hub_sent_bytes_per_s=go * rounds / seconds,
            busy={n: min(s / seconds, 1.0) for n, s in self.averaging.busy_s().items()},
            late=self.averaging.late,
            bottleneck="",
            left_out=self._not_modelled(),
        )
        return dataclasses.replace(found, bottleneck=self._bottleneck(found))

    def _not_modelled(self) -> str:
        """In words: what members would do that the figures leave out."""
        local_steps, delay = self.question.exchange.local_steps, self.question.exchange.delay
        left_out = []
        if delay.is_measured and self.wanted > self.agreed.most:
            left_out.append(
                f"longer rounds than {local_steps} steps, which members would choose (try "
                f"local_steps={2 * local_steps})"
            )
        ways = (way for kind in self.question.kinds for way in (kind.network.up, kind.network.down))
        if self.averaging.sent_bytes > LONG_BYTES and any(w.jitter_ms >= VARYING_MS for w in ways):
            left_out.append(
                "slow start that ends early where delays vary, so that rounds may take twice as "
                "long (edgetrain simulate has it)"
            )
        if self.question.exchange.final_sync and local_steps + self.delay > CLOSE:
            left_out.append("the final synchronisation, whose rounds have no delay (final_sync=0)")
        return "; ".join(left_out)

    def _bottleneck(self, found: Answer) -> str:
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


def averaging_of(
    question: CapacityQuestion, rngs: Sequence[Random], is_open: bool = False
) -> Averaging:
    """The topology that a question asks about; `is_open`: its windows are as large as they get."""
    links, exchange, hubs = question.links, question.exchange, question.hubs
    if question.topology in COLLECTIVES:
        return Collective(question.topology, links, exchange, hubs, rngs[0], is_open)
    if question.topology == "direct":
        return Direct(links, exchange, hubs, rngs, question.reducers, is_open)
    patience = Patience(question.quorum, question.deadline_s)
    return Star(links, exchange, hubs, patience, rngs, is_open)
