"""Chaos over members that reduce, in memory, and that average among themselves, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos import among_members, averaging, schedule
from chaos.command import SIMULATED
from edgetrain.exchange.hub.effects import Send
from edgetrain.exchange.hub.reducer import HostedPart
from edgetrain.exchange.hub.turns import Turns
from edgetrain.exchange.messages import Start
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan

pytestmark = pytest.mark.usefixtures("own_imports")


def planned(topology, *words):
    own = [f"topology={topology}", "strategy=local-sgd", "strategy.delay=0", "steps=15"]
    return plan(reading.load(None, [*SIMULATED, *own, *words]))


def direct(seed, happenings):
    calm_s = among_members.CALM_S
    job = planned("direct", "ranges=16", "codec=int8", "local_steps=1")
    drawn = schedule.draw(seed, 4, calm_s, happenings, among_members.KINDS)
    return among_members.run(job, seed, drawn, calm_s).broken


def test_drawn_schedules_of_members_that_reduce_break_no_law():
    for seed in range(4):
        assert direct(seed, 6) == ()


@pytest.mark.parametrize("topology", ["ring", "butterfly", "tree"])
def test_drawn_schedules_of_members_that_average_break_no_law(topology):
    job = planned(topology, "strategy=dga(paper)", "steps=40")
    for seed in range(2):
        drawn = schedule.draw(seed, 4, 6.0, 4, averaging.KINDS)
        assert averaging.run(job, seed, drawn, 6.0).broken == ()


def test_a_base_that_does_not_say_whose_contributions_it_has_shows(monkeypatch):
    """A member that goes on from it in place of a lost reducer lets some count twice."""
    monkeypatch.setattr(HostedPart, "handle", without_names(HostedPart.handle))
    assert any(direct(seed, 10) for seed in range(40))


def without_names(real):
    def call(self, *what):
        return [
            Send(each.to, replace(each.message, each=()))
            if isinstance(each, Send) and isinstance(each.message, Start)
            else each
            for each in real(self, *what)
        ]

    return call


def test_a_contribution_that_counts_without_its_vector_shows(monkeypatch):
    real = Turns.advance

    def advance(self, round, weights, is_base=False):
        return real(self, round, weights if is_base else dict.fromkeys(weights, 1e-9), is_base)

    monkeypatch.setattr(Turns, "advance", advance)
    outcome = averaging.run(planned("ring", "steps=20"), 0, (), 6.0)
    assert outcome.broken == ("the model is not the mean of what was counted",)
