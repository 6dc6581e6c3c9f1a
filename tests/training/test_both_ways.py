"""One job emulated and simulated: how often."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgetrain.fleet.networks import Direction, Profile
from edgetrain.training import both_ways, emulated
from edgetrain.training.simulated import simulation

SUMMARY = {
    "metric": "loss", "steps_per_second": 10.0, "wait_s": 0.0, "sent_bytes": 1,
    "received_bytes": 1, "final": {"loss": 1.0}, "target_seconds": None, "emulation": {},
}  # fmt: skip


PLAN = SimpleNamespace(sites=(), network_profiles={})


@pytest.mark.parametrize(
    ("link", "runs"),
    [
        (Direction(delay_ms=100), 1),
        (Direction(delay_ms=100, jitter_ms=8), 4),
        (Direction(delay_ms=100, loss_percent=1), 4),
    ],
)
def test_jobs_that_depend_on_luck_are_simulated_several_times(monkeypatch, tmp_path, link, runs):
    lucks = []

    def simulate(plan, folder, luck=0):
        lucks.append(luck)
        return SUMMARY

    monkeypatch.setattr(emulated, "run", lambda plan, folder: SUMMARY)
    monkeypatch.setattr(simulation, "run", simulate)
    monkeypatch.setattr(both_ways, "read_metrics", lambda folder, kind: [])
    plan = SimpleNamespace(sites=(), network_profiles={"x": Profile("x", up=link)})
    both_ways.run("job", plan, tmp_path, 4, lambda how: None, lambda: 0.0)
    assert lucks == list(range(runs))
