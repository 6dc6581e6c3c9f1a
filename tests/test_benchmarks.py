"""The harness of the benchmarks: what it makes of figures, and of names."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgetrain import strategies
from edgetrain.jobs.grid import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
PARTS = {
    "harness", "__main__", "peer", "environments", "processes", "flower_simulation", "cohort_jobs",
    "kept-500ms", "calibration", "lab",
}  # fmt: skip
"""Files that are no benchmark."""


@pytest.fixture
def harness(monkeypatch, own_imports):
    monkeypatch.syspath_prepend(FOLDER)
    import harness

    return harness


@pytest.fixture
def frontier(harness):
    import frontier

    return frontier


def benchmarks(*words):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_a_figure_is_the_median_of_its_repeats_and_their_range(harness):
    values = iter([5.0, 1.0, 2.0])
    found = harness.measure("three", lambda: {"seconds": next(values)}, 3)
    assert found.figures == {"seconds": harness.Figure(2.0, 1.0, 5.0)}
    assert found.load >= 0
    first, line = found.text().splitlines()
    assert first.startswith("three: median of 3")
    assert line.split() == ["seconds", "2", "(1", "to", "5)"]


def test_a_figure_may_be_missing_from_some_calls(harness):
    calls = iter([{"a": 1.0}, {"a": 3.0, "b": 7.0}])
    found = harness.measure("two", lambda: next(calls), 2)
    assert found.figures == {"a": harness.Figure(2.0, 1.0, 3.0), "b": harness.Figure(7.0, 7.0, 7.0)}
    assert json.loads(json.dumps(found.to_dict()))["figures"]["b"]["median"] == 7.0


def test_what_is_measured_once_has_no_range(harness):
    text = harness.measure("one", lambda: {"bytes": 8_102_295.0}, 1).text()
    assert "8,102,295" in text
    assert "to" not in text.splitlines()[1]


@pytest.mark.real
def test_every_file_is_listed_with_what_it_measures():
    status, out, _ = benchmarks("--list")
    assert status == 0
    listed = {line[2:].split()[0]: line[2:].split(maxsplit=1)[1] for line in out.splitlines()[:-1]}
    files = {path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".toml")}
    assert set(listed) == files - PARTS
    assert all(listed.values())


@pytest.mark.real
def test_an_unknown_name_is_refused_with_the_nearest():
    status, out, said = benchmarks("rond")
    assert (status, out) == (2, "")
    assert said.splitlines()[-1].endswith("no benchmark 'rond': did you mean 'round'?")


@pytest.mark.real
def test_what_has_no_json_says_so():
    status, _, said = benchmarks("steps", "--json")
    assert (status, said.strip()) == (1, "benchmarks: steps prints no JSON")


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FOLDER.glob("*.toml")) if path.stem not in PARTS],
    ids=lambda path: path.stem,
)
def test_every_sweep_is_one(path):
    assert load(path).cells()


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FOLDER.glob("*.py")) if "\ndef measured(" in path.read_text("utf-8")],
    ids=lambda path: path.stem,
)
def test_whatever_measures_can_be_imported(path, monkeypatch, own_imports):
    monkeypatch.syspath_prepend(FOLDER)
    assert callable(__import__(path.stem).measured)


# -- bounds ----------------------------------------------------------------------------------------


@pytest.fixture
def bounds(harness):
    import bounds

    return bounds


def of(harness, what, value, others=0.0):
    figures = {what: harness.Figure(value, value - 0.1, value + 0.1)}
    return harness.Measured("some", figures, 3, 1.5, others)


def test_a_row_has_its_spread_its_goal_and_the_work_beside_it(harness, bounds):
    quiet = bounds.rows_of(of(harness, "dense round, seconds", 1.15))["dense round, seconds"]
    assert "| 1.15 | 1.05 to 1.25 | <= 1.2 | met |" in quiet
    assert "load 1.5" in quiet
    assert "beside" not in quiet
    busy = bounds.rows_of(of(harness, "whole encode, 1.0% (avx512)", 0.75, 0.6))
    assert "| >= 0.8 | missed |" in (line := busy.popitem()[1])
    assert "beside other work (0.6 cores)" in line
    assert (
        ">= 0.7 | met"
        in bounds.rows_of(of(harness, "whole encode, 1.0% (avx2)", 0.75)).popitem()[1]
    )


def test_the_page_gets_new_rows_and_keeps_the_others(bounds):
    head = "\n".join(bounds.HEAD)
    page = f"before\n\n{head}\n\nafter\n"
    one = bounds.with_rows(page, {"a": "| a | 1 |", "b": "| b | 2 |"})
    assert one == f"before\n\n{head}\n| a | 1 |\n| b | 2 |\n\nafter\n"
    two = bounds.with_rows(one, {"a": "| a | 3 |", "c": "| c | 4 |"})
    assert two == f"before\n\n{head}\n| a | 3 |\n| b | 2 |\n| c | 4 |\n\nafter\n"
    assert bounds.with_rows(two, {}) == two
    with pytest.raises(SystemExit, match="no table"):
        bounds.with_rows("nothing", {})
    assert head in bounds.PAGE.read_text("utf-8")


def test_work_beside_a_measurement_is_not_its_own(harness, monkeypatch):
    busy, own = iter([10.0, 13.0]), iter([1.0, 3.5])
    monkeypatch.setattr(harness, "busy_s", lambda: next(busy))
    monkeypatch.setattr(harness, "own_s", lambda: next(own))
    times = iter([0.0, 5.0])
    monkeypatch.setattr(harness.time, "monotonic", lambda: next(times))
    found = harness.measure("one", lambda: {"s": 1.0}, 1)
    assert found.others == pytest.approx(0.1)
    assert "beside other work (0.1 cores)" in found.text()


# -- frontier --------------------------------------------------------------------------------------


def made_up(frontier, finals):
    """A `Run` whose final figure is that of its strategy and rate; others end with an error."""

    def run(words):
        said = dict(word.split("=", 1) for word in words)
        rate = said["optimizer"].split("lr=")[1].rstrip(" }")
        final = finals.get((said["strategy"], rate))
        if final is None:
            return {"error": f"{said['strategy']} cannot"}
        final -= 0.01 * int(said["seed"])
        return {"final": final, "seconds": 10.0, "mb": 1.0, "curve": [[1.0, 0.5], [4.0, final]]}

    return run


def test_a_strategy_runs_all_seeds_at_the_rate_that_is_best_with_the_first(frontier):
    case = frontier.Case("digits", "iid", "momentum", 200, 50)
    finals = {("dga", "0.02"): 0.9, ("dga", "0.05"): 0.955, ("dga", "0.1"): 0.94}
    ran = []
    run = made_up(frontier, finals)
    seeds = range(3)
    row = frontier.row_of(case, "dga", seeds, lambda words: ran.append(words) or run(words))
    assert (row.rate, row.finals) == (0.05, pytest.approx((0.955, 0.945, 0.935)))
    assert row.to_target == (4.0, None, None)
    assert len(ran) == 5
    lost = frontier.row_of(case, "fedavg", seeds, run)
    assert lost.error == "fedavg cannot"
    text = frontier.text_of(case, [row, lost])
    assert "94.5 (93.5 to 95.5)" in text
    assert "4.0 (1 of 3)" in text
    assert "fedavg  fedavg cannot" in text


def test_in_equal_time_a_strategy_has_what_it_had_by_then(frontier):
    """sync-sgd is slower, and has the most by the time that dga took."""
    curves = {"dga": [[1, 0.5], [5, 0.8]], "sync-sgd": [[2, 0.6], [4, 0.9], [50, 0.99]]}

    def run(words):
        strategy = next(word[9:] for word in words if word.startswith("strategy="))
        curve = curves[strategy]
        return {"final": curve[-1][1], "seconds": curve[-1][0], "mb": 1.0, "curve": curve}

    case = frontier.Case("digits", "iid", "adamw", 200, 50)
    ((_, rows),) = frontier.walk([case], ["dga", "sync-sgd"], range(11, 13), run, "dga")
    assert [(row.final, row.seconds) for row in rows] == [(0.8, 5), (0.9, 5)]


def test_none_on_the_frontier_is_beaten_in_both(frontier):
    def row(name, final, seconds):
        return frontier.Row(name, 0.1, (final,), seconds)

    rows = [
        row("slow", 0.98, 30.0), row("fast", 0.9, 5.0), row("beaten", 0.9, 6.0),
        row("even", 0.9, 5.0), frontier.Row("lost", error="diverged"),
    ]  # fmt: skip
    assert frontier.frontier(rows, "higher") == {"slow", "fast", "even"}
    assert frontier.frontier(rows, "lower") == {"fast", "even"}


def test_every_strategy_is_compared_unless_it_is_an_ablation(frontier):
    names = {
        strategies.find(name).name
        for name in frontier.contenders()
        if name not in frontier.OWN_NAMES
    }
    assert names == strategies.TABLE.keys() - set(frontier.ABLATIONS)
    both = ["fedavg, long", "dga(decay), synced", "dga(variates), short"]
    assert frontier.chosen(", ".join(["dga(predict)", *both])) == ["dga(predict)", *both]


def test_a_case_runs_keeps_what_was_run_and_draws_it(frontier, tmp_path, monkeypatch, capsys):
    """The smallest: one strategy, one rate, one seed, 20 steps."""
    task = frontier.TASKS["digits"]
    small = replace(task, words=(*task.words[:1], "members=2", "batch=8", "steps=20"))
    monkeypatch.setitem(frontier.TASKS, "digits", small)
    monkeypatch.setitem(frontier.RATES, ("digits", "momentum"), (0.05,))
    kept, picture = tmp_path / "kept.jsonl", tmp_path / "frontier.png"
    words = [
        "--short", "--only", "dga", "--where", "iid,200@50", "--seeds", "1",
        "--keep", str(kept), "--picture", str(picture),
    ]  # fmt: skip
    assert frontier.main(words) == 0
    first = capsys.readouterr().out
    assert "digits, iid, momentum, 200@50" in first
    assert "* dga" in first
    assert picture.stat().st_size > 10_000
    monkeypatch.setattr(frontier, "simulate", None)
    assert frontier.main([*words, "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    (row,) = case["rows"]
    assert row["seconds"] > 20 * 0.05
    assert len(kept.read_text().splitlines()) == 1


def test_a_strategy_that_is_none_is_one_line(frontier, capsys):
    with pytest.raises(SystemExit) as refused:
        frontier.main(["--only", "dgaa"])
    assert refused.value.code == 2
    assert "did you mean 'dga'" in capsys.readouterr().err
