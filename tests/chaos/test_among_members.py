"""Chaos over members that average among themselves, in memory."""

from __future__ import annotations

import pytest

from chaos import among_members, schedule
from chaos.among_members import CALM_S, KINDS
from chaos.command import SIMULATED
from chaos.schedule import Happening
from edgetrain.exchange.hub.turns import Turns
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan

pytestmark = pytest.mark.usefixtures("own_imports")


def planned(topology, *words):
    own = [f"topology={topology}", "strategy=local-sgd", "strategy.delay=0", "steps=15"]
    return plan(reading.load(None, [*SIMULATED, *own, *words]))


@pytest.mark.parametrize(
    ("topology", "words"),
    [("direct", ("ranges=16", "codec=int8")), ("ring", ()), ("butterfly", ()), ("tree", ())],
)
def test_drawn_schedules_break_no_law(topology, words):
    job = planned(topology, *words)
    for seed in range(2):
        drawn = schedule.draw(seed, 4, CALM_S, 2, KINDS)
        assert among_members.run(job, seed, drawn, CALM_S).broken == ()


def test_attempts_without_need_show(monkeypatch):
    real = Turns.accept

    def accept(self, member, message):
        found = real(self, member, message)
        if self.count < 6 and member.name == "m1":
            self.renew()
        return found

    monkeypatch.setattr(Turns, "accept", accept)
    kill = [Happening(24.0, "kill", 1.0, (3,))]
    assert any(
        "attempts" in law for law in among_members.run(planned("ring"), 0, kill, CALM_S).broken
    )
