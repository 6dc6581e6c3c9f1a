"""Rounds that have a sample of the members: who is out neither trains nor sends."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from drawn_fleet import DrawnFleet
from fleet import Disk, noisy_descent
from hub_desk import Desk

from edgetrain import extensions
from edgetrain.errors import ConfigError
from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.hub.effects import Closed
from edgetrain.exchange.messages import Beat, Evaluate, Reply, Start
from edgetrain.extensions import Extension
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.strategies.cohort import Cohort
from edgetrain.strategies.merging.private import PrivateMean
from edgetrain.tasks.draws import seeded
from edgetrain.vectors.noise import Gaussian


def naive(cohort, initial, local_steps, rounds, weights):
    """FedAvg with a share of the members in each round: McMahan et al., 2017, algorithm 1."""
    base, taken = initial.astype(np.float64), [0] * cohort.members
    for round in range(rounds):
        ways = []
        for member in cohort.drawn(round, weights):
            own = base.copy()
            for _ in range(local_steps):
                own -= noisy_descent(member, taken[member], own.astype(np.float32))
                taken[member] += 1
            ways.append(weights[member] * (own - base))
        base += sum(ways) / sum(weights[m] for m in cohort.drawn(round, weights))
    return base


@pytest.mark.parametrize("sampling", ["uniform", "weighted"])
def test_fedavg_of_a_tenth_is_the_papers(sampling):
    cohort, weights = Cohort(5, 20, 2, sampling), [1.0 + m % 3 for m in range(20)]
    fleet = DrawnFleet("fedavg", 20, cohort, 3, 150, rng=random.Random(1), weights=weights).run()
    wanted = naive(cohort, fleet.initial, 3, 50, weights)
    assert fleet.last
    assert abs(fleet.members[0].half.base - wanted).max() < 1e-6 * abs(wanted).max()
    for member in fleet.members:
        drawn = {r for r in range(50) if member.index in cohort.drawn(r, weights)}
        assert member.submitted == drawn, "who is not drawn sends nothing"
        assert member.answered <= drawn
    assert [len(each.members) for each in fleet.closed] == [2] * 50


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_a_killed_hub_goes_on_with_the_same_rosters(seed, sampling):
    cohort = Cohort(seed, 6, 2, sampling)
    whole = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=random.Random(seed)).run()
    rng = random.Random(seed)
    kills = [rng.randrange(20, 120) for _ in range(3)]
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=rng, disk=Disk(4), kills=kills).run()
    assert fleet.last == whole.last
    assert {each.round: each.members for each in fleet.closed}.items() <= {
        each.round: each.members for each in whole.closed
    }.items()


@pytest.mark.parametrize("seed", range(6))
def test_lost_connections_change_nothing(seed):
    cohort, rng = Cohort(seed, 6, 2), random.Random(seed)
    whole = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=random.Random(seed)).run()
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=rng, disk=Disk())
    fleet.run(lambda: rng.random() < 0.05 and fleet.cut(rng.randrange(6)))
    assert fleet.last == whole.last


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [("scaffold", "fp32"), ("fedprox(0.1)", "fp32"), ("fedadam", "fp32"), ("diloco", "int8"),
     ("fedavg", "topk(0.5)"), ("local-sgd", "int8")],
)  # fmt: skip
def test_all_end_with_one_base(strategy, codec):
    cohort = Cohort(2, 8, 3)
    fleet = DrawnFleet(strategy, 8, cohort, 2, 25, rng=random.Random(3), codec=codec).run()
    assert fleet.last
    assert [each.round for each in fleet.closed] == [*range(13)]


def test_the_first_contributions_count_of_more_that_are_drawn():
    cohort = Cohort(2, 8, 2, extra=2)
    fleet = DrawnFleet("fedavg", 8, cohort, 2, 40, rng=random.Random(3)).run()
    assert fleet.last
    assert [len(each.members) for each in fleet.closed] == [2] * 20
    assert all(
        {int(name[1:]) for name in each.members} <= set(cohort.drawn(each.round))
        for each in fleet.closed
    )


def test_an_exchange_has_the_bytes_of_its_own_contribution():
    """And not those of earlier rounds, behind which the member was in none."""
    fleet, bytes_of = DrawnFleet("fedavg", 6, Cohort(2, 6, 2), 2, 60), []
    for member in fleet.members:
        member.observe = lambda exchanged: bytes_of.append(exchanged.sent_bytes)
    fleet.run()
    assert len(bytes_of) > 10
    assert set(bytes_of) == {4 * fleet.initial.size}


def test_a_drawn_member_that_is_off_keeps_no_round_open():
    cohort = Cohort(2, 6, 2)
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 40, policy={"lost_after_s": 5.0, "deadline_s": 60.0})
    fleet.run(fleet.killing(3, 90))
    rest = [each for each in fleet.members if each.index != 3]
    assert {each.state for each in rest} == {"done"}
    assert [each.round for each in fleet.closed] == [*range(20)]
    assert max(each.open_s for each in fleet.closed) <= 61.0


def test_of_those_that_are_there_a_round_waits_for_nobody_else():
    """Where all are there they are those of the uniform sampling; a dead one is drawn no more."""
    cohort = Cohort(2, 6, 2, "available")
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 40).run()
    uniform = DrawnFleet("fedavg", 6, Cohort(2, 6, 2), 2, 40).run()
    assert fleet.last == uniform.last
    assert [each.members for each in fleet.closed] == [each.members for each in uniform.closed]
    policy = {"lost_after_s": 5.0, "deadline_s": 60.0}
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 40, policy=policy)
    fleet.run(fleet.killing(3, 90))
    after = [each.members for each in fleet.closed if each.round > 9]
    assert all(len(members) == 2 and "m3" not in members for members in after[1:])
    assert sum(each.missing != () for each in fleet.closed) <= 1
    assert max(each.open_s for each in fleet.closed) <= 61.0


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_hub_draws_of_those_that_come_back(seed):
    rng = random.Random(seed)
    kills = [rng.randrange(20, 120) for _ in range(3)]
    cohort = Cohort(seed, 6, 2, "available")
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=rng, disk=Disk(4), kills=kills).run()
    assert fleet.last
    fleet = DrawnFleet("fedavg", 6, cohort, 2, 24, rng=random.Random(seed), disk=Disk())
    fleet.run(lambda: rng.random() < 0.05 and fleet.cut(rng.randrange(6)))
    assert fleet.last


def told(desk, *kinds):
    """Who was sent something of each kind by what the hub said last."""
    return [
        "".join(
            sorted(who for who, said in desk.said.items() if any(isinstance(m, k) for m in said))
        )
        for k in kinds
    ]


def test_those_that_come_while_a_round_has_too_few_are_in_it():
    desk = Desk(4, deadline_s=5.0, lost_after_s=100.0)
    CohortPart(Cohort(0, 4, 2, "available")).attach(desk.hub)
    desk.started("abcd")
    (pair, first), rest = told(desk, Start, Evaluate), set("abcd")
    assert first == min(pair)
    assert len(pair) == 2
    rest -= set(pair)
    desk.give(first, 0)
    for who in rest | {pair[1]}:
        desk.take(desk.hub.unreachable(who.encode(), desk.now))
    desk.tick(6.0)
    assert [each.members for each in desk.closed] == [(first,)]
    assert told(desk, Reply, Evaluate, Start) == [first, first, ""]
    desk.tick(6.0)
    assert told(desk, Start, Evaluate) == ["", ""]
    back = max(rest)
    desk.tell(back, Beat(0))
    assert len(desk.closed) == 1, "the round is open"
    desk.tick(0.1)
    assert told(desk, Start, Evaluate) == [back, ""]
    desk.give(first, 1, applied=1)
    assert len(desk.closed) == 1, "it waits for both"
    desk.give(back, 1, applied=1)
    assert [each.members for each in desk.closed][1:] == [tuple(sorted((first, back)))]


def test_a_round_that_finds_nobody_waits_for_the_first_that_comes():
    desk = Desk(2, deadline_s=1.0, lost_after_s=5.0)
    CohortPart(Cohort(0, 2, 1, "available")).attach(desk.hub)
    desk.started("ab")
    (one,) = told(desk, Start)
    (other,) = {"a", "b"} - {one}
    desk.take(desk.hub.unreachable(one.encode(), 0.0))
    desk.tick(4.0)
    desk.take(desk.hub.unreachable(other.encode(), 4.0))
    desk.tick(1.5)  # the first is given up, and its round is over a second later
    desk.tick(1.1)
    assert [each.members for each in desk.closed] == [()]
    desk.tick(2.0)
    assert (len(desk.closed), told(desk, Start, Evaluate)) == (1, ["", ""])
    desk.tell(other, Beat(0))
    desk.tick(0.1)
    assert told(desk, Start, Evaluate) == [other, other]


def test_secret_rosters_are_poisson_and_nobodys_to_work_out():
    cohort, desk = Cohort(0, 40, 10, "poisson", is_secret=True), Desk(40)
    part = CohortPart(cohort, source=seeded("secret"))
    part.attach(desk.hub)
    found = [part.roster(round) for round in range(4000)]
    times = np.bincount([number for roster in found for number in roster], minlength=40)
    assert abs(times - 1000).max() < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert np.var([len(each) for each in found]) == pytest.approx(40 * 0.25 * 0.75, rel=0.1)
    assert not any(set(cohort.drawn(round)) == found[round] for round in range(50))
    assert part.roster(3999) == found[3999], "once a round"


class Watching(CohortPart):
    def close(self, effects, now):
        (closed,) = (each for each in effects if isinstance(each, Closed))
        assert {int(name[1:]) for name in closed.members} <= self.roster(closed.round)
        return super().close(effects, now)


def test_who_is_not_drawn_in_secret_counts_for_nothing():
    desk = Desk(3)
    cohort, source = Cohort(0, 3, 2, "poisson", is_secret=True), by_bits("110", "101", "010")
    CohortPart(cohort, source=source).attach(desk.hub)
    desk.started("abc")
    assert told(desk, Start, Evaluate) == ["ab", ""], "nobody learns of others"
    desk.give("a", 0)
    desk.give("b", 0)
    assert told(desk, Reply, Start) == ["a", "c"]
    desk.give("b", 1, applied=1)
    desk.give("a", 1, applied=1)
    desk.give("c", 1, applied=1)
    assert [each.members for each in desk.closed] == [("a", "b"), ("a", "c")]


def by_bits(*rosters):
    """A source that draws these members, "1" each that is drawn."""
    left = iter(rosters)

    def source(count):
        drawn = next(left)
        return b"".join(bytes(8) if each == "1" else b"\xff" * 8 for each in drawn)

    return source


class Noised(PrivateMean):
    def __init__(self):
        super().__init__(Gaussian(1.0, 0.5), seeded("noise"), lot=2)


@pytest.mark.parametrize("seed", range(6))
def test_secret_rounds_have_none_but_the_drawn_and_do_not_tell_how_many(seed, monkeypatch):
    """Also where a hub draws anew after a restart, and late ones do not count."""
    monkeypatch.setitem(extensions.loaded, "own:Noised", Extension(Noised, sys, ""))
    cohort, rng = Cohort(seed, 6, 2, "poisson", is_secret=True), random.Random(seed)
    kills, source = [rng.randrange(20, 120) for _ in range(3)], seeded("draws", seed)
    fleet = DrawnFleet(
        "local-sgd", 6, cohort, 2, 40, rng=rng, disk=Disk(4), kills=kills, merge="own:Noised",
        part=lambda cohort: Watching(cohort, source=source),
    ).run()  # fmt: skip
    assert fleet.last
    assert len({len(each.members) for each in fleet.closed}) > 1
    told = {each.driver.most_members for each in fleet.members}
    assert {2} <= told <= {0, 2}, "or it was called each time, and has had no reply"
    assert not any(each.driver.rounds_with_fewer for each in fleet.members)


WORDS = ("members=20", "strategy=fedavg", "steps=50")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cohort=21"], "strategy.cohort = 21: the job has only 20 members"),
        (["cohort=1.5"], "strategy.cohort = 1.5 is neither a number of members nor a share"),
        (["cohort=-0.1"], "strategy.cohort = -0.1"),
        (["strategy.sampling=poisson"], "strategy.sampling = 'poisson' without a cohort"),
        (["cohort=15", "cohort_extra=6"], "the job has only 20 members"),
        (["cohort=5", "cohort_extra=1", "strategy.sampling=poisson"], "is left to chance"),
        (["cohort=5", "strategy.sampling=weighted", "weighting=alike"], "members count alike"),
        (["cohort=5", "sampling=available"], "the key 'sampling' is in several tables"),
        (["cohort=5", "strategy.sampling=availabel"], "did you mean 'available'?"),
        (["cohort=5", "strategy.sampling=poisson(2)"], "'poisson' takes no arguments, not (2)"),
        (["cohort=5", "quorum=6"], "a round has only 5 members"),
        (["cohort=5", "strategy=dga"], "each of its rounds has all members"),
        (["cohort=5", "strategy=fedbuff(2, 0.5)"], "each of its rounds has all members"),
        (["cohort=5", "strategy=sync-sgd"], "each of its rounds has all members"),
        (["cohort=5", "secure=true", "strategy.sampling=poisson"], "is left to chance"),
        (["cohort=5", "secure=true", "cohort_extra=1"], "keys are made by all that are drawn"),
        (["cohort=5", "secure=true", "threshold=3"], "strategy.threshold = 3: allowed are 4 to 5"),
        (["cohort=5", "topology=ring"], "each of its rounds has all members"),
    ],
)
def test_bad_cohorts_get_one_clear_line(words, said):
    with pytest.raises(ConfigError) as refused:
        resolve(load(None, [*WORDS, *words]))
    assert said in str(refused.value)
    assert "\n" not in refused.value.message


def test_a_share_is_a_number_and_all_are_no_cohort():
    def cohort(*words):
        return load(None, [*WORDS, *words]).cohort

    assert cohort("cohort=0.1") == cohort("cohort=2") == Cohort(0, 20, 2)
    assert cohort() is cohort("cohort=20") is cohort("cohort=0") is None
    table = replace(Job().strategy, cohort=2.0)
    assert Job().digest() != replace(Job(), strategy=table).digest()
