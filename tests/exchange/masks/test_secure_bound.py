"""How many members have to help a hub that lies, until it reads a single contribution: the attack,
carried out on real maskers, succeeds with `colluders` of them and fails with one less."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from secure_room import Room, over_the_wire, vector

from edgetrain.exchange.further_messages import Unmask
from edgetrain.exchange.masks import primitives
from edgetrain.exchange.masks.fixed_point import FixedPoint
from edgetrain.exchange.masks.masker import pair_key
from edgetrain.exchange.masks.payloads import read_table, round_context, write_places
from edgetrain.exchange.masks.terms import colluders, default_threshold

SEED = 16
VICTIM = 0


class Attack:
    """A hub that tells some members that the victim dropped out, and others that it contributed;
    the last `helpers` members give it everything they hold."""

    def __init__(self, members, threshold, helpers, rounds):
        self.room = Room(members, threshold, elements=4)
        self.room.set_up(rounds)
        self.members, self.threshold, self.helpers = members, threshold, helpers
        self.block = self.room.hub.blocks[0]
        self.honest = list(range(members - helpers))

    def shares(self, round, told_dropped):
        """The shares that the hub gets in a round: of the victim's own mask, and of its key."""
        everyone = list(range(self.members))
        own, key = {}, {}
        for place in self.honest:
            survivors = [p for p in everyone if p != VICTIM or place not in told_dropped]
            asked = Unmask(self.block.number, round, write_places(survivors, self.members))
            answer = self.room.maskers[f"m{place}"].answer_hub(over_the_wire(asked))
            table = read_table(answer.payload, self.members, SEED, "shares")
            (key if place in told_dropped else own)[place] = table[VICTIM]
        for place in everyone[len(self.honest) :]:
            held = self.room.maskers[f"m{place}"].blocks[self.block.number].held[round][VICTIM]
            own[place], key[place] = held.own, held.key
        return own, key

    def read(self, round, told_dropped):
        """The victim's contribution, if the shares are enough."""
        given = vector((VICTIM, round), 4)
        masked = np.empty(4, np.uint32)
        for place in range(self.members):
            out = masked if place == VICTIM else np.empty(4, np.uint32)
            self.room.maskers[f"m{place}"].mask(round, vector((place, round), 4), 1.0, out)
        own, key = self.shares(round, told_dropped)
        if min(len(own), len(key)) < self.threshold:
            return None
        context = round_context(self.block.number, round)
        chosen = [dict(sorted(s.items())[: self.threshold]) for s in (own, key)]
        own_seed, key_seed = (primitives.combine(shares) for shares in chosen)
        primitives.add_mask(primitives.own_key(own_seed, context + self.block.digest), -1, masked)
        for place in range(1, self.members):
            public = self.block.row(place, round)[0]
            pair = pair_key(key_seed, self.block.number, round, public, self.block.digest)
            primitives.add_mask(pair, -1, masked)
        found = np.empty(4, np.float32)
        FixedPoint(self.room.terms.clip_range, self.members).decode(masked, 1.0, found)
        np.testing.assert_allclose(found, given, atol=1e-6)
        return found


SIZES = [(3, 2), (4, 3), (5, 3), (5, 4), (6, 5), (7, 4), (7, 5), (8, 6), (10, 7)]


@pytest.mark.parametrize(("members", "threshold"), SIZES)
def test_a_lying_hub_reads_one_contribution_with_this_many_helpers(members, threshold):
    helpers = 2 * threshold - members
    attack = Attack(members, threshold, helpers, 1)
    told_dropped = set(attack.honest[-(threshold - helpers) :])
    assert attack.read(0, told_dropped) is not None


@pytest.mark.parametrize(("members", "threshold"), SIZES)
def test_and_with_one_less_no_lie_is_enough(members, threshold):
    """Who is told what does not matter, only how many and whether the victim itself is."""
    helpers = 2 * threshold - members - 1
    honest = members - helpers
    lies = [{*range(start, start + size)} for size in range(honest) for start in (0, 1)]
    attack = Attack(members, threshold, helpers, len(lies))
    for round, told_dropped in enumerate(lies):
        assert attack.read(round, told_dropped & {*attack.honest}) is None


def lie_works(members, threshold, helpers, compare):
    """Whether some way to tell honest members different lists gives both kinds of shares. With
    `compare` a member first asks the others (the fourth round of the paper), and answers only if
    the threshold, helpers included, have been told its list; helpers confirm anything."""
    for lists in itertools.product("AB", repeat=members - helpers):
        told = {which: lists.count(which) for which in "AB"}
        answers = {
            which: count if not compare or count + helpers >= threshold else 0
            for which, count in told.items()
        }
        if all(answers[which] + helpers >= threshold for which in "AB"):
            return True
    return False


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("members", range(2, 10))
def test_comparing_lists_of_survivors_would_not_raise_the_bound(members, compare):
    for threshold in range(members // 2 + 1, members + 1):
        works = [h for h in range(members) if lie_works(members, threshold, h, compare)]
        assert min(works, default=members) == 2 * threshold - members


@given(st.integers(2, 64))
def test_by_default_it_takes_more_than_a_third_or_all_but_one(members):
    least = colluders(members, default_threshold(members))
    assert 3 * least > members or least == members - 1


def test_the_page_has_the_numbers():
    page = (Path(__file__).parents[3] / "docs/how-to/secure-aggregation.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert len(rows) >= 8
    for members, threshold, least in (map(int, row) for row in rows):
        assert threshold == default_threshold(members)
        assert least == colluders(members, threshold)
