"""Emulated and simulated figures beside each other, and what chance alone explains."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from edgetrain.errors import ConfigError
from edgetrain.runs.reports import calibration


def summary(step_s):
    return {
        "metric": "accuracy",
        "steps_per_second": 1 / step_s,
        "wait_s": 0.01,
        "sent_bytes": 1000,
        "received_bytes": 1000,
        "final": {"accuracy": 0.9},
        "target_seconds": None,
        "emulation": {"trusted": True},
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


def test_groups_of_jobs_are_summed_up():
    groups = {"4 kB": [pair(0.1, 0.104), pair(0.1, 0.08), pair(0.1, 0.101)], "40 kB": [pair(1, 2)]}
    lines = calibration.summed_up(groups).splitlines()
    assert lines[-2].split() == ["4", "kB", "2", "of", "3", "4.0%", "20.0%"]
    assert lines[-1].split() == ["40", "kB", "0", "of", "1", "100.0%", "100.0%"]


def test_each_strategy_and_value_is_a_group_and_the_worst_five_are_named():
    errors = {("dga", "50 ms"): 0.2, ("dga", "500 ms"): 0.01, ("fedavg", "50 ms"): -0.3}
    named = [(names, pair(0.1, 0.1 * (1 + error))) for names, error in errors.items()]
    groups = calibration.groups_of(named)
    assert [*groups] == ["dga", "fedavg", "50 ms", "500 ms"]
    lines = [line.split() for line in calibration.summed_up(groups).splitlines()]
    assert lines[-4][:4] == ["dga", "1", "of", "2"]
    assert lines[-2][:5] == ["50", "ms", "0", "of", "2"]
    told = calibration.groups_as_json(groups)
    assert told["groups"]["dga"]["within"] == 1
    assert told["groups"]["500 ms"]["jobs"] == 1
    many = [pair(0.1, 0.1 + step / 1000) for step in range(9)]
    assert calibration.worst_of(many) == many[:3:-1]
    assert len(calibration.worst(many).splitlines()) == 2 + 5
    assert calibration.groups_of([]) == {}


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
    emulated = summary(0.100) | {"emulation": report | {"trusted": False}}
    found = calibration.pair("late", emulated, summary(0.100), ({"a"}, {"a"}), (10.0, 1.0))
    lines = calibration.text([found, pair(0.100, 0.100)]).splitlines()
    assert "1 of 2 marked NO: the emulation's time is not the network's" in lines
    assert any(line.startswith("late: the emulated network") and says in line for line in lines)
    assert any(line.startswith("1 of 1 good where this machine") for line in lines)


def test_a_grid_is_drawn_with_a_number_for_each_job_wherever_it_stands():
    pytest.importorskip("matplotlib")
    from figure_texts import check

    from edgetrain.jobs.link_grid import Axes, points
    from edgetrain.runs.reports.plot import draw_grid

    found = list(points(Axes(), ["fedavg", "dga", "sync-sgd"]))
    errors = {each.name: (place - 143.5) / 1000 for place, each in enumerate(found)}
    cells = [(each.place, pair(0.1, 0.1 * (1 + errors[each.name]))) for each in found]
    said = check(draw_grid(cells))
    title = "100 of 288 simulated times within 5 % of the emulated ones, median error 7.2 %"
    assert [line for line in said if "within" in line][:1] == [title]
    for each in errors.values():
        assert f"{round(100 * each):+d}" in said
    assert {"dga", "dga, jitter 8 %", "100 Mbit/s, 400 kB", "500"} <= set(said)
    late = replace(cells[0][1], trusted=False)
    assert "-14?" in check(draw_grid([(found[0].place, late), *cells[1:3]]))
    with pytest.raises(ConfigError, match="no job"):
        draw_grid([])
