"""The picture that benchmarks/latency.py draws."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from figure_texts import check
from hypothesis import given
from hypothesis import strategies as st
from left_behind import Imports

from edgetrain.errors import ConfigError

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def picture():
    before = Imports()
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import latency_picture

    yield latency_picture
    before.restore()


def rows(**per_second: list[float]) -> list[dict[str, Any]]:
    return [
        {"strategy": name, "rtt_ms": rtt_ms, "steps_per_second": speed}
        for name, speeds in per_second.items()
        for rtt_ms, speed in zip((0, 50, 100, 200, 500, 1000), speeds, strict=True)
    ]


def test_speed_is_shown_relative_to_no_latency(picture, tmp_path: Path) -> None:
    measured = rows(sync=[20, 10, 6, 4, 2, 1], fedavg=[20, 17, 14, 11, 7, 4], dga=[20.0] * 6)
    texts = check(picture.draw_latency(measured))
    assert {"sync, 5 %", "fedavg, 20 %", "dga, 100 %"} <= set(texts)
    path = picture.latency_figure(measured, tmp_path / "latency.png", "8 x raspberry-pi-4b")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_heading_says_what_each_keeps(picture) -> None:
    relative = {"sync-sgd": [(0.0, 1.0), (1000.0, 0.055)], "dga": [(0.0, 1.0), (1000.0, 0.999)]}
    said = "At a round trip of 1,000 ms dga keeps 100 % of its speed, sync-sgd 6 %"
    assert picture.latency_message(relative, doubtful=False) == said
    assert picture.latency_message(relative, doubtful=True) == (
        f"{said} (not all of it to be trusted)"
    )


def test_a_latency_that_is_not_to_be_trusted_is_hollow_and_explained(picture) -> None:
    measured = rows(sync=[20, 10, 6, 4, 2, 1], dga=[20.0] * 6)
    assert not any("hollow" in text for text in check(picture.draw_latency(measured)))
    measured[2] |= {"trusted": False, "overrun": 0}
    measured[7] |= {"trusted": True, "overrun": 3}
    figure = picture.draw_latency(measured)
    assert any(text.startswith("hollow: the emulation was late") for text in check(figure))
    hollow = [
        tuple(map(float, line.get_xdata()))
        for line in figure.axes[0].lines
        if line.get_markerfacecolor() == "white"
    ]
    assert hollow == [(100.0,), (50.0,)]


def test_names_at_the_ends_of_near_lines_stay_apart(picture) -> None:
    check(
        picture.draw_latency(rows(a=[10.0] * 6, b=[10.0] * 6, c=[9.9] * 6, d=[10, 9, 8, 7, 6, 5]))
    )


@given(
    st.dictionaries(
        st.floats(0, 2000).map(round), st.lists(st.floats(0.1, 100), min_size=1), min_size=1
    )
)
def test_of_several_measurements_the_median_counts(picture, found: dict[int, list[float]]) -> None:
    measured = [
        {"strategy": "dga", "rtt_ms": rtt_ms, "steps_per_second": speed}
        for rtt_ms, speeds in found.items()
        for speed in speeds
    ]
    if 0 not in found:
        with pytest.raises(ConfigError, match="round trip of 0 ms"):
            picture.relative_speed(measured)
        return
    points = picture.relative_speed(measured)["dga"]
    assert [rtt_ms for rtt_ms, _ in points] == sorted(found)
    assert points[0] == (0, 1.0)
    for rtt_ms, relative in points:
        least, most = min(found[round(rtt_ms)]), max(found[round(rtt_ms)])
        base = relative and points[0][1]
        assert least / max(found[0]) <= relative * base * (1 + 1e-9)
        assert relative * base <= most / min(found[0]) * (1 + 1e-9)
