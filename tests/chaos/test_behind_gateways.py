"""Chaos over members behind gateways, in memory."""

from __future__ import annotations

import pytest

from chaos import behind_gateways, schedule
from chaos.behind_gateways import CALM_S, KINDS
from chaos.command import SIMULATED
from edgetrain.exchange.gateway.site import SitePart
from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan

pytestmark = pytest.mark.usefixtures("own_imports")


def broken(seed, *words, kinds=KINDS):
    own = ["gateways=true", "steps=40", "sites=wan-50ms: 0-1, wan-50ms: 2-3", *words]
    planned = plan(reading.load(None, [*SIMULATED, *own]))
    drawn = schedule.draw(seed, 4, CALM_S, 6, kinds, 3)
    return behind_gateways.run(planned, seed, drawn, CALM_S).broken


@pytest.mark.parametrize("words", [(), ("strategy=fedavg", "strategy.delay=0", "codec=int8")])
def test_drawn_schedules_break_no_law(words):
    assert [broken(seed, *words) for seed in (4, 7, 10)] == [()] * 3


def test_a_gateway_that_sends_nothing_again_shows(monkeypatch):
    real = SitePart.restore

    def forget(self, *args):
        real(self, *args)
        self.rounds.kept.clear()

    monkeypatch.setattr(SitePart, "restore", forget)
    assert broken(12, kinds=("hub", "disk", "cut"))
