"""The harness of the benchmarks: what it makes of figures, and of names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgetrain.jobs.grid import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch, own_imports):
    monkeypatch.syspath_prepend(FOLDER)
    import harness

    return harness


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


def test_every_file_is_listed_with_what_it_measures():
    status, out, _ = benchmarks("--list")
    assert status == 0
    listed = {line[2:].split()[0]: line[2:].split(maxsplit=1)[1] for line in out.splitlines()[:-1]}
    files = {path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".toml")}
    assert set(listed) == files - {"harness", "__main__", "peer"}
    assert all(listed.values())


def test_an_unknown_name_is_refused_with_the_nearest():
    status, out, said = benchmarks("rond")
    assert (status, out) == (2, "")
    assert said.splitlines()[-1].endswith("no benchmark 'rond': did you mean 'round'?")


def test_what_has_no_json_says_so():
    status, _, said = benchmarks("steps", "--json")
    assert (status, said.strip()) == (1, "benchmarks: steps prints no JSON")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
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
