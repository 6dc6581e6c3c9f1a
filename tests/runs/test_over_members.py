"""Figures over members: mean over data, median, worst tenth; and which evaluation is the last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.runs.data import RunData
from edgetrain.runs.metrics.lines import format_line, parse_line
from edgetrain.runs.over_members import OwnData, Spread, better_of, rows_of

PAIRS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 50)), min_size=1, max_size=40)


def line(member, step, sums, about=None, t=1.0):
    keys = {"kind": "own_eval", "t": t, "member": member, "step": step, "sums": sums}
    return keys if about is None else {**keys, "about": about}


@given(PAIRS, st.sampled_from(["higher", "lower"]))
def test_a_spread_is_what_numpy_finds(pairs, better):
    found = Spread.of(pairs, better)
    known = [(value, count) for value, count in pairs if count]
    if not known:
        assert found is None
        return
    values = np.sort([value / count for value, count in known])
    worst = (values if better == "higher" else values[::-1])[: max(1, len(values) // 10)]
    expected = (
        sum(value for value, _ in known) / sum(count for _, count in known),
        np.median(values), worst.mean(), values.std(), len(values), sum(c for _, c in known),
    )  # fmt: skip
    assert list(vars(found).values()) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.permutations([("m0", 1.0, 2), ("m1", 3.0, 4), ("m2", 5.0, 6)]), st.booleans())
def test_the_order_of_lines_and_who_wrote_them_changes_nothing(said, by_hub):
    data = RunData()
    for member, value, count in said:
        lines = [line(member, 8, [["loss", value, count]])]
        lines += [line("hub", 8, [["loss", value, count]], about=member)] * by_hub
        for each in lines:
            data.add(parse_line(format_line(each)))
    assert vars(data.own_data.newest("loss")) == vars(Spread.of([(1, 2), (3, 4), (5, 6)], "lower"))
    assert set(data.members) == set()  # no line of a step, so no member that trains


def test_a_run_that_was_cut_off_ends_where_half_of_the_members_evaluated():
    own = OwnData()
    for member in range(6):
        own.add(line(f"m{member}", 10, [["loss", 1.0, 1]]))
    assert own.last == 10
    for member in range(2):
        own.add(line(f"m{member}", 20, [["loss", 0.5, 1]]))
    assert own.last == 10
    own.add(line("m2", 20, [["loss", 0.5, 1]]))
    assert own.last == 20
    assert own.newest("loss").members == 3


def test_figures_of_one_evaluation_may_come_in_several_lines():
    own = OwnData()
    own.add(line("m0", 4, [["loss", 1.0, 2]]))
    own.add(line("m0", 4, [["accuracy", 2.0, 2]]))
    assert own.names() == ["loss", "accuracy"]
    assert own.at_the_end("accuracy", "higher")["figures"]["accuracy"]["mean"] == 1.0


def test_rows_are_the_members_own_lines_or_else_the_hubs():
    told = [line("hub", 4, [["loss", 1.0, 2], ["x", 1.0, 0]], about="m0")]
    assert [(row["member"], row["figure"], row["value"]) for row in rows_of(told)] == [
        ("m0", "loss", 0.5), ("m0", "x", None),
    ]  # fmt: skip
    both = [*told, line("m0", 4, [["loss", 1.0, 2]])]
    assert len(rows_of(both)) == 1


@pytest.mark.parametrize("sums", [
    [["loss", "high", 1]], [["loss", 1.0, -1]], [["loss", 1.0]], ["loss"], {"loss": 1}, 7,
])  # fmt: skip
def test_a_damaged_line_is_skipped(sums):
    assert parse_line(format_line(line("m0", 1, sums))) is None


def test_which_way_a_figure_improves():
    assert better_of("loss") == better_of("error rate") == "lower"
    assert better_of("accuracy of 3") == "higher"
    assert better_of("loss", "loss", "higher") == "higher"
