"""Whose data each member has, and what it counts for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain import strategies
from edgetrain.jobs.reading import load
from edgetrain.jobs.resolved import look_up, with_all_members
from edgetrain.jobs.shares import shares_of, weight_of


class Sized:
    """A task whose share number s holds 10 + s samples."""

    def samples(self, member, members):
        return 10 + member


@given(st.lists(st.booleans(), min_size=2, max_size=12), st.integers(1, 9))
def test_every_share_of_the_data_is_one_members(groups, shares):
    names = ", ".join("servers" if group else "host" for group in groups)
    job = with_all_members(load(None, [f"fleet.device={names}", f"servers.shares={shares}"]))
    found = [shares_of(job, index) for index in range(len(groups))]
    held = [share for each in found for share in each.held]
    assert held == list(range(found[0].of))
    assert [each.count for each in found] == [shares if group else 1 for group in groups]
    weighed = replace(job, strategy=replace(job.strategy, weighting="shares"))
    assert weight_of(weighed, Sized(), found[0]) == found[0].count
    assert weight_of(job, Sized(), found[0]) == sum(10 + share for share in range(found[0].count))


@pytest.mark.parametrize("name", strategies.TABLE)
def test_whether_members_are_weighed_travels_with_the_strategys_name(name):
    row = strategies.TABLE[name]
    given = row.spelling.replace("mu", "0.1").replace("P", "2").replace("alpha", "0.5")
    if row.parameters and all(each.default is not None for each in row.parameters):
        given = name
    for weighted in (False, True):
        try:
            found = replace(strategies.find(given), weighted=weighted)
        except Exception:
            pytest.skip("arguments without defaults")
        assert strategies.find(found.spelled) == found
        assert ("|" in found.spelled) == (weighted != row.weighted)


def test_weigh_says_whether_members_are_weighed_and_is_agreed_on():
    plain, alike = (
        load(None, ["strategy=fedavg"]),
        load(None, ["strategy=fedavg", "weighting=alike"]),
    )
    assert look_up(plain).strategy.weighted
    assert not look_up(alike).strategy.weighted
    assert look_up(load(None, ["strategy=dga", "weighting=shares"])).strategy.weighted
    assert plain.digest() != alike.digest()
