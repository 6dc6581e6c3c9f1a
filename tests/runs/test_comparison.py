"""Runs set against each other: the numbers, and the table that shows them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import DGA, FEDAVG, SYNC, write_comparison, write_run

from edgetrain.runs.folder import metrics_path, read_summary
from edgetrain.runs.metrics.log import MetricsLog
from edgetrain.runs.reports import columns, units
from edgetrain.runs.reports.comparison import compare
from edgetrain.runs.reports.comparison_table import columns_of, footnotes, text
from edgetrain.runs.summary import summarise


def summaries(root: Path, *stories: Any) -> list[dict[str, Any]]:
    found = [read_summary(folder) for folder in write_comparison(root, *stories)]
    return [summary for summary in found if summary is not None]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return summaries(tmp_path_factory.mktemp("usual"), SYNC, FEDAVG, DGA)


def test_the_first_run_is_the_yardstick(usual: list[dict[str, Any]]) -> None:
    sync, fedavg, dga = compare(usual).rows
    assert sync.speedup == 1.0
    assert dga.speedup == usual[0]["target_seconds"] / usual[2]["target_seconds"]
    assert sync.wait_share == pytest.approx(0.42 / (0.42 + 0.002 + 0.05 * 1.035))
    assert dga.wait_share == 0
    assert fedavg.seconds_per_step == pytest.approx(FEDAVG.step_s)


def test_a_yardstick_that_never_got_there_gives_a_lower_bound(tmp_path: Path) -> None:
    short = replace(SYNC, steps=100)
    sync, dga = compare(summaries(tmp_path, short, DGA)).rows
    assert sync.target_seconds is None
    assert sync.speedup is None
    assert dga.speedup is None
    assert dga.speedup_at_least == pytest.approx(100 * SYNC.step_s / (140 * DGA.step_s))


def test_runs_are_told_apart_by_what_differs(usual: list[dict[str, Any]]) -> None:
    def labels(*found: dict[str, Any], given: list[str] | None = None) -> list[str]:
        return [row.label for row in compare(found, given).rows]

    one, other = {**usual[0], "name": "digits"}, {**usual[2], "name": "digits"}
    assert labels(one, other) == ["sync-sgd", "dga"]
    assert labels({**other, "name": "fp32"}, {**other, "name": "topk"}) == ["fp32", "topk"]
    assert labels(other, other) == ["dga 1", "dga 2"]
    assert labels(one, other, given=["a", "b"]) == ["a", "b"]


def test_the_plain_table(usual: list[dict[str, Any]]) -> None:
    shown = text(compare(usual), Path("runs/x/compare.png"))
    above, below = shown.splitlines()[:2]
    assert above.startswith("             final  time to                time  ")
    assert (above.split()[-2:], below.split()[-3:]) == (
        ["steps,", "timing"],
        ["delay", "energy", "ok"],
    )
    assert below.startswith("strategy  accuracy     97 %  speed-up  per step  waiting     sent")
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["sync-sgd", "fedavg", "dga"]
    assert "~ energy is estimated" in shown
    assert shown.endswith("picture: runs/x/compare.png\n")
    of = text(replace(compare(usual, ["star", "direct", "tree"]), of="topology"))
    assert of.splitlines()[1].startswith("topology  accuracy")
    assert shown.isascii()


def test_what_went_wrong_is_said_below(tmp_path: Path) -> None:
    found = summaries(tmp_path, replace(FEDAVG, lost="m3"), replace(DGA, timing_ok=False))
    found[0] |= {"status": "failed", "errors": ["m3: out of memory\x1b[2J"]}
    notes = footnotes(compare(found))
    assert notes[0] == "fedavg was ended by an error: m3: out of memory [2J"
    assert notes[1] == "fedavg lost m3"
    assert notes[2].startswith("dga: the emulated network was itself late (31 ms")


def test_a_single_run_has_no_speed_up(usual: list[dict[str, Any]]) -> None:
    shown = columns_of(compare(usual[2:]))
    assert "speed-up" not in [column.heading for column in shown]


def test_a_run_that_mostly_waits_says_for_what(tmp_path: Path) -> None:
    short = replace(DGA, compute_s=0.002, overhead_s=0.0, delay=5, wait_s=0.5)
    (note,) = [n for n in compare(summaries(tmp_path, short)).notes if "wait" in n]
    assert note == (
        "dga: members wait 98 % of the time: a round trip (1.0 s) is 505 steps long, and 5 of "
        "them overlap with training (try longer rounds, a delay or a closer hub; a smaller codec "
        "where links are slow)"
    )
    waiting = replace(FEDAVG, wait_s=0.42)
    (note,) = compare(summaries(tmp_path / "fedavg", waiting)).notes
    assert "a round trip (420 ms) is 8 steps long, and none of them overlap with training" in note
    for seldom in (DGA, replace(FEDAVG, wait_s=0.2)):
        assert compare(summaries(tmp_path / f"{seldom.wait_s}", seldom)).notes == ()


def test_where_one_member_is_slow_the_round_trip_is_not_blamed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name, compute_s in (("m0", 0.01), ("m1", 0.01), ("m2", 0.2)):
            path = metrics_path(tmp_path)
            log = stack.enter_context(MetricsLog(path, name, lambda: 0.0, 0.0))
            figures = dict.fromkeys(("overhead_s", "sent_bytes", "received_bytes", "cpu_s"), 0)
            log.step(
                step=1, round=0, loss=1, compute_s=compute_s, wait_s=0.21 - compute_s,
                peak_bytes=1, **figures,
            )  # fmt: skip
    summary = summarise(
        tmp_path, {"name": "dga", "status": "finished", "local_steps": 1, "delay": 0}
    )
    least = [summary[f"least_{key}"] for key in ("waiting", "busy_s", "wait_s")]
    assert least == ["m2", 0.2, pytest.approx(0.01)]
    (note,) = [note for note in compare([summary]).notes if "wait" in note]
    assert note == (
        "dga: members wait 65 % of the time: m2 has the longest steps, 200 ms each, and the others "
        "wait for it"
    )
    # One member's own folder does not tell a slower one from a longer round trip.
    assert summarise(tmp_path, {"members": 8})["least_waiting"] is None


def test_columns_that_say_nothing_are_left_out(usual: list[dict[str, Any]]) -> None:
    bare = [{**one, "emulation": None, "joules": None, "target": None} for one in usual]
    headings = {column.heading for column in columns_of(compare(bare))}
    assert headings.isdisjoint({"energy", "timing", "time to", "speed-up"})


def test_an_interrupted_run_without_steps_can_be_shown(tmp_path: Path) -> None:
    shown = text(compare([summarise(tmp_path, {"name": "dga"})]))
    assert "dga was interrupted" in shown


def test_nothing_to_compare_is_no_error() -> None:
    assert text(compare([])).split() == [
        *("final", "time", "strategy", "accuracy", "per", "step", "waiting", "sent", "received"),
    ]


def test_json_is_plain_data_in_base_units(usual: list[dict[str, Any]]) -> None:
    data = json.loads(json.dumps(compare(usual).as_json(Path("compare.png"))))
    assert data["picture"] == "compare.png"
    assert data["target"] == 0.97
    assert [run["strategy"] for run in data["runs"]] == ["sync-sgd", "fedavg", "dga"]
    assert data["runs"][0]["speedup"] == 1.0


@pytest.mark.parametrize("width", [60, 70, 80, 100, 140])
def test_the_table_fits_its_terminal(usual: list[dict[str, Any]], width: int) -> None:
    out = text(compare(usual), Path("compare.png"), width)
    table, _, _ = out.partition("\n\n")
    assert max(map(len, table.splitlines())) <= width
    rows = [line for line in table.splitlines() if line.startswith("dga ")]
    assert len(rows) == 1
    assert "\u2026" not in out
    assert "9.7x" in rows[0]


# --- columns ---

texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=9)


@given(st.lists(st.tuples(texts, texts, st.integers(0, 4)), max_size=8), texts, st.integers(1, 60))
def test_columns_keep_to_the_width_by_leaving_out_the_highest_ranks(
    made: list[tuple[str, str, int]], name: str, width: int
) -> None:
    offered = [columns.column(name, ["first"])] + [
        columns.column(f"{place}{heading}", [cell], below=heading, rank=rank)
        for place, (heading, cell, rank) in enumerate(made)
    ]
    kept = columns.fit(offered, width, gap=2)
    assert kept == [column for column in offered if column in kept]
    left_out = [column.rank for column in offered if column not in kept]
    assert max((column.rank for column in kept), default=0) <= min(left_out, default=4)
    assert 0 not in left_out
    if columns.total_width(kept, 2) > width:
        assert all(column.rank == 0 for column in kept)


@given(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=8))
def test_plain_and_rich_text_say_the_same_in_the_promised_width(
    made: list[tuple[str, str, str]],
) -> None:
    shown = [columns.column(heading, [cell], below=below) for heading, below, cell in made]
    plain = columns.as_text(shown)
    assert [line.rstrip() for line in columns.as_rich(shown).plain.split("\n")] == plain
    assert all(len(line) <= columns.total_width(shown, 2) for line in plain)


# --- units ---


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.size(0), "0 B"),
        (units.size(999), "999 B"),
        (units.size(999_600), "1.00 MB"),
        (units.size(1_234_567), "1.23 MB"),
        (units.size(5.2e12), "5200 GB"),
        (units.duration(0), "0 s"),
        (units.duration(0.0123), "12.3 ms"),
        (units.duration(0.9997), "1.0 s"),
        (units.duration(59.96), "1m00s"),
        (units.duration(75), "1m15s"),
        (units.duration(3 * 3600 + 300), "3h05m"),
        (units.duration(5 * 86400), "5.0 days"),
        (units.duration(None), "-"),
        (units.duration(float("inf")), "-"),
        (units.share(0.664), "66 %"),
        (units.figure("accuracy", 0.9734), "97.3 %"),
        (units.figure("loss", 0.41234), "0.412"),
        (units.figure("accuracy", None), "-"),
        (units.goal("accuracy", 0.97), "97 %"),
        (units.goal("accuracy", 0.975), "97.5 %"),
        (units.goal("loss", 0.2), "loss 0.2"),
        (units.times(7.83), "7.8x"),
        (units.times(123.4), "123x"),
        (units.energy(1234), "1.23 kJ"),
    ],
)
def test_quantities_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected


@given(st.floats(0, 1e15, allow_nan=False))
def test_no_quantity_is_long(value: float) -> None:
    assert len(units.duration(value)) <= 18
    assert len(units.size(value)) <= 10


def test_a_run_on_a_machine_that_was_too_slow_for_its_device_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "dga", replace(DGA, steps=20, members=2))
    with MetricsLog(metrics_path(folder), "m1", lambda: 9.0, 0.0) as log:
        log.event("overrun", "12 of 20 steps took longer than the 20 ms of the emulated device")
    summary = summarise(folder)
    (note,) = (note for note in compare([summary]).notes if "m1" in note)
    assert note.startswith("dga m1: 12 of 20 steps took longer than the 20 ms of the emulated")
    assert note.endswith("its times are long")
    assert not [n for n in compare([summary | {"overrun": None}]).notes if "m1" in n]
