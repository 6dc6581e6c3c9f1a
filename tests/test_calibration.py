"""Emulated and simulated figures beside each other, and what chance alone explains."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from left_behind import Imports

from edgetrain.fleet.networks import Direction, Profile
from edgetrain.training import emulated
from edgetrain.training.simulated import simulation

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
before = Imports()
sys.path.insert(0, str(BENCHMARKS))
import calibration  # noqa: E402

before.restore()


def summary(step_s):
    return {
        "metric": "accuracy",
        "steps_per_second": 1 / step_s,
        "wait_s": 0.01,
        "sent_bytes": 1000,
        "received_bytes": 1000,
        "final": {"accuracy": 0.9},
        "target_seconds": None,
        "emulation": {"timing_ok": True},
    }


def pair(emulated_s, first_s, *more_s):
    return calibration.pair(
        "job",
        summary(emulated_s),
        summary(first_s),
        ({"a"}, {"a"}),
        (10.0, 1.0),
        [summary(each) for each in more_s],
    )


def test_without_losses_one_run_is_compared_and_nothing_is_chance():
    found = pair(0.100, 0.110)
    assert found.time_error == pytest.approx(0.10)
    assert found.chance is None
    assert not found.good
    assert "chance explains" not in calibration.text([found])


def test_with_losses_the_mean_is_compared_and_chance_is_told():
    drawn = (0.090, 0.110, 0.100, 0.120)
    found = pair(0.100, *drawn)
    assert found.step_s[1] == pytest.approx(0.105)
    spread = statistics.stdev(drawn) * math.sqrt(1.25)
    assert found.chance == pytest.approx(2 * spread / 0.100)
    text = calibration.text([found, pair(0.130, *drawn), pair(0.160, *drawn)])
    assert "1 of 3 within 5%" in text
    assert "2 of 3 within that, or within what chance explains" in text
    assert f"±{100 * found.chance:.1f} %" in text


def test_a_machine_that_is_busy_is_told_from_a_network_that_is_slow():
    slow = {"compute_s": 0.021, "overhead_s": 0.001}
    real = summary(0.100) | slow | {"compute_s": 0.030}
    found = calibration.pair("job", real, summary(0.091) | slow, ({"a"}, {"a"}), (1.0, 1.0))
    assert found.busy == pytest.approx(0.09)
    quiet = calibration.pair("quiet", summary(0.1), summary(0.1), ({"a"}, {"a"}), (1.0, 1.0))
    text = calibration.text([found, quiet])
    assert "+9.0 %" in text
    assert "1 of 1 good where this machine" in text
    assert "where this machine" not in calibration.text([quiet])


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ({"late_ms_p99": 31.0, "late_limit_ms": 1.0}, "was itself late (31 ms"),
        ({"late_ms_p99": 0.1, "late_limit_ms": 1.0, "ring_dropped": 7}, "dropped 7 packets"),
    ],
)
def test_an_emulation_that_is_not_to_be_trusted_says_why_and_does_not_count(report, says):
    emulated = summary(0.100) | {"emulation": report | {"timing_ok": False}}
    found = calibration.pair("late", emulated, summary(0.100), ({"a"}, {"a"}), (10.0, 1.0))
    lines = calibration.text([found, pair(0.100, 0.100)]).splitlines()
    assert "1 of 2 marked NO: the emulation's time is not the network's" in lines
    assert any(line.startswith("late: the emulated network") and says in line for line in lines)
    assert any(line.startswith("1 of 1 good where this machine") for line in lines)


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
        return summary(0.1)

    monkeypatch.setattr(emulated, "run", lambda plan, folder: summary(0.1))
    monkeypatch.setattr(simulation, "run", simulate)
    monkeypatch.setattr(calibration, "read_metrics", lambda folder, kind: [])
    plan = SimpleNamespace(sites=(), network_profiles={"x": Profile("x", up=link)})
    calibration.run_both("job", plan, tmp_path, 4, lambda how: None, lambda: 0.0)
    assert lucks == list(range(runs))


def test_the_picture_says_how_many_are_near():
    said = calibration.calibration_message([0.01, -0.03, -0.128], 0.05)
    assert said == "2 of 3 simulated times within 5 % of the emulated ones, median error 3.0 %"
    assert "+1.0 % off" in calibration.calibration_message([0.01], 0.05)


def test_an_incomplete_run_is_said():
    part = summary(0.1) | {"status": "incomplete", "errors": ["m1: not finite"]}
    found = calibration.pair("dga", summary(0.1), part, (set(), set()), (1.0, 1.0))
    assert "dga: simulated, it is incomplete: m1: not finite" in calibration.text([found])


@pytest.mark.real
def test_the_script_puts_both_beside_each_other(tmp_path):
    words = ["--json", "--runs", str(tmp_path), "--strategies", "fedavg", "--networks", "none"]
    keys = ["members=2", "steps=15", "pace_s=0.05", "status_s=0"]
    command = [sys.executable, str(BENCHMARKS / "calibrate.py"), *words, *keys]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [found] = report["pairs"]
    assert found["same_base"] is True
    assert found["sent_bytes"][0] == found["sent_bytes"][1]
    assert found["step_s"][1] == pytest.approx(0.05, rel=0.05)
    assert Path(report["picture"]).stat().st_size > 5_000
