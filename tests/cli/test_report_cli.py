"""`edgetrain report` beside its page: figures for papers, a trace for Perfetto, rows as CSV; and
what it refuses."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import defaultdict

import pytest
from command_line import environment
from made_up_runs import DGA, SYNC, Clock, replace, write_comparison, write_run

from edgetrain.__main__ import main
from edgetrain.runs.folder import METRICS, metrics_path
from edgetrain.runs.metrics.log import MetricsLog

SHORT = replace(DGA, members=3, steps=40)


@pytest.fixture
def run(tmp_path):
    """A run with evaluations, an event, and exchanges that overlap."""
    folder = write_run(tmp_path / "run", SHORT)
    clock = Clock()
    for number in range(SHORT.members):
        with MetricsLog(metrics_path(folder), f"m{number}", clock, 0.0) as log:
            for round in range(8):
                submitted = (round + 1) * 5 * SHORT.step_s
                clock.now = submitted + 0.4
                log.exchange(
                    round=round, submitted=submitted, arrived=clock.now - 0.01, submit_s=0.001,
                    decode_s=0.0, apply_s=0.001, sent_bytes=100, received_bytes=100,
                    local_steps=2, delay=2, members=3,
                )  # fmt: skip
    with MetricsLog(metrics_path(folder), "hub", clock, 0.0) as log:
        log.event("gone", "no sign of life", about="m1")
    return folder


def test_a_trace_has_nested_slices_and_exchanges_as_asynchronous_events(run, tmp_path, capsys):
    assert main(["report", str(run), "--trace", str(tmp_path / "trace.json")]) == 0
    assert "trace.json" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "hub", 1: "m0", 2: "m1", 3: "m2"}
    for tid in (1, 2, 3):
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == tid]
        open_until: list[float] = []
        for each in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= each["ts"] + 0.01:
                open_until.pop()
            assert not open_until or each["ts"] + each["dur"] <= open_until[-1] + 0.01
            assert len(open_until) < 2
            open_until.append(each["ts"] + each["dur"])
        assert sum(e["name"].startswith("step ") for e in slices) == SHORT.steps
    flights = defaultdict(list)
    for each in events:
        if each.get("cat") == "exchange":
            flights[each["id"]].append((each["ph"], each["ts"]))
    assert len(flights) == 3 * 8
    for ends in flights.values():
        assert [phase for phase, _ in ends] == ["b", "n", "e"]
        assert [at for _, at in ends] == sorted(at for _, at in ends)
    assert any(e["ph"] == "i" and e["name"] == "gone" and e["tid"] == 2 for e in events)


def test_rows_of_steps_are_those_of_the_metrics(run, tmp_path):
    assert main(["report", str(run), "--csv", str(tmp_path / "steps.csv")]) == 0
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    steps = [each for each in steps if each["kind"] == "step"]
    assert len(rows) == len(steps) == 3 * SHORT.steps
    for key in ("t", "compute_s", "wait_s", "overhead_s"):
        assert sum(float(r[key]) for r in rows) == pytest.approx(sum(s[key] for s in steps))
    assert {row["member"] for row in rows} == {"m0", "m1", "m2"}


@pytest.mark.real
def test_figures_have_the_widths_of_one_and_two_columns(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "figures"
    words = ["report", str(run), "--figures", str(folder), "--format", "svg,png"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    names = {path.name for path in folder.iterdir()}
    panels = ("figure", "loss", "seconds", "timeline")
    widths = ("one-column", "two-columns")
    assert names == {f"{p}-{w}.{f}" for p in panels for w in widths for f in ("svg", "png")}
    assert sum(line.startswith("figure: ") for line in said) == len(names)
    for width, points in (("one-column", 252), ("two-columns", 515.52)):
        text = (folder / f"loss-{width}.svg").read_text()
        assert f'width="{points}pt"' in text
        assert "training loss" in text  # as letters, which can be searched and edited


def test_several_runs_have_a_timeline_each(tmp_path):
    pytest.importorskip("matplotlib")
    write_comparison(
        tmp_path / "both", replace(SYNC, members=2, steps=20), replace(DGA, members=2, steps=20)
    )
    folder = tmp_path / "figures"
    assert main(["report", str(tmp_path / "both"), "--figures", str(folder)]) == 0
    assert {"figure-one-column.pdf", "seconds-two-columns.pdf"} <= {
        p.name for p in folder.iterdir()
    }


def refusal(capsys, *words):
    assert main(["report", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("edgetrain: ")
    assert said.count("\n") == 1
    return said


def test_bad_input_is_one_line(run, tmp_path, capsys):
    there = tmp_path / "there"
    there.write_text("mine")
    for flag in ("-o", "--trace", "--csv"):
        assert "there already" in refusal(capsys, run, flag, there)
    assert there.read_text() == "mine"
    assert "did you mean 'pdf'?" in refusal(capsys, run, "--figures", tmp_path, "--format", "pfd")
    assert "--figures FOLDER" in refusal(capsys, run, "--format", "pdf")
    assert "cannot write" in refusal(capsys, run, "-o", tmp_path / "no" / "folder.html")
    assert "cannot write" in refusal(capsys, run, "--trace", tmp_path / "no" / "trace.json")
    assert "cannot make" in refusal(capsys, run, "--figures", there)
    assert "did not" not in refusal(capsys, tmp_path / "nothing")
    assert main(["report", str(run), "--trace", str(there), "--force"]) == 0
    assert there.read_text().startswith("{")


@pytest.mark.real
def test_figures_without_matplotlib_are_refused_before_anything_is_read(run, tmp_path):
    code = f"""
import sys
sys.modules["matplotlib"] = None
from edgetrain.__main__ import main
sys.exit(main(["report", {str(run)!r}, "--figures", {str(tmp_path / "f")!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("edgetrain: --figures needs matplotlib")
    assert done.stderr.count("\n") == 1


@pytest.mark.real
def test_a_page_needs_no_matplotlib(run):
    code = f"""
import sys
from edgetrain.__main__ import main
assert main(["report", {str(run)!r}]) == 0
assert not {{"matplotlib", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
