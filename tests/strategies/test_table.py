"""The table of strategies: what a row says of a strategy is what its half does."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain import strategies

ROWS = list(strategies.TABLE.values())


def half_of(row):
    params = np.zeros(4, np.float32)
    return row.member_half(params, np.ones(4, np.float32), row.every, 2 if row.delays else 0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_half_is_what_its_row_says(row):
    half = half_of(row)
    assert half.adjusts_gradient is row.adjusts_gradient
    assert half.moves_params is row.moves_params
    assert row.has_local_steps or half.every == row.every == 1
    assert row.merge_rule().keeps_late is row.keeps_late


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_step_is_quiet_where_the_half_adjusts_the_gradient(row):
    half = half_of(row)
    assert not (half.adjusts_gradient and half.quiet_steps())
    assert half.adjusts_gradient or half.quiet_steps() == row.every - 1
