"""Laws of `codec = "auto"` at the hub, in a fleet that is nothing but times and bytes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.codecs.auto import FLOOR, RUNGS, element_bytes, finest_rung, lowest_rung
from edgetrain.exchange.delay import MARGIN
from edgetrain.exchange.hub.delay import Wish
from edgetrain.exchange.hub.density import LEAP, AgreedDensity, rung_for, spare_s


class Timed:
    """Members over links of `rates` bytes a second; one round is in flight. `busy_s`: how much
    later than the others each submits."""

    def __init__(self, rates, elements, *, local_steps=5, step_s=0.05, latency_s=0.2, busy_s=None):
        self.rates, self.elements, self.local_steps = rates, elements, local_steps
        self.step_s, self.latency_s = step_s, latency_s
        self.busy_s = busy_s or [0.0] * len(rates)
        self.density, self.rung = AgreedDensity(FLOOR), lowest_rung(FLOOR)
        self.rungs, self.told, self.sizes = [], [], []

    def run(self, rounds, most_delay=1000):
        for round in range(len(self.rungs), len(self.rungs) + rounds):
            size = round_size = int(self.elements * element_bytes(self.rung))
            self.sizes.append(round_size)
            wishes, now = [], 10.0 * round + max(self.busy_s)
            for i, rate in enumerate(self.rates):
                trip = self.latency_s
                if round:
                    trip += 2 * self.sizes[round - 1] / rate + now - (10.0 * round + self.busy_s[i])
                steps = math.ceil(MARGIN * trip / self.step_s)
                arrived = 10.0 * round + self.busy_s[i]
                wishes.append(Wish(f"m{i}", steps, self.step_s, round, arrived, size))
            self.rung, told = self.density.agree(
                round, wishes, now, rung=self.rung, elements=self.elements, reply_bytes=size,
                local_steps=self.local_steps, most_delay=most_delay,
            )  # fmt: skip
            self.rungs.append(self.rung)
            self.told += [told] if told else []
        return self


@given(
    st.floats(1e3, 1e10), st.floats(1, 1e4), st.integers(1, 10**8), st.floats(0, 100),
    st.floats(FLOOR, 1),
)  # fmt: skip
def test_a_faster_link_never_gets_less(rate, times, elements, seconds, floor):
    rung = rung_for(elements, rate, seconds, floor)
    assert rung_for(elements, rate * times, seconds, floor) <= rung
    assert rung_for(elements, rate, seconds * times, floor) <= rung
    assert rung <= lowest_rung(floor)


@given(st.integers(1, 100), st.floats(1e-3, 10), st.floats(0, 10), st.integers(0, 1000))
def test_messages_have_no_longer_than_the_steps_of_a_round(local_steps, step_s, latency_s, delay):
    spare = spare_s(local_steps, step_s, latency_s, delay)
    assert 0 <= spare <= local_steps * step_s
    assert spare_s(local_steps, step_s, latency_s, 0) == local_steps * step_s, (
        "replies are waited for anyway"
    )
    if delay:
        assert spare <= max(delay * step_s - latency_s, 0.1 * latency_s + 1e-9)
        assert spare_s(local_steps, step_s, latency_s, delay + 1) >= spare


@given(st.floats(1e3, 1e9), st.integers(1000, 10**7))
def test_it_ends_on_a_rung_that_the_link_carries_and_gets_there_by_leaps(rate, elements):
    found = Timed([rate], elements).run(60)
    sizes = [element_bytes(r) for r in [lowest_rung(FLOOR), *found.rungs]]
    assert all(b <= LEAP * a for a, b in itertools.pairwise(sizes))
    # A trip is known to a step or two of the five that a round has.
    assert rung_for(elements, rate, 0.25 * 0.5, FLOOR) >= found.rung
    assert found.rung >= rung_for(elements, rate, 0.25 * 1.7, FLOOR)


def test_a_link_that_carries_everything_is_dense_within_ten_rounds():
    found = Timed([12.5e6] * 3, 10_000).run(10)
    assert found.rung == 0
    assert len(found.told) == len({*found.rungs}) - 1, "one line for each change"
    assert "fp16 (" in found.told[-1]


def test_the_slowest_link_decides_and_is_named():
    found = Timed([1e9, 125e3, 1e9], 100_000).run(30)
    alone = Timed([125e3], 100_000).run(30)
    assert found.rung == alone.rung > 0
    assert " m1, the slowest member" in found.told[-1]
    assert "would take" in found.told[-1]


def test_a_member_that_waits_for_slow_others_has_no_slow_link():
    found = Timed([1e9, 1e9], 100_000, busy_s=[0.0, 3.0]).run(12)
    assert found.rung == 0


def test_a_link_that_becomes_slow_gets_less_and_is_tried_more_and_more_rarely():
    found = Timed([1e9], 1_000_000).run(12)
    assert found.rung == 0
    found.rates = [125e3]
    found.run(60)
    assert found.rung >= finest_rung(1_000_000, 125e3 * 0.25 / 2, FLOOR) - 1
    ups = [i for i in range(13, 72) if found.rungs[i] < found.rungs[i - 1]]
    pauses = [b - a for a, b in itertools.pairwise(ups)]
    assert all(b > a for a, b in itertools.pairwise(pauses))
    assert len(ups) < 6


def test_where_nothing_fits_the_floor_is_told_once():
    found = Timed([100.0], 1_000_000).run(20)
    assert found.rungs == [lowest_rung(FLOOR)] * 20
    (told,) = found.told
    assert told.startswith(f"{RUNGS[-1].name}: at {RUNGS[-2].name} ")
    assert " would take " in told


@pytest.mark.parametrize("most_delay", [0, 4, 5, 1000])
def test_what_a_run_can_bear_bounds_it(most_delay):
    found = Timed([125e3], 100_000).run(40, most_delay)
    spare = spare_s(5, 0.05, 0.2, most_delay)
    # A trip is known to two steps: no finer than where two more would have been left.
    assert min(found.rungs[20:]) >= rung_for(100_000, 125e3, spare + 0.15, FLOOR)
