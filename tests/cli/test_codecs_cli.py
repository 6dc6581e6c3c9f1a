"""`edgetrain codecs`, and where verbs of earlier versions went."""

import json

import pytest

from edgetrain.__main__ import main
from edgetrain.codecs import parse
from edgetrain.codecs.table import TABLE


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
