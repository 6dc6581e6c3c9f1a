"""Emulated runs side by side: in order, at most so many, and ended together."""

from __future__ import annotations

import threading
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


@pytest.fixture
def sides(monkeypatch):
    """Emulated runs that wait for each other in twos; simulated ones that are done at once."""
    barrier = threading.Barrier(2, timeout=20)
    running, most, lock = [0], [0], threading.Lock()

    def emulate(plan, folder, watch):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        barrier.wait()
        with lock:
            running[0] -= 1
        return SUMMARY

    monkeypatch.setattr(emulated, "run", emulate)
    monkeypatch.setattr(simulation, "run", lambda plan, folder: SUMMARY)
    monkeypatch.setattr(both_ways, "read_metrics", lambda folder, kind: [])
    return most


def test_emulated_runs_go_side_by_side_and_pairs_come_in_order(sides, tmp_path):
    told = []
    planned = {f"job {number}": PLAN for number in range(6)}
    pairs = list(
        both_ways.run_side_by_side(
            planned, tmp_path, 1, 2, lambda name, how: told.append((how, name)), lambda: 0.0
        )
    )
    assert [pair.name for pair in pairs] == list(planned)
    assert sides == [2]
    assert [how for how, _ in told] == ["emulated"] * 6 + ["simulated"] * 6
    assert {name for how, name in told if how == "emulated"} == set(planned)


def test_after_ctrl_c_no_emulated_run_is_left(monkeypatch, tmp_path):
    """The runs that go on see it by `watch`; those that have not begun never begin."""
    begun, ended, first = [], [], threading.Event()

    def emulate(plan, folder, watch):
        begun.append(folder)
        if len(begun) == 1:
            return SUMMARY
        try:
            while True:
                watch()
                first.wait(0.01)
        finally:
            ended.append(folder)

    def report(name, how):
        raise KeyboardInterrupt

    monkeypatch.setattr(emulated, "run", emulate)
    monkeypatch.setattr(both_ways, "read_metrics", lambda folder, kind: [])
    planned = {f"job {number}": PLAN for number in range(20)}
    with pytest.raises(KeyboardInterrupt):
        list(both_ways.run_side_by_side(planned, tmp_path, 1, 2, report, lambda: 0.0))
    assert len(begun) < 20
    assert len(ended) == len(begun) - 1


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
