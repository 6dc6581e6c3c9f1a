"""Who is away when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.fleet.presence import Absence, Presence, parse_absences

TIMES = st.floats(0, 100, allow_nan=False)


@given(
    st.lists(st.tuples(TIMES, TIMES), max_size=6),
    st.floats(0, 20).filter(lambda s: s == 0 or s > 0.5),
    st.integers(0, 5),
)
def test_absences_come_in_order_and_do_not_touch(planned, online_s, seed):
    presence = Presence(tuple(Absence(at, long) for at, long in planned), online_s, 3.0, seed)
    found = list(itertools.islice(presence.of(2), 30))
    for (goes, comes), (again, _) in itertools.pairwise(found):
        assert goes <= comes < again
    inside = [any(goes <= at <= comes for goes, comes in found) for at, _ in planned]
    assert all(inside) or online_s
    assert found == list(itertools.islice(presence.of(2), 30))


def test_chance_has_the_mean_that_was_asked_for():
    found = list(itertools.islice(Presence((), 50.0, 10.0, 1).of(0), 4000))
    away = sum(comes - goes for goes, comes in found) / len(found)
    assert away == pytest.approx(10.0, rel=0.1)
    assert found[-1][1] / len(found) == pytest.approx(60.0, rel=0.1)
    assert found[:5] != list(itertools.islice(Presence((), 50.0, 10.0, 1).of(1), 5))


def test_members_that_are_not_named_stay():
    presence = Presence((Absence(1.0, 2.0, (3,)),))
    assert list(presence.of(3)) == [(1.0, 3.0)]
    assert list(presence.of(2)) == []
    assert not presence.is_steady
    assert Presence().is_steady


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"at_s": -1, "for_s": 2}, r"absences\[0\].at_s = -1 .*a number from 0 to 1e\+09 s"),
        ({"at_s": 1}, r"absences\[0\].for_s is missing"),
        ({"at_s": 1, "for_s": 2, "members": [4]}, r"members\[0\] = 4 .*from 0 to 3"),
        ({"at_s": 1, "for_s": 2, "members": "1"}, "= .1. .*a list of integers from 0 to 3"),
        ({"at": 1, "for_s": 2}, r"no key 'absences\[0\].at' .*at_s"),
    ],
)
def test_a_bad_table_is_named(table, says):
    with pytest.raises(ConfigError, match=says):
        parse_absences([table], 4)
