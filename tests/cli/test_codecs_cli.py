"""`edgetrain bench codecs` and `edgetrain codecs`; what is measured is not tested here."""

import argparse
import json
from pathlib import Path

import codec_cases as cases
import numpy as np
import pytest

from edgetrain.__main__ import main
from edgetrain.cli.bench import PARTS, add_codecs_arguments, bench_codecs, line_of
from edgetrain.codecs import TABLE, bench, parse
from edgetrain.errors import ConfigError


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_codecs_arguments(parser)
    return parser.parse_args(["--elements", "40000", "--repeats", "1", *words])


def test_tables_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = cases.make("clusters", 120_000, 0)
    np.savez(tmp_path / "some.npz", gradient=x, **{"feedback_0.01": x})
    picture = tmp_path / "codecs.png"
    words = ("--gradients", str(tmp_path / "some.npz"), "--picture", str(picture))
    assert bench_codecs(arguments(*words)) == 0
    text = capsys.readouterr().out
    assert "select + feedback, 1.0%" in text
    assert "index, some feedback_0.01" in text
    assert "times smaller" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_and_one_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_codecs(arguments("--json", "--only", "index", "--kernels", "numpy")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["backend"]["name"] == "numpy"
    assert [row["unit"] for row in result["rows"]] == ["of bound"] * 3
    assert result["sizes"] == []


def test_too_little_to_measure() -> None:
    with pytest.raises(ConfigError, match="at least 4096"):
        bench_codecs(arguments("--elements", "100"))


def test_a_missed_goal_is_printed_as_missed() -> None:
    assert "MISSED" in line_of(bench.Row("x", 2.0, "u", 1.0, at_most=True))
    assert line_of(bench.Row("x", 2.0, "u", 1.0)).endswith("met")
    assert "goal" not in line_of(bench.Row("x", 2.0, "u"))


def test_what_can_be_measured_has_arguments_and_measurements() -> None:
    assert set(PARTS) == set(bench.PARTS)


def test_the_list_of_codecs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in TABLE if not any(f"  {name}" in line for line in lines)] == []
    assert main(["codecs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["codecs"]
    assert len(listed) == len(TABLE) + 1
    for row in listed:
        assert parse(row["example"]).name == row["example"]
        assert row["ratio"] >= 1


def test_a_typo_in_a_codec_gets_the_near_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "codec=tpok(0.01)"]) == 2
    assert "did you mean 'topk'" in capsys.readouterr().err
