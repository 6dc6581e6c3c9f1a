"""`edgetrain bench codecs` runs on a small vector; what it measures is not tested here."""

import argparse
import json
from pathlib import Path

import codec_cases as cases
import numpy as np
import pytest

from edgetrain.codecs import bench
from edgetrain.errors import ConfigError


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["codecs", "--elements", "40000", "--repeats", "1", *words])


def test_tables_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = cases.make("clusters", 120_000, 0)
    np.savez(tmp_path / "some.npz", gradient=x, **{"feedback_0.01": x})
    picture = tmp_path / "codecs.png"
    words = ("--gradients", str(tmp_path / "some.npz"), "--picture", str(picture))
    assert bench.run(arguments(*words)) == 0
    text = capsys.readouterr().out
    assert "select + feedback, 1.0%" in text
    assert "index, some feedback_0.01" in text
    assert "times smaller" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_and_one_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(arguments("--json", "--only", "index", "--kernels", "numpy")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["backend"]["name"] == "numpy"
    assert [row["unit"] for row in result["rows"]] == ["of bound"] * 3
    assert result["sizes"] == []


def test_too_little_to_measure() -> None:
    with pytest.raises(ConfigError, match="at least 4096"):
        bench.run(arguments("--elements", "100"))


def test_a_goal_is_met_or_missed() -> None:
    assert bench.Row("x", 2.0, "u").met is None
    assert bench.Row("x", 2.0, "u", 1.0).met
    assert bench.Row("x", 2.0, "u", 1.0, at_most=True).met is False
    assert "MISSED" in bench.Row("x", 2.0, "u", 1.0, at_most=True).line()
