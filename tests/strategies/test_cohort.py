"""Who is drawn for a round: one pure function, uniform, by samples, or each member by itself."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.extensions import Extension
from edgetrain.strategies.cohort import Cohort
from edgetrain.testing import check_sampling

ROUNDS = 10_000


def counts(cohort, samples=()):
    found = [cohort.drawn(round, samples) for round in range(ROUNDS)]
    return np.bincount(list(itertools.chain(*found)), minlength=cohort.members), found


def test_members_are_drawn_uniformly():
    times, found = counts(Cohort(7, 20, 5))
    assert {len(set(each)) for each in found} == {5}
    assert all(each == tuple(sorted(each)) for each in found)
    # Without replacement counts vary by (1 - 5/20) of what the chi-square of 19 degrees says.
    chi2 = float(((times - 2500) ** 2 / 2500).sum()) / (1 - 5 / 20) * 19 / 20
    assert 4.9 < chi2 < 43.8, "one in a thousand on either side"
    pairs = np.bincount([a * 20 + b for each in found for a, b in itertools.combinations(each, 2)])
    assert abs(pairs[pairs > 0] - ROUNDS * 20 / 380).max() < 5 * (ROUNDS * 20 / 380) ** 0.5


def test_rosters_follow_from_seed_and_round_alone():
    one = Cohort(7, 1000, 10)
    assert one.drawn(3) == Cohort(7, 1000, 10).drawn(3) == (
        118, 133, 201, 389, 424, 544, 654, 807, 816, 996,
    )  # fmt: skip  # as any Python draws them
    assert one.drawn(3) != one.drawn(4) != Cohort(8, 1000, 10).drawn(4)
    assert len(Cohort(7, 1000, 10, extra=3).drawn(3)) == 13
    assert Cohort(1, 5, 5).drawn(0) == Cohort(1, 5, 5, "poisson").drawn(0) == (0, 1, 2, 3, 4)


def test_each_member_is_drawn_by_itself():
    times, found = counts(Cohort(3, 20, 5, "poisson"))
    assert abs(times - 2500).max() < 5 * (2500 * 0.75) ** 0.5
    sizes = np.array([len(each) for each in found])
    assert sizes.mean() == pytest.approx(5, rel=0.02)
    assert sizes.var() == pytest.approx(20 * 0.25 * 0.75, rel=0.06)
    assert 0 in sizes


def test_members_are_drawn_by_their_samples():
    samples = [1, 2, 3, 4, 0]
    times, _ = counts(Cohort(3, 5, 1, "weighted"), samples)
    assert times / ROUNDS == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.0], abs=0.02)
    times, found = counts(Cohort(3, 5, 2, "weighted"), samples)
    assert {len(set(each)) for each in found} == {2}
    wanted = 0.4 + sum(each / 10 * 4 / (10 - each) for each in (1, 2, 3))
    assert times[3] / ROUNDS == pytest.approx(wanted, abs=0.02)


def test_of_those_that_are_there_each_set_is_as_likely():
    cohort, there = Cohort(3, 20, 5, "available"), [1, 4, 6, 7, 9, 12, 13, 15, 18, 19]
    found = [cohort.drawn_of(round, there, [1.0] * 10) for round in range(ROUNDS)]
    times = np.bincount([*itertools.chain(*found)], minlength=20)
    assert {len(set(each)) for each in found} == {5}
    assert times[there] == pytest.approx(5000, abs=5 * (ROUNDS * 0.25) ** 0.5)
    assert times.sum() == times[there].sum()
    assert cohort.drawn_of(7, there, [1.0] * 10) == found[7]
    assert cohort.drawn_of(7, there[:3], [1.0] * 3) == (1, 4, 6), "all, if they are fewer"
    everyone = range(20)
    assert cohort.drawn_of(7, everyone, [1.0] * 20) == Cohort(3, 20, 5).drawn(7)


def by_turns(round, members, weights, size, seed, step=1):
    """Whoever is there, one after the other."""
    return [members[(round * size + at * step) % len(members)] for at in range(size)]


def test_a_function_of_ones_own_draws(monkeypatch):
    check_sampling(lambda round, members, *rest: members[:3])
    monkeypatch.setitem(extensions.loaded, "own:by_turns", Extension(by_turns, sys, ""))
    cohort = Cohort(3, 20, 4, "own:by_turns", extra=1)
    assert cohort.drawn_of(2, range(20), [1.0] * 20) == (10, 11, 12, 13, 14)
    assert Cohort(3, 20, 2, "own:by_turns(3)").drawn_of(0, range(20), [1.0] * 20) == (0, 3)
    check_sampling("own:by_turns", Cohort(3, 20, 1))
    with pytest.raises(ConfigError, match="sampling 'own:by_turns', round 3: member 19 twice"):
        check_sampling("own:by_turns")


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ([3, 3], "sampling 'drawing', round 0: member 3 twice"),
        ([20], "member 20 (allowed are 0 to 19)"),
        ([-1], "member -1 (allowed are 0 to 19)"),
        ([2.5], "2.5 is no member's number"),
        ("m3", "'m' is no member's number"),
        (None, "sampling 'drawing': TypeError"),
        ([0, np.int64(1)], ""),
        ([], ""),
    ],
)
def test_rosters_that_cannot_be(drawn, said):
    def drawing(round, members, weights, size, seed):
        return drawn

    if not said:
        check_sampling(drawing)
        return
    with pytest.raises(ConfigError) as refused:
        check_sampling(drawing)
    assert said in str(refused.value)


def test_a_function_that_draws_by_chance_of_its_own_is_refused():
    chance = random.Random(1)
    with pytest.raises(ConfigError, match="round 0 has other members when it is drawn again"):
        check_sampling(lambda round, members, *rest: chance.sample(members, 1))


def test_one_that_outweighs_all_others_is_drawn_as_soon():
    """With others by their turn: a member says its own weight."""
    drawn = Cohort(3, 5, 2, "weighted").drawn(0, [1e300, 1, 1, 1e-300, 1])
    assert 0 in drawn
    assert len(drawn) == 2
