"""The JSON schema of the job file: it allows what is read as a job, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.files.toml import read_toml
from edgetrain.jobs.job import Job
from edgetrain.jobs.reading import keys, parse
from edgetrain.jobs.schema import schema

EXAMPLES = Path(__file__).parents[2] / "examples"
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool}


def fits(value, shape):
    """Whether a schema allows a value, by the words that ours uses."""
    if "anyOf" in shape:
        return any(fits(value, each) for each in shape["anyOf"])
    if "const" in shape:
        return value == shape["const"]
    if shape["type"] == "number":
        right = type(value) in (int, float)
    elif shape["type"] == "integer":
        right = type(value) is int or (type(value) is float and value.is_integer())
    else:
        right = type(value) is TYPES[shape["type"]]
    if right and "enum" in shape and value not in shape["enum"]:
        return False
    if not right or ("minimum" in shape and not shape["minimum"] <= value <= shape["maximum"]):
        return False
    if "items" in shape:
        return all(fits(each, shape["items"]) for each in value)
    known = shape.get("properties")
    return known is None or all(k in known and fits(v, known[k]) for k, v in value.items())


PLAIN = st.one_of(
    st.integers(), st.integers(-1, 3), st.floats(allow_nan=False), st.booleans(), st.text(),
    st.just("auto"), st.just({}), st.lists(st.one_of(st.just({}), st.integers())),
)  # fmt: skip


@given(st.sampled_from([*keys(), "fleet.nosuch", "nosuch", "train"]), PLAIN)
def test_it_allows_what_is_read_and_nothing_else(key, value):
    job = value
    for part in reversed(key.split(".")):
        job = {part: job}
    try:
        parse(job)
    except ConfigError:
        assert not fits(job, schema())
    else:
        assert fits(job, schema())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_example_jobs_fit(path):
    assert fits(read_toml(path), schema())


def test_it_is_written_for_editors(tmp_path, capsys):
    path = tmp_path / "job.schema.json"
    assert main(["init", str(path), "--schema"]) == 0
    assert f"#:schema {path}" in capsys.readouterr().out
    written = json.loads(path.read_text("utf-8"))
    assert written == schema()
    assert fits(Job().to_dict(), written)


@pytest.mark.parametrize("words", [["members=3"], ["--task", "mine.py"]])
def test_it_goes_alone(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "job.schema.json", *words, "--schema"]) == 2
    assert "--schema goes with neither" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
