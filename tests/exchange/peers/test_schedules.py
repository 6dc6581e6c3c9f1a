"""Ring, butterfly and tree: their own order of sums, the same bits everywhere, near the star."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import BadPayload, ConfigError
from edgetrain.exchange.messages import NO_WEIGHT
from edgetrain.exchange.peers.schedules import (
    SHAPES,
    SumOrder,
    can_run,
    places_of,
    ring_order,
)
from edgetrain.exchange.peers.summing import Portions, Summing
from tests.fakes.circle import means

LONG = 10**6 + 1
SIZES = st.integers(1, 17).flatmap(
    lambda n: st.tuples(st.just(n), st.sampled_from([0, 1, n - 1, n, 100, 1000, 5003]))
)
WEIGHTS = st.lists(st.sampled_from([1.0, 2.0, 0.37, 1e6, NO_WEIGHT]), min_size=17, max_size=17)


def drawn(members, elements, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(elements).astype(np.float32) for _ in range(members)]


def halves(rows):
    """The sum of rows i and i + half, again and again, as a tree and a butterfly add."""
    whole = 1 << (len(rows).bit_length() - 1)
    rows = [
        row + rows[whole + i] if whole + i < len(rows) else row
        for i, row in enumerate(rows[:whole])
    ]
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [rows[i] + rows[i + half] for i in range(half)]
    return rows[0]


def around(rows, first):
    total = rows[first]
    for step in range(1, len(rows)):
        total = total + rows[(first + step) % len(rows)]
    return total


def naive(schedule, contributions, weights):
    """The formula of each topology, chunk by chunk."""
    shares = Portions(weights)
    rows = [x * share for x, share in zip(contributions, shares.first, strict=True)]
    if schedule.topology != "ring":
        return halves(rows) * shares.last
    chunks = [
        around([row[chunk] for row in rows], number) for number, chunk in enumerate(schedule.chunks)
    ]
    return np.concatenate(chunks) * shares.last


def star(contributions, weights):
    shares = [0.0 if weight <= NO_WEIGHT else weight for weight in weights]
    total = sum(shares) or 1.0
    return sum(x.astype(np.float64) * w for x, w in zip(contributions, shares, strict=True)) / total


@given(SIZES, st.sampled_from(SHAPES), WEIGHTS, st.integers(1, 200), st.randoms())
def test_all_end_with_the_bits_of_the_naive_order(size, topology, weights, segment, rng):
    members, elements = size
    schedule = SumOrder(topology, members, elements, segment)
    contributions = drawn(members, elements)
    before = [x.copy() for x in contributions]
    found, _ = means(schedule, contributions, weights[:members], rng.choice)
    expected = naive(schedule, contributions, weights[:members])
    for mean in found:
        assert mean.tobytes() == expected.tobytes()
    assert all(map(np.array_equal, contributions, before))


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("members", range(1, 18))
def test_near_the_star_for_any_number_of_members(topology, members):
    for elements in (0, 1, members - 1, 20_001):
        contributions = drawn(members, elements, seed=members)
        weights = [1.0 + (place % 3) for place in range(members)]
        found, _ = means(SumOrder(topology, members, elements, 1 << 12), contributions, weights)
        exact = star(contributions, weights)
        assert np.linalg.norm(found[0] - exact) <= 1e-6 * np.linalg.norm(exact)
        assert len({mean.tobytes() for mean in found}) == 1


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("members", [2, 5, 8])
def test_a_long_vector(topology, members):
    contributions = drawn(members, LONG)
    schedule = SumOrder(topology, members, LONG)
    found, sent = means(schedule, contributions, [1.0] * members)
    expected = naive(schedule, contributions, [1.0] * members)
    assert all(mean.tobytes() == expected.tobytes() for mean in found)
    exact = star(contributions, [1.0] * members)
    assert np.linalg.norm(found[0] - exact) <= 1e-6 * np.linalg.norm(exact)
    if topology == "ring":
        assert max(sent) <= 4 * (2 * (members - 1) * (LONG / members + 16))


@given(SIZES, WEIGHTS)
def test_a_tree_has_the_bits_of_a_butterfly(size, weights):
    members, elements = size
    contributions = drawn(members, elements)
    found = [
        means(SumOrder(topology, members, elements, 50), contributions, weights[:members])[0][0]
        for topology in ("tree", "butterfly")
    ]
    assert found[0].tobytes() == found[1].tobytes()


def test_bits_do_not_depend_on_the_segments():
    contributions = drawn(5, 999)
    found = [
        means(SumOrder(topology, 5, 999, segment), contributions, [1.0] * 5)[0][0].tobytes()
        for topology in SHAPES
        for segment in (1, 7, 1 << 17)
    ]
    assert len(set(found)) == 2  # the ring's, and the others'


def test_equal_weights_cost_no_multiplication_before_the_sum():
    shares = Portions([3.0] * 4)
    assert shares.first == [np.float32(1)] * 4
    assert shares.last == np.float32(0.25)


def test_weights_that_add_nothing():
    contributions = [np.full(5, 3.0, np.float32), np.full(5, 9.0, np.float32)]
    for topology in SHAPES:
        found, _ = means(SumOrder(topology, 2, 5), contributions, [1.0, NO_WEIGHT])
        assert found[1].tolist() == [3.0] * 5
        found, _ = means(SumOrder(topology, 2, 5), contributions, [NO_WEIGHT, NO_WEIGHT])
        assert found[1].tolist() == [0.0] * 5


@pytest.mark.parametrize("payload", [b"", b"\0" * 8, b"\0" * 21])
def test_a_segment_of_another_size_is_refused(payload):
    summing = Summing(SumOrder("ring", 2, 10), 1, np.zeros(10, np.float32), Portions([1.0, 1.0]))
    list(summing.sendable())
    with pytest.raises(BadPayload):
        summing.accept(payload)


@pytest.mark.parametrize(("topology", "members"), [("rign", 2), ("ring", 0)])
def test_what_is_no_schedule(topology, members):
    with pytest.raises(ConfigError):
        SumOrder(topology, members, 1)


# -- places ---------------------------------------------------------------------------------------


def works(order, can):
    return all(can(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True))


@given(st.integers(2, 7), st.data())
def test_a_ring_goes_around_pairs_that_cannot_connect(members, data):
    names = [f"m{i}" for i in range(members)]
    pairs = list(itertools.permutations(names, 2))
    lost = set(data.draw(st.lists(st.sampled_from(pairs))))

    def can(one, other):
        return (one, other) not in lost

    order = ring_order(names, can)
    there_is = any(works((names[0], *rest), can) for rest in itertools.permutations(names[1:]))
    assert (order is not None) == there_is
    if order is not None:
        assert sorted(order) == names
        assert works(order, can)
        assert can_run("ring", order, can)
    if works(names, can):
        assert order == tuple(names)


def test_a_large_ring_with_lost_pairs_is_found_soon():
    rng = random.Random(0)
    names = [f"m{i}" for i in range(100)]
    lost = {(a, b) for a in names for b in names if rng.random() < 0.3}
    order = ring_order(names, lambda a, b: (a, b) not in lost)
    assert order is not None
    assert works(order, lambda a, b: (a, b) not in lost)


def test_a_butterfly_and_a_tree_stay_where_they_are():
    names = ["a", "b", "c", "d"]
    assert places_of("butterfly", names, lambda a, b: True) == ("a", "b", "c", "d")
    assert places_of("butterfly", names, lambda a, b: (a, b) != ("a", "c")) is None
    assert places_of("tree", names, lambda a, b: (a, b) != ("b", "c")) == ("a", "b", "c", "d")
    assert places_of("ring", names, lambda a, b: (a, b) != ("a", "b")) == ("a", "c", "b", "d")
    assert ring_order(["a"], lambda a, b: False) == ("a",)
    assert ring_order(["a", "b"], lambda a, b: False) is None
