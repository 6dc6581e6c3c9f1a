"""Chaos over a fleet in memory: a hub with a replica, in virtual time."""

from __future__ import annotations

import pytest

from chaos import in_memory, schedule
from chaos.command import SIMULATED
from chaos.schedule import Happening
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan

pytestmark = pytest.mark.usefixtures("own_imports")

CALM_S = 20.0


def planned(*words):
    own = ["hub.replica=tcp://c:5555", "hub.quorum=3", *words]
    return plan(reading.load(None, [*SIMULATED, *own]))


@pytest.mark.parametrize("seed", [10, 13, 16, 34])
def test_drawn_schedules_break_no_law(seed):
    drawn = schedule.draw(seed, 4, CALM_S, 5, in_memory.FAULTS, 2)
    assert in_memory.run(planned("steps=60"), seed, drawn, CALM_S).broken == ()


@pytest.mark.parametrize("seed", range(4))
def test_what_people_tell_hub_or_replica_breaks_no_law(seed):
    drawn = schedule.draw(seed, 4, CALM_S, 6, (*schedule.ORDERS, "hub", "kill", "partition"), 2)
    assert in_memory.run(planned("steps=60"), seed, drawn, CALM_S).broken == ()


@pytest.mark.parametrize("network", ["wan-50ms", "wan-1000ms"])
@pytest.mark.parametrize("strategy", ["dga", "fedavg"])
def test_a_takeover_takes_at_most_three_beats_and_a_trip(network, strategy):
    job = planned(f"network={network}", f"strategy={strategy}", "strategy.delay=0", "steps=40")
    town = in_memory.ChaosTown(job, 1)
    town.live([Happening(2.5, "hub", 20.0, (), (0,))])
    assert in_memory.judged(job, town) == []
    assert town.took_over_at - town.killed_at <= 3 * town.hub.policy.heartbeat_s + town.trip_s
    assert town.prompt is not None, "the law was not looked at"
    assert {member.state for member in town.members} == {"done"}


def returned(*other):
    """A town whose hub was killed, replaced, and started again before the job was over."""
    job = planned("strategy.delay=0", "steps=120")
    town = in_memory.ChaosTown(job, 2)
    at_first = []
    town.tell_hub = lambda tell=town.tell_hub: (at_first.append(town.first.hub), tell())
    town.live([Happening(2.5, "hub", 4.0, (), (0,)), *other])
    assert in_memory.judged(job, town) == []
    assert town.took_over_at is not None
    came = [hub for hub in at_first if hub is not None]
    assert came, "the hub never came back"
    return town, came


def test_a_hub_that_comes_back_after_the_takeover_ends_and_closes_no_round():
    town, (came, *more) = returned()
    assert came.round == min(town.second.own), "it closed what the replica had not"
    assert not more
    assert town.first.hub is None
    assert town.first.own.isdisjoint(town.second.own)


def test_nor_does_one_that_nobody_can_tell():
    town, came = returned(Happening(6.0, "partition", 30.0, (), (0,)))
    assert town.first.hub is came[-1]
    assert town.first.own.isdisjoint(town.second.own)
    assert came[-1].round == min(town.second.own)
    assert max(town.second.own) > came[-1].round + 3


def test_a_full_disk_at_the_replica_stops_nobody_and_it_comes_back_in():
    job = planned("strategy.delay=0", "steps=60")
    town = in_memory.ChaosTown(job, 3)
    town.live([Happening(2.0, "disk", 6.0, (), (1,))])
    assert in_memory.judged(job, town) == []
    said = [note.reason for note in town.notes if note.member == "replica"]
    out = next(n for n, line in enumerate(said) if line.startswith("dropped by"))
    assert any(line.endswith("it is in") for line in said[out:])
    assert town.first.hub.part.replica == "in"
    assert town.took_over_at is None
