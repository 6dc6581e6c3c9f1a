"""Other closing rules than the one there is: the hub carries them as it is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st
from merging_room import Room, closed, filled, is_reply_to

from edgetrain.exchange.hub.protocol import Hub
from edgetrain.strategies.merging.rule import Mean


@dataclass(frozen=True)
class EveryM:
    """Buffered asynchronous averaging: a round closes with every `m`-th contribution."""

    m: int

    def due(self, round, now):
        return round.contributions >= self.m


class Watching:
    """Closes nothing before its time, and remembers what it saw."""

    def __init__(self):
        self.seen = []

    def due(self, round, now):
        given, missing = sorted(round.members), sorted(round.missing)
        assert round.contributions == len(given)
        self.seen.append((round.opened, given, missing, now))
        return False


def test_a_round_closes_with_every_second_contribution():
    room = Room(Mean(), "abc", closing=EveryM(2))
    assert closed(room.contribute("a", 0, filled(1.0))) == []
    (first,) = closed(room.contribute("b", 0, filled(3.0)))
    assert (first.members, first.missing) == (("a", "b"), ("c",))
    assert closed(room.contribute("c", 0, filled(10.0))) == [], "late: the first of the next round"
    (second,) = closed(room.contribute("a", 1, filled(20.0)))
    assert (second.round, second.members, second.missing) == (1, ("a", "c"), ("b", "c"))
    np.testing.assert_array_equal(room.hub.base, filled(2.0 + 15.0))


def test_at_the_first_contribution_every_member_is_answered_at_once():
    room = Room(Mean(), "ab", closing=EveryM(1))
    for turn, name in enumerate("abba"):
        own = turn // 2
        effects = room.contribute(name, own, filled(1.0))
        (found,) = closed(effects)
        assert (found.round, found.members) == (turn, (name,))
        assert any(is_reply_to(name, effect) for effect in effects)
    np.testing.assert_array_equal(room.hub.base, filled(4.0))


def test_a_rule_sees_who_gave_who_is_missing_and_since_when():
    rule = Watching()
    room = Room(Mean(), "abc", closing=rule)
    room.contribute("b", 0, filled(1.0), now=3.0)
    assert rule.seen[-1] == (3.0, ["b"], ["a", "c"], 3.0)
    room.contribute("a", 0, filled(1.0), now=4.0)
    room.hub.tick(5.0)
    assert rule.seen[-1] == (3.0, ["a", "b"], ["c"], 5.0)


def test_a_round_that_nobody_can_give_to_any_more_closes_whatever_the_rule_says():
    room = Room(Mean(), "ab", closing=EveryM(3))
    room.contribute("a", 0, filled(1.0))
    (found,) = closed(room.contribute("b", 0, filled(3.0)))
    assert found.members == ("a", "b")


class AsynchronousFleet(Fleet):
    """A fleet whose hub has another closing rule."""

    def __init__(self, *args, closing, **kwargs):
        super().__init__(*args, **kwargs)
        hub = self.hub
        codecs = hub.rounds.merger.codecs
        self.hub = Hub(hub.terms, hub.policy, self.strategy.merge_rule(), *codecs, closing=closing)


@pytest.mark.parametrize("strategy", ["local-sgd", "dga"])
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 2**32))
def test_a_fleet_trains_with_a_round_for_every_m_contributions(strategy, m, members, seed):
    fleet = AsynchronousFleet(
        strategy, members, 2, 4, 12, rng=random.Random(seed), closing=EveryM(m)
    ).run()
    assert [member.state for member in fleet.members] == ["done"] * members
    given_ = [name for found in fleet.closed for name in found.members]
    assert len(given_) == members * 6, "every contribution counts once"
    assert not fleet.hub.rounds.open_rounds.sizes()
    replies = [found.round for found in fleet.closed]
    assert replies == list(range(fleet.hub.round))
