"""The sentence above a picture or a page: never a claim that the figures do not hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.runs.reports.comparison import Comparison, compare
from edgetrain.runs.reports.message import (
    capacity_message,
    message,
    sweep_message,
)


def run(strategy: str = "dga", reached: float | None = 5.0, **more: Any) -> dict[str, Any]:
    return {
        "name": strategy, "strategy": strategy, "status": "finished", "metric": "accuracy",
        "better": "higher", "target": 0.97, "final": {"accuracy": 0.98}, "steps": 100,
        "target_seconds": reached, "target_steps": None, "seconds": 20.0,
        "seconds_per_step": 0.2, "steps_per_second": 5.0, "compute_s": 0.2, "wait_s": 0.0,
        "overhead_s": 0.0, "sent_bytes": 1, "received_bytes": 1, "joules": None,
        "joules_source": None, "members_lost": [], **more,
    }  # fmt: skip


def of(*runs: dict[str, Any]) -> Comparison:
    return compare(runs)


LATE = {"backend": "packet", "timing_ok": False}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([run("sync-sgd", 52.2), run()], "dga reaches 97 % 10.4 times sooner than sync-sgd"),
        (
            [run("sync-sgd", 10.0), run("fedavg", 8.0), run()],
            "dga reaches 97 % 2.0 times sooner than sync-sgd",
        ),
        (
            [run("sync-sgd", 5.1), run()],
            "dga and sync-sgd reach 97 % equally soon, after 5.0 s",
        ),
        ([run("sync-sgd", 2.5), run()], "sync-sgd reaches 97 % first, 2.0 times sooner than dga"),
        (
            [run("sync-sgd", None), run()],
            "dga reaches 97 % over 4.0 times sooner than sync-sgd, which does not",
        ),
        (
            [run("sync-sgd", None, seconds=4.0, status="interrupted"), run()],
            "dga reaches 97 % after 5.0 s; sync-sgd does not (interrupted)",
        ),
        ([run("sync-sgd"), run(reached=None)], "Only sync-sgd reaches 97 %, after 5.0 s"),
        (
            [run("sync-sgd", None), run(reached=None, seconds=9.0)],
            "No run reaches 97 %: sync-sgd 98.0 % in 20.0 s, dga 98.0 % in 9.0 s",
        ),
        (
            [run("sync-sgd", None, target=None), run(reached=None)],
            "Accuracy at the end: sync-sgd 98.0 % in 20.0 s, dga 98.0 % in 20.0 s",
        ),
        ([run(reached=None, final={}), run("b", None, final={})], "2 runs, not evaluated"),
        ([run()], "dga: accuracy 98.0 %, 97 % after 5.0 s"),
        ([run(reached=None)], "dga: accuracy 98.0 % after 20.0 s, 97 % not reached"),
        ([run(reached=None, target=None)], "dga: accuracy 98.0 % after 20.0 s"),
        (
            [run(reached=None, status="failed")],
            "dga: accuracy 98.0 % after 20.0 s, 97 % not reached (ended by an error)",
        ),
        (
            [run(reached=None, final={})],
            "dga: 100 steps in 20.0 s, not evaluated",
        ),
        ([run(reached=None, final={}, steps=0)], "dga: no step, not evaluated"),
        (
            [run("sync-sgd", 10.0), run(emulation=LATE)],
            "dga reaches 97 % 2.0 times sooner than sync-sgd "
            "(late emulation: not to be trusted)",
        ),
        ([], "No run"),
    ],
)  # fmt: skip
def test_a_title_says_what_the_figures_hold(runs: list[dict[str, Any]], said: str) -> None:
    assert message(of(*runs)) == said


@given(st.lists(st.none() | st.floats(0.01, 100), min_size=2, max_size=5))
def test_a_factor_is_that_of_the_figures(reached: list[float | None]) -> None:
    runs = [
        run(f"s{place}", seconds, seconds=max(100.0, seconds or 0))
        for place, seconds in enumerate(reached)
    ]
    said = message(of(*runs))
    factor = re.fullmatch(r"(s\d) reaches 97 % (?:first, )?([\d.]+) times sooner than (s\d)", said)
    if factor:
        sooner, later = (reached[int(factor[i][1])] for i in (1, 3))
        assert sooner is not None
        assert later is not None
        assert later / sooner == pytest.approx(float(factor[2]), rel=0.06)
        assert later / sooner >= 1.04
    elif "equally soon" in said:
        best = min(seconds for seconds in reached[1:] if seconds is not None)
        assert reached[0] is not None
        assert 1 / 1.06 < reached[0] / best < 1.06
    elif "No run" in said:
        assert not any(reached)


def point(speed: float | None, final: float | None) -> dict[str, Any]:
    return {"fleet_steps_per_second": speed, "final": final}


def test_a_sweep_is_told_by_speed_or_by_the_final_figure() -> None:
    same = {
        "dga": {"0": point(10, 0.978), "40": point(10, 0.978)},
        "dga-uncorrected": {"0": point(10, 0.978), "40": point(10.2, 0.418)},
    }
    said = sweep_message("delay", ["0", "40"], same, "accuracy")
    assert said == (
        "Final accuracy, delay 0 to 40: dga 97.8 % to 97.8 %, dga-uncorrected 97.8 % to 41.8 %"
    )
    grows = {"": {"1": point(10, 0.9), "16": point(120, 0.9)}}
    said = sweep_message("members", ["1", "16"], grows, "accuracy")
    assert said == "Steps a second at members 16 (members 1 = 100 %): 12.0x"
    failed = {"dga": {"0": point(10, None), "40": point(None, None)}}
    assert sweep_message("delay", ["0", "40"], failed, "accuracy") == "Along delay: 2 values"
    assert "2 values" in sweep_message("delay", ["0", "40"], {"dga": {}}, "accuracy")


def test_capacity_has_a_sentence() -> None:
    assert capacity_message({"members": 1000, "speed_up": 250.0, "bottleneck": "hub"}) == (
        "1,000 members train as fast as 250 that never wait (25 %); bottleneck: hub"
    )
