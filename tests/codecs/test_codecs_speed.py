"""What benchmarks/codecs_speed.py prints; what it measures is not tested here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def speed(monkeypatch, own_imports):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import codecs_speed

    return codecs_speed


@pytest.fixture
def measure(speed, monkeypatch):
    def run(*words):
        words = ("--elements", "40000", "--repeats", "1", *words)
        monkeypatch.setattr(sys, "argv", ["codecs_speed.py", *words])
        return speed.main()

    return run


def test_a_goal_is_met_or_missed(speed):
    assert speed.Row("x", 2.0, "u").met is None
    assert speed.Row("x", 2.0, "u", 1.0).met
    assert speed.Row("x", 2.0, "u", 1.0, at_most=True).met is False


def test_a_goal_is_shown_only_at_the_size_it_holds_for(speed):
    encode = speed.Row("int8 encode", 0.1, "of r += g", 0.8)
    bound = speed.Row("index, uniform, 1.0%", 1.5, "of bound", 1.02, at_most=True)
    assert speed.judged(encode, speed.GOALS_FROM).met is False
    assert speed.judged(encode, speed.GOALS_FROM - 1).met is None
    assert speed.judged(bound, 1_000_000).met is False
    assert speed.judged(bound, 50_000).met is None


def test_a_missed_goal_is_printed_as_missed(speed):
    assert "MISSED" in speed.line_of(speed.Row("x", 2.0, "u", 1.0, at_most=True))
    assert speed.line_of(speed.Row("x", 2.0, "u", 1.0)).endswith("met")
    assert "goal" not in speed.line_of(speed.Row("x", 2.0, "u"))


def test_tables(measure, capsys):
    assert measure() == 0
    text = capsys.readouterr().out
    assert "select + feedback, 1.0%" in text
    assert "times smaller" in text


def test_json_and_one_part(measure, capsys):
    assert measure("--json", "--only", "index", "--kernels", "numpy") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["backend"]["name"] == "numpy"
    assert [row["unit"] for row in result["rows"]] == ["of bound"] * 3
    assert result["sizes"] == []


def test_too_little_to_measure(measure, capsys):
    with pytest.raises(SystemExit):
        measure("--elements", "100")
    assert "at least 4096" in capsys.readouterr().err
