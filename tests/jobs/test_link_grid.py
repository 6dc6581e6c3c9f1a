"""The grid of links: each point is a valid job on a valid network, of the size that it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import ConfigError
from edgetrain.fleet.networks import profile
from edgetrain.jobs.link_grid import MOST_DELAY, PACE_S, RANGES, Axes, axes_of, part_of, points
from edgetrain.jobs.reading import parse
from edgetrain.jobs.rules import check, resolve

AXES = st.builds(
    Axes,
    **{
        name: st.tuples(st.floats(low, high, allow_subnormal=False))
        for name, (low, high) in RANGES.items()
    },
)


@given(AXES)
def test_every_point_is_a_job_that_may_run(axes):
    for point in points(axes, ["fedavg", "dga", "sync-sgd"]):
        job = parse({}, [*point.overrides(), "network=none"])
        check(resolve(job))
        assert job.data["elements"] == max(round(point.kilobytes * 250), 1)
        if point.strategy == "dga":
            assert 1 <= job.strategy.delay <= MOST_DELAY
            hidden = job.strategy.delay * PACE_S
            assert hidden >= point.round_trip_s or job.strategy.delay == MOST_DELAY


@given(AXES)
def test_every_network_is_a_profile_with_its_figures(axes):
    point = next(points(axes, ["fedavg"]))
    found = profile.parse(point.network, point.profile(), Path("grid.toml"))
    assert found.rtt_ms == pytest.approx(point.rtt_ms)
    assert found.up.rate_mbit == found.down.rate_mbit == point.rate_mbit


def test_the_whole_grid_has_a_job_for_every_combination():
    every = list(points(Axes(), ["fedavg", "dga", "sync-sgd"]))
    assert len({point.name for point in every}) == len(every) == 4 * 4 * 3 * 2 * 3


def test_values_are_read_from_the_command_line():
    given = {"rtt_ms": "50,200", "rate_mbit": None, "kilobytes": "4", "jitter_percent": "0"}
    assert axes_of(given) == Axes((50.0, 200.0), Axes().rate_mbit, (4.0,), (0.0,))


@pytest.mark.parametrize("text", ["fast", "", "-1", "nan", "1e9"])
def test_a_value_out_of_range_is_refused_with_the_range(text):
    with pytest.raises(ConfigError, match="--rtt-ms") as refused:
        axes_of({"rtt_ms": text})
    assert "0.1 to 10000" in refused.value.hint


NAMES = ("fedavg", "dga", "sync-sgd")


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_parts_of_a_grid_are_the_grid(parts):
    every = list(points(Axes(), NAMES))
    found = [point for k in range(parts) for point in part_of(f"{k + 1}/{parts}", every)]
    assert sorted(map(repr, found)) == sorted(map(repr, every))


@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_a_part_of_a_grid_has_some_of_everything(part):
    chosen = part_of(part, list(points(Axes(), NAMES)))
    assert len(chosen) == 72
    for key in ("strategy", "kilobytes", "rate_mbit", "rtt_ms", "jitter_percent"):
        counts = Counter(getattr(point, key) for point in chosen)
        assert max(counts.values()) - min(counts.values()) <= 2, key


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "a/b", "1/0", "-1/4", "1/4/2"])
def test_what_is_not_a_part_is_refused(text):
    with pytest.raises(ConfigError, match="K/N"):
        part_of(text, [])
