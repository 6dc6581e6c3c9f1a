"""One averaging by topology: closed forms in the corners, and what must never make it sooner."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import codecs
from edgetrain.exchange.delay import Delay
from edgetrain.fleet import devices
from edgetrain.fleet.networks import Direction, Profile
from edgetrain.jobs.capacity.averaging import Hubs
from edgetrain.jobs.capacity.estimate import CapacityQuestion, Kind, answer, averaging_of
from edgetrain.jobs.capacity.parcels import ExchangeSizes, contribution
from edgetrain.jobs.job import COLLECTIVES

FP32 = codecs.parse("fp32")
BOARD = devices.load("raspberry-pi-4b")
CALM = dataclasses.replace(
    BOARD, step_jitter=None, slow_chance=None, throttle_after_s=None, throttle_factor=None
)
HEADERS = 1514 / 1448
"""Bytes on the line for a byte of a long message."""
TOPOLOGIES = ("star", "direct", *COLLECTIVES)


def link(rtt_ms, rate_mbit):
    """A way of half the round trip, whose rate is that of payload."""
    way = Direction(delay_ms=rtt_ms / 2, rate_mbit=rate_mbit * HEADERS)
    return Profile("link", "", way, way)


def question(topology, elements, rtt_ms, rate_mbit, *, members=8, port=1000.0, **hubs):
    """Any two machines are `rtt_ms` apart, the hub too."""
    exchange = ExchangeSizes(1, Delay(0), elements, FP32, FP32)
    kind = Kind(CALM, 0.05, link(rtt_ms / 2, rate_mbit))
    hubs = Hubs(link=link(rtt_ms / 2, port), **hubs)
    return CapacityQuestion(members, (kind,), exchange, hubs, topology=topology, rounds=4)


def seconds(asked, is_open=True):
    averaging = averaging_of(asked, np.random.default_rng(0).spawn(4), is_open)
    return float(averaging.average(np.zeros(asked.members)).max())


# -- corners --------------------------------------------------------------------------------------

CLOSED = [
    # bytes, trip, rate: star, 4 hubs, direct, ring
    (40_000, 200, 50, "0.21 0.21 0.21 1.8"),
    (1_300_000, 200, 50, "0.62 0.62 0.56 2.2"),
    (44_000_000, 0.2, 1000, "5.6 1.4 0.62 0.62"),
]


def closed_forms(size, trip_s, byte_s, port_s):
    """Seconds of 8 members, in rounds of trips and bytes: windows are open, headers are none. The
    parts for four hubs share a member's line. A ring's votes, and the word that it counts, are two
    trips to the hub."""
    one_way, whole = trip_s / 2, size * byte_s
    star = trip_s + 2 * max(whole, 8 * size * port_s)
    hubs = trip_s + 2 * max(whole, 8 * size / 4 * port_s)
    parts = 2 * 7 / 8 * whole
    return [star, hubs, trip_s + parts, 18 * one_way + parts]


@pytest.mark.parametrize(("size", "trip_ms", "rate", "printed"), CLOSED)
def test_open_windows_are_the_closed_forms_to_two_digits(size, trip_ms, rate, printed):
    asked = [("star", 1), ("star", 4), ("direct", 1), ("ring", 1)]
    found = [
        seconds(question(name, size // 4, trip_ms, rate, shards=shards)) for name, shards in asked
    ]
    assert [f"{s:.2g}" for s in found] == printed.split()
    assert found == pytest.approx(closed_forms(size, trip_ms / 1e3, 8e-6 / rate, 8e-9), rel=0.02)


@pytest.mark.parametrize(("size", "trip_ms", "rate"), [row[:3] for row in CLOSED])
def test_a_butterfly_and_a_tree_hand_segments_on_while_the_rest_of_a_step_is_on_its_way(
    size, trip_ms, rate
):
    """They take less than their steps one after the other, and no less than their trips, and than
    what the busiest line carries: of a tree of eight members three vectors each way. There a mean
    goes to three at once, then to two."""
    trip_s, whole = trip_ms / 1e3, size * 8e-6 / rate
    for name, line, steps in (("butterfly", 14 / 8, 14 / 8), ("tree", 3, 9)):
        found = seconds(question(name, size // 4, trip_ms, rate))
        trips = 5 * trip_s  # two of them to the hub
        least = max(trips, 2 * trip_s + line * whole)
        assert least < 1.001 * found < 1.02 * (trips + steps * whole), name


def test_from_idle_a_message_takes_the_flights_of_slow_start():
    """28 segments take two flights, of 10 and 20, each way."""
    for size, trips in ((14_000, 1), (40_000, 3)):
        found = seconds(question("star", size // 4, 200, 0.0, port=0.0), is_open=False)
        assert found == pytest.approx(0.2 * trips, rel=0.01)
    idle = seconds(question("star", 325_000, 200, 50), is_open=False)
    assert f"{idle:.2g}" == "2.7"


def test_a_part_of_the_vector_starts_sooner_than_the_whole():
    whole, four = (
        seconds(question("star", 10_000, 200, 50, shards=n), is_open=False) for n in (1, 4)
    )
    assert f"{whole:.2g} {four:.2g}" == "0.61 0.21"


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 13])
def test_a_collective_takes_its_trips_where_bytes_cost_nothing(name, members):
    found = seconds(question(name, 100, 200, 0.0, members=members))
    folds = 0 if members & (members - 1) == 0 else 2
    trips = {
        "ring": 2 * (members - 1),
        "butterfly": 2 * int(math.log2(members)) + folds,
        "tree": 2 * max(member.bit_count() for member in range(members)),
    }
    assert found == pytest.approx(0.1 * (trips[name] + 4), abs=1e-9)  # two trips to the hub


def test_members_that_average_directly_with_one_reducer_are_a_star_around_it():
    """All but the reducer's own contribution, which stays where it is."""
    asked = question("direct", 40_000, 200, 50)
    around = dataclasses.replace(asked, reducers=(0,))
    star = question("star", 40_000, 200, 50, members=7, port=50)
    assert seconds(around) == pytest.approx(seconds(star), rel=0.02)


def test_what_a_member_sends_directly_is_each_part_but_its_own_twice():
    averaging = averaging_of(question("direct", 80_000, 200, 50), np.random.default_rng(0).spawn(4))
    part = contribution(10_000, FP32).bytes
    assert averaging.sent_bytes == pytest.approx(14 * part, rel=0.001)
    assert averaging.received_bytes == pytest.approx(14 * part, rel=0.001)


# -- more is never sooner -------------------------------------------------------------------------


@given(
    st.sampled_from(TOPOLOGIES), st.integers(2, 9), st.integers(1, 300_000), st.integers(0, 400),
    st.sampled_from([0.0, 5.0, 50.0, 500.0]), st.booleans(),
    st.sampled_from(["slower", "farther", "longer"]),
)  # fmt: skip
def test_a_slower_link_a_farther_one_and_more_bytes_never_take_less(
    topology, members, elements, rtt_ms, rate, is_open, what
):
    asked = question(topology, elements, rtt_ms, rate, members=members)
    other = {
        "slower": question(topology, elements, rtt_ms, (rate or 1000) / 2, members=members),
        "farther": question(topology, elements, rtt_ms + 50, rate, members=members),
        "longer": question(topology, 2 * elements, rtt_ms, rate, members=members),
    }[what]
    assert seconds(other, is_open) >= seconds(asked, is_open) - 1e-9


@given(st.sampled_from(TOPOLOGIES), st.integers(1, 9), st.integers(1, 100_000))
def test_slow_start_never_takes_less(topology, members, elements):
    asked = question(topology, elements, 100, 20, members=members)
    assert seconds(asked, is_open=False) >= seconds(asked) - 1e-9


def test_members_at_two_sites_pay_for_the_line_between_them():
    near = question("direct", 100_000, 0, 0.0, members=4)
    homes = {"homes": (0, 0, 1, 1), "lines": (link(20, 10),) * 2, "uplinks": 2}
    far = question("direct", 100_000, 0, 0.0, members=4, **homes)
    # Each way, four parts of 100 kB leave each site and four enter it.
    assert seconds(far) - seconds(near) == pytest.approx(2 * (0.02 + 4e5 * 8e-7), rel=0.01)


# -- and in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_run_without_a_delay_waits_for_each_averaging(topology):
    asked = question(topology, 1000, 200, 50)
    found = answer(asked)
    assert found.averaging_s == pytest.approx(seconds(asked), rel=0.02)
    assert found.wait_s == pytest.approx(found.averaging_s, rel=0.1)
