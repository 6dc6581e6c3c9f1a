"""The grid of links: each point is a valid job on a valid network, of the size that it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_behind import Imports

from edgetrain.errors import ConfigError
from edgetrain.fleet.networks import profile
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import check, resolve


@pytest.fixture(scope="module")
def links():
    before = Imports()
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import links

    yield links
    before.restore()


def drawn_axes(links, data):
    """One value on each axis."""
    ranges = links.RANGES.items()
    values = {key: st.tuples(st.floats(*ends, allow_subnormal=False)) for key, ends in ranges}
    return data.draw(st.fixed_dictionaries(values))


@given(st.data())
def test_every_point_is_a_job_that_may_run(links, data):
    for point in links.points(drawn_axes(links, data), ["fedavg", "dga", "sync-sgd"]):
        job = parse({}, [*point.overrides(), "network=none"])
        check(resolve(job))
        assert job.data["elements"] == max(round(point.kilobytes * 250), 1)
        if point.strategy == "dga":
            assert 1 <= job.strategy.delay <= links.MOST_DELAY
            hidden = job.strategy.delay * links.PACE_S
            assert hidden >= point.round_trip_s or job.strategy.delay == links.MOST_DELAY


@given(st.data())
def test_every_network_is_a_profile_with_its_figures(links, data):
    point = links.points(drawn_axes(links, data), ["fedavg"])[0]
    found = profile.parse(point.network, point.profile(), Path("grid.toml"))
    assert found.rtt_ms == pytest.approx(point.rtt_ms)
    assert found.up.rate_mbit == found.down.rate_mbit == point.rate_mbit


def test_the_whole_grid_has_a_job_for_every_combination(links):
    every = links.points(links.AXES, ["fedavg", "dga", "sync-sgd"])
    assert len({point.name for point in every}) == len(every) == 4 * 4 * 3 * 2 * 3


def test_values_are_read_from_the_command_line(links):
    assert links.values_of("rtt_ms", "50,200") == (50.0, 200.0)


@pytest.mark.parametrize("text", ["fast", "", "-1", "nan", "1e9", "50,1e9"])
def test_a_value_out_of_range_is_refused_with_the_range(links, text):
    with pytest.raises(ConfigError, match="--rtt-ms") as refused:
        links.values_of("rtt_ms", text)
    assert "0.1 to 10000" in refused.value.hint


def pair(emulated=1.0, simulated=1.1):
    from calibration import CalibratedPair

    step, both = (emulated, simulated), (1.0, 1.0)
    return CalibratedPair(
        "fedavg, 50 ms, 1 Mbit/s, 4 kB", "loss", step, both, both, both, (None, None),
        (None, None), both, None, None,
    )  # fmt: skip


def test_what_a_file_keeps_is_not_run_again(links, tmp_path):
    path, found = tmp_path / "links.jsonl", pair()
    links.Kept(path, 8).add(found)
    path.write_text(path.read_text() + '{"version": "0.0", "draws": 8, "pair": {"na')
    assert links.Kept(path, 8).pairs == {found.name: found}
    assert links.Kept(path, 4).pairs == {}, "of runs with other settings"


def test_the_report_has_each_value_of_an_axis_and_the_worst(links):
    axes = {"rtt_ms": (50.0,), "rate_mbit": (1.0,), "kilobytes": (4.0,), "jitter_percent": (0.0,)}
    grid = links.points(axes, ["fedavg", "dga"])
    text = links.report(grid, {grid[0].name: pair()})
    assert "0 of 1 within 5% of the emulated time" in text
    assert "50 ms" in text
    assert "+10.0 %" in text.splitlines()[-1]


def test_groups_of_jobs_are_summed_up(links):
    groups = {"4 kB": [pair(0.1, 0.104), pair(0.1, 0.08), pair(0.1, 0.101)], "40 kB": [pair(1, 2)]}
    lines = links.summed_up(groups).splitlines()
    assert lines[-2].split() == ["4", "kB", "2", "of", "3", "4.0%", "20.0%"]
    assert lines[-1].split() == ["40", "kB", "0", "of", "1", "100.0%", "100.0%"]


def test_each_strategy_and_value_is_a_group_and_the_worst_five_are_named(links):
    errors = {("dga", "50 ms"): 0.2, ("dga", "500 ms"): 0.01, ("fedavg", "50 ms"): -0.3}
    groups = links.groups_of((names, pair(1, 1 + error)) for names, error in errors.items())
    assert [*groups] == ["dga", "fedavg", "50 ms", "500 ms"]
    lines = [line.split() for line in links.summed_up(groups).splitlines()]
    assert lines[-4][:4] == ["dga", "1", "of", "2"]
    assert lines[-2][:5] == ["50", "ms", "0", "of", "2"]
    told = links.worst([pair(0.1, 0.1 + step / 1000) for step in range(9)]).splitlines()
    assert len(told) == 2 + 5
    assert "+8.0 %" in told[2]
