"""The lines of metrics.jsonl: written by many, torn by a full disk, read by anyone."""

from __future__ import annotations

import json
import logging
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import Clock

from edgetrain.errors import ConfigError, TaskError
from edgetrain.runs.data import MemberData, RunData
from edgetrain.runs.metrics.lines import LINE_BYTES, Follower, Lines, figures, parse_line
from edgetrain.runs.metrics.log import MetricsLog

STEP = {
    "round": 1,
    "loss": 0.5,
    "wait_s": 0.25,
    "compute_s": 0.05,
    "overhead_s": 0.001,
    "sent_bytes": 1000,
    "received_bytes": 2000,
    "cpu_s": 0.125,
    "peak_bytes": 1 << 28,
}


def log_to(path: Path, clock: Clock | None = None, member: str = "m0", **more: float) -> MetricsLog:
    return MetricsLog(path, member, clock or Clock(10.0), 9.5, **more)


# --- writing ---


def test_a_step_is_one_line_with_every_key(tmp_path: Path) -> None:
    with log_to(tmp_path / "metrics.jsonl") as log:
        log.step(step=1, **STEP)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "kind": "step",
        "t": 0.5,
        "member": "m0",
        "step": 1,
        "joules": None,
        **STEP,
    }


def test_an_evaluation_is_dated_to_its_beginning(tmp_path: Path) -> None:
    with log_to(tmp_path / "metrics.jsonl") as log:
        log.evaluation(step=10, round=2, figures={"accuracy": 0.9, "loss": 0.3}, eval_s=0.125)
    (record,) = Lines(tmp_path / "metrics.jsonl")
    assert record["t"] == 0.375
    assert figures(record) == {"accuracy": 0.9, "loss": 0.3}


def test_a_figure_may_not_hide_a_key_of_the_line(tmp_path: Path) -> None:
    with log_to(tmp_path / "metrics.jsonl") as log, pytest.raises(TaskError, match="'step'"):
        log.evaluation(step=1, round=0, figures={"step": 3.0}, eval_s=0.0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_becomes_null(tmp_path: Path, value: float) -> None:
    with log_to(tmp_path / "metrics.jsonl") as log:
        log.step(step=1, **{**STEP, "loss": value})
    (record,) = Lines(tmp_path / "metrics.jsonl")
    assert record["loss"] is None


def test_lines_wait_for_each_other_and_an_event_takes_them_along(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock()
    with log_to(path, clock, flush_s=1.0) as log:
        log.step(step=1, **STEP)
        assert list(Lines(path)) == []
        log.event("late", "silent for 2.0 s", about="m3")
        assert [record["kind"] for record in Lines(path)] == ["step", "event"]
        clock.now = 0.5
        log.step(step=2, **STEP)
        clock.now = 1.0
        log.step(step=3, **STEP)
        assert len(list(Lines(path))) == 4


def test_a_buffer_does_not_grow_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log_to(path, flush_s=math.inf) as log:
        for step in range(1, 1001):
            log.step(step=step, **STEP)
        assert path.stat().st_size > 64 * 1024


def test_closing_twice_is_fine_and_later_lines_are_dropped(tmp_path: Path) -> None:
    log = log_to(tmp_path / "metrics.jsonl")
    log.close()
    log.close()
    log.event("finished")
    assert list(Lines(tmp_path / "metrics.jsonl")) == []


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        log_to(tmp_path / "absent" / "metrics.jsonl")


@given(
    reason=st.text(max_size=9000),
    names=st.lists(st.text(min_size=1, max_size=20), max_size=1500),
)
def test_every_line_fits_and_says_what_was_cut(
    tmp_path_factory: pytest.TempPathFactory, reason: str, names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    hub = {key: STEP[key] for key in ("sent_bytes", "received_bytes", "cpu_s", "peak_bytes")}
    with log_to(path, member="hub") as log:
        log.event("gone", reason)
        log.round(round=1, members=names, missing=names, weight=1.0, close_s=0.1, **hub)
    assert all(len(line) <= LINE_BYTES for line in path.read_bytes().splitlines(keepends=True))
    event, merged = Lines(path)
    assert len(event["reason"]) + event.get("cut", {}).get("reason", 0) == len(reason)
    assert reason.startswith(event["reason"])
    for key in ("members", "missing"):
        assert len(merged[key]) + merged.get("cut", {}).get(key, 0) == len(names)
        assert names[: len(merged[key])] == merged[key]


@pytest.mark.real
def test_many_processes_share_a_file_without_tearing_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys, time; from edgetrain.runs.metrics.log import MetricsLog\n"
        "with MetricsLog(sys.argv[1], sys.argv[2], time.monotonic, 0.0) as log:\n"
        "    for step in range(500): log.event('late', 'x' * (step * 7))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), f"m{i}"]) for i in range(4)
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    follower = Follower(path)
    records = follower.read()
    assert follower.damaged == 0
    for i in range(4):
        lengths = [len(record["reason"]) for record in records if record["member"] == f"m{i}"]
        assert lengths == [step * 7 for step in range(500)]


# --- a full disk ---


def test_a_full_disk_is_told_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), log_to(Path("/dev/full")) as log:
        for step in range(1, 4):
            log.step(step=step, **STEP)
        assert log.lost == 3
    assert caplog.messages == [
        "m0 cannot write its metrics to /dev/full: No space left on device; "
        "training goes on without them"
    ]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_after_a_torn_line_the_next_ones_are_whole_and_the_loss_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with log_to(path) as log:
        log.step(step=1, **STEP)
        with no_file_longer_than(path.stat().st_size + 20):
            log.step(step=2, **STEP)
            log.step(step=3, **STEP)
        log.step(step=4, **STEP)
        log.step(step=5, **STEP)
        assert log.lost == 2
    assert len(caplog.messages) == 1
    records = list(Lines(path))
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 4, 5]
    (event,) = (record for record in records if record["kind"] == "event")
    assert event["reason"] == "2 lines of metrics could not be written"


# --- reading ---


def written(steps: int) -> bytes:
    line = b'{"kind":"step","t":%d.5,"member":"m0","step":%d}\n'
    return b"".join(line % (step, step) for step in range(1, steps + 1))


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_following_gives_each_record_once_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    data, follower, seen = written(8), Follower(path), []
    for cut in [*sorted(cuts), len(data)]:
        path.write_bytes(data[:cut])
        seen += [record["step"] for record in follower.read()]
        assert seen == list(range(1, data[:cut].count(b"\n") + 1))
    assert seen == list(range(1, 9))
    assert follower.damaged == 0


@given(cut=st.integers(0, len(written(5))))
def test_a_torn_last_line_costs_that_line_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(written(5)[:cut])
    steps = [record["step"] for record in Lines(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= written(5)[:cut].count(b"\n")
    follower = Follower(path)
    assert [record["step"] for record in follower.read() + follower.rest()] == steps


@given(kept=st.integers(0, len(written(1)) - 2))
def test_a_line_glued_to_a_torn_one_is_recovered(kept: int) -> None:
    other = {"kind": "event", "t": 1.0, "member": "m1", "reason": '{"kind":"step"'}
    glued = written(1)[:kept] + json.dumps(other, separators=(",", ":")).encode()
    assert parse_line(glued) == other


@given(st.binary(max_size=200))
def test_rubbish_is_no_record_and_no_error(rubbish: bytes) -> None:
    record = parse_line(b'{"kind":' + rubbish)
    assert record is None or isinstance(record["kind"], str)


def test_deep_nesting_is_rubbish_too() -> None:
    assert parse_line(b'{"kind":' + b"[" * 100_000) is None


def test_one_kind_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with log_to(path) as log:
        log.step(step=1, **STEP)
        log.evaluation(step=1, round=1, figures={"loss": 0.3}, eval_s=0.0)
        log.event("error", '"kind":"eval"')
    assert [record["kind"] for record in Lines(path, "eval")] == ["eval"]


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert list(Lines(path)) == follower.read() == []
    path.write_bytes(written(1))
    assert len(follower.read()) == 1


def test_unreadable_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"rubbish\n\n" + written(1))
    follower = Follower(path)
    assert len(follower.read()) == 1
    assert follower.damaged == 1


# --- adding up ---


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1), min_size=1))
def test_a_counter_survives_restarts_of_the_process(lives: list[list[int]]) -> None:
    member, expected = MemberData("m0"), 0
    for life in lives:
        reports = sorted(life)
        # A restart shows only if the new life reports less than the old one did.
        last = member.counts.get("sent_bytes", 0)
        if reports[0] >= last and last:
            continue
        for value in reports:
            member.add_usage({"sent_bytes": value})
        expected += reports[-1]
    assert member.sent_bytes == expected


def test_a_member_that_came_back_is_not_lost() -> None:
    def event(event: str, about: str) -> dict[str, object]:
        return {"kind": "event", "t": 0.0, "member": "hub", "about": about, "event": event}

    story = [event("gone", "m1"), event("gone", "m2"), event("joined", "m1"), event("late", "m3")]
    assert RunData().add_all(story).lost() == ["m2"]


def test_a_member_is_late_until_a_round_has_it_again() -> None:
    late = {"kind": "event", "t": 1.0, "member": "hub", "about": "m1", "event": "late"}
    merged = {"kind": "round", "t": 2.0, "member": "hub", "round": 1, "members": ["m1", "m2"]}
    data = RunData().add_all([late, late])
    assert data.members["m1"].standing == "late"
    data.add(merged)
    assert data.members["m1"].standing == "joined"
    assert data.members["m1"].late == 2


def test_somebody_refused_under_a_members_name_does_not_make_it_lost() -> None:
    refused = {"kind": "event", "t": 1.0, "member": "hub", "about": "m1", "event": "refused"}
    joined = {**refused, "event": "joined"}
    data = RunData().add_all([joined, refused])
    assert data.members["m1"].standing == "joined"
    assert data.lost() == []


def test_what_the_hub_says_after_a_member_finished_changes_nothing() -> None:
    records = [
        {"kind": "event", "t": 1.0, "member": "m0", "event": "finished"},
        {"kind": "event", "t": 2.0, "member": "hub", "about": "m0", "event": "gone"},
    ]
    data = RunData().add_all(records)
    assert data.lost() == []
    assert data.members["m0"].standing == "finished"


def test_kinds_and_keys_of_a_later_version_are_left_alone() -> None:
    records = [
        {"kind": "weather", "t": 1.0, "member": "m0"},
        {"kind": "step", "t": 2.0, "member": "m0", "step": 1, "wait_s": "much", "new": [1]},
    ]
    data = RunData().add_all(records)
    assert data.members["m0"].step == 1
    assert data.members["m0"].wait_s == 0


def test_a_gateways_bytes_to_the_hub_above_are_apart_from_those_of_its_site(tmp_path):
    from edgetrain.runs.data import RunData
    from edgetrain.runs.reports.comparison import compare
    from edgetrain.runs.reports.comparison_table import columns_of
    from edgetrain.runs.summary import summarise

    def line(number, above, **more):
        return {"kind": "round", "t": 1.0 + number, "member": "hub", "round": number,
                "sent_bytes": 800 * number, "received_bytes": 800 * number, "cpu_s": 0.0,
                "peak_bytes": 0, "above_sent_bytes": above, "above_received_bytes": 2 * above,
                } | more  # fmt: skip

    # Counts begin again where the gateway was started again.
    data = RunData().add_all([line(1, 100), line(2, 200), line(3, 50)])
    summary = summarise(tmp_path, {"status": "finished"}, data)
    assert summary["hub"]["above_sent_bytes"] == 250
    assert summary["hub"]["above_received_bytes"] == 500
    (row,) = compare([summary]).rows
    assert row.wan_bytes == 750
    assert "WAN both ways" in {
        f"{each.heading} {each.heading_below}" for each in columns_of(compare([summary]))
    }
    plain = summarise(tmp_path, {"status": "finished"}, RunData().add_all([]))
    assert compare([plain]).rows[0].wan_bytes is None
