"""The histogram of late deliveries, its percentiles, and the limit of trust."""

from __future__ import annotations

import math

import pytest

from edgetrain.fleet.networks.emulation.lateness import Lateness, limit_ms


def test_lateness_percentiles() -> None:
    late = Lateness()
    for microseconds in range(1000):
        late.add(microseconds * 1000)
    late.add(-5)
    assert late.percentile_ms(0.5) == pytest.approx(0.5, abs=0.02)
    assert late.percentile_ms(0.99) == pytest.approx(0.99, abs=0.02)
    assert sum(late.report()["late_histogram_ms"].values()) == 1001
    late.add(10**12)
    assert late.report()["late_ms_max"] == 10**6
    assert Lateness().percentile_ms(0.99) == 0
    assert limit_ms(0) == 1
    assert limit_ms(250) == 5
    assert math.isfinite(limit_ms(1e6))
