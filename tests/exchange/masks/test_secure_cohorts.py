"""Masked contributions of drawn members: keys are made for each round, by those in it."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from drawn_fleet import DrawnFleet
from fleet import Disk

from edgetrain.exchange.further_messages import Masking
from edgetrain.exchange.hub.drawing import CohortPart
from edgetrain.exchange.hub.effects import Send
from edgetrain.exchange.masks.terms import MaskTerms
from edgetrain.exchange.member import link
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create, read_metrics
from edgetrain.strategies.cohort import Cohort
from edgetrain.training.simulated import simulation

TERMS = MaskTerms(4, 3, 8.0)


def fleet(cohort, *, secure=TERMS, seed=0, steps=24, **rest):
    members = cohort.members
    return DrawnFleet(
        "fedavg", members, cohort, 2, steps, rng=random.Random(seed), secure=secure, **rest
    )  # fmt: skip


def off_by(one, other):
    return abs(one.hub.rounds.base - other.hub.rounds.base).max()


@pytest.mark.parametrize("sampling", ["uniform", "weighted", "available"])
def test_sums_are_those_of_contributions_that_are_not_masked(sampling):
    cohort, weights = Cohort(3, 9, 4, sampling), [1.0 + m % 3 for m in range(9)]
    masked = fleet(cohort, weights=weights).run()
    plain = fleet(cohort, secure=None, weights=weights).run()
    assert masked.last
    assert [each.members for each in masked.closed] == [each.members for each in plain.closed]
    assert [len(each.members) for each in masked.closed] == [4] * 12
    assert off_by(masked, plain) < 1e-4
    assert {each.event for each in masked.notes} == {"joined", "started", "left"}


class Watched(CohortPart):
    """Keeps who was sent what of masks in which round."""

    sent: ClassVar[list[tuple[int, int]]] = []

    def close(self, effects, now):
        return self._look(super().close(effects, now))

    def tick(self, now, go_on):
        return self._look(super().tick(now, go_on))

    def handle(self, sender, message, now, go_on):
        return self._look(super().handle(sender, message, now, go_on))

    def _look(self, effects):
        numbers = {each.sender: self._number(each) for each in self.hub.members}
        self.sent.extend(
            (self.hub.round, numbers[each.to])
            for each in effects
            if isinstance(each, Send) and isinstance(each.message, Masking)
        )
        return effects


def test_only_those_in_a_round_make_keys_for_it():
    cohort, Watched.sent = Cohort(3, 9, 4), []
    fleet(cohort, part=Watched).run()
    asked = {r: {who for round, who in Watched.sent if round == r} for r in range(12)}
    # What unmasks a round is sent while it is open; the keys of the next go out as it closes.
    assert all(asked[round] == set(cohort.drawn(round)) for round in range(12))


def test_no_secrets_stay_of_rounds_that_are_over(monkeypatch):
    """Though who is drawn for no next round gets no reply to its last one."""
    maskers, made = [], link.masker_of
    monkeypatch.setattr(
        link, "masker_of", lambda *about: maskers.append(made(*about)) or maskers[-1]
    )
    fleet(Cohort(3, 9, 4)).run()
    assert len(maskers) == 9
    assert not [r for r in range(12) for each in maskers if each.block_of(r) is not None]


def test_who_comes_anew_within_its_round_keeps_nobody_waiting(tmp_path):
    """Its keys are lost with its process: the round closes without it, and without a complaint."""
    words = "members=6", "strategy=fedavg", "local_steps=4", "cohort=4", "secure=true", "steps=40"
    words += "pace_s=0.5", "batch=4", "network=wan-200ms", "hub.lost_after_s=0.2", "deadline_s=60"
    words += ("absences=[{at_s=1, for_s=0.3, members=[0, 1]}, {at_s=8, for_s=0.3, members=[2]}]",)
    inside = create(tmp_path, "run")
    summary = simulation.run(plan(reading.load(None, [*words, "hub.heartbeat_s=0.1"])), inside)
    assert summary["status"] == "finished"
    events = [*read_metrics(inside, "event")]
    assert sum(each["event"] == "absence" for each in events) == 3
    assert not [each for each in events if "masks" in str(each.get("reason"))]
    assert summary["seconds"] < 60, "no deadline passes"


@pytest.mark.parametrize("seed", range(8))
def test_lost_connections_change_no_sum(seed):
    cohort, rng = Cohort(seed, 7, 4), random.Random(seed)
    run = fleet(cohort, seed=seed, disk=Disk(), policy={"deadline_s": 60.0})
    run.run(lambda: rng.random() < 0.03 and run.cut(rng.randrange(7)))
    assert run.last
    assert [each.round for each in run.closed] == [*range(12)]
    assert all(len(each.members) in (0, 3, 4) for each in run.closed)


@pytest.mark.parametrize("seed", range(8))
def test_a_killed_hub_goes_on(seed):
    rng = random.Random(seed)
    kills = [rng.randrange(20, 150) for _ in range(3)]
    policy = {"deadline_s": 60.0}
    run = fleet(Cohort(seed, 7, 4), seed=seed, disk=Disk(4), kills=kills, policy=policy).run()
    assert run.last
    assert run.hub.round == 12
    assert sum(len(each.members) in (3, 4) for each in run.closed) > 3


@pytest.mark.parametrize("dead", [1, 4])
def test_rounds_go_on_without_members_that_are_gone(dead):
    """With three of four a round has a sum; with fewer it is given up, and the next is drawn."""
    run = fleet(
        Cohort(2, 8, 4), steps=40, policy={"lost_after_s": 5.0, "deadline_s": 60.0}
    )  # fmt: skip
    kills = [run.killing(index, 150) for index in range(dead)]
    run.run(lambda: [kill() for kill in kills])
    assert {each.state for each in run.members[dead:]} == {"done"}
    assert [each.round for each in run.closed] == [*range(20)]
    sizes = [len(each.members) for each in run.closed]
    assert set(sizes) <= {0, 3, 4}
    assert (0 in sizes) == (dead > 1)
    assert len({each.half.checksum for each in run.members[dead:]}) == 1
