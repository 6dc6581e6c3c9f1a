"""TOML that comes from anywhere: too deep, too large, not text; one clear line, and soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.__main__ import main
from edgetrain.errors import ConfigError
from edgetrain.files import toml
from edgetrain.files.toml import MOST_DEPTH, parse_toml, read_toml, to_toml
from edgetrain.fleet import catalog

BAD = {
    "deep lists": ("v = " + "[" * 3000 + "]" * 3000, "nested more than 32 deep"),
    "lists below the parser's own limit": ("v = " + "[" * 200 + "]" * 200, "nested more than 32"),
    "deep tables": ("v = " + "{a=" * 100 + "1" + "}" * 100, "nested more than 32 deep"),
    "a dotted key": (".".join("a" * 100_000) + " = 1", "nested more than 32 deep"),
    "a long word": ('"' + "a" * 500_000, "Illegal|Unterminated|Expected"),
    "a long number": ("v = " + "9" * 5000, "Exceeds the limit"),
    "not TOML": ("members: 8", "Expected"),
    "a mark": ("v = 1".encode("utf-8-sig"), "in UTF-8 with a byte order mark.*save it as UTF-8"),
    "UTF-16": ("v = 1".encode("utf-16"), "is in UTF-16.*save it as UTF-8"),
    "UTF-16, big end first": (b"\xfe\xff\0v", "is in UTF-16"),
    "UTF-32": ("v = 1".encode("utf-32"), "is in UTF-32"),
    "latin-1": ("a = 1\nb = 'é'".encode("latin-1"), r"byte 0xe9 in line 2 \(is it latin-1\?\)"),
    "UTF-16 without a mark": ("v = 'é'".encode("utf-16-le"), "not UTF-8|not TOML"),
    "too large": (b"# " + b"x" * (5 << 20), "is larger than"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("most", [toml.MOST_BYTES, catalog.MOST_BYTES])
def test_bad_files_are_one_error(kind, most, tmp_path):
    content, said = BAD[kind]
    path = tmp_path / "bad.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said) as caught:
        read_toml(path, most)
    assert str(path) in str(caught.value)


def test_endless_files_and_folders(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), tmp_path / "fifo"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_toml(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "none")


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@given(st.integers(1, 2 * MOST_DEPTH), st.booleans())
def test_depth_is_counted_exactly(depth, lists):
    text = "a = " + ("[" * (depth - 1) + "]" * (depth - 1) if lists and depth > 1 else "1")
    if not lists:
        text = ".".join("a" * depth) + " = 1"
    if depth <= MOST_DEPTH:
        assert to_toml(parse_toml(text))
    else:
        with pytest.raises(ValueError, match="nested"):
            parse_toml(text)


@pytest.mark.parametrize("word", ["seed=" + "9" * 5000, "seed=" + "[" * 3000 + "]" * 3000])
def test_overrides_that_cannot_be_read_are_shown_in_part(word, capsys):
    assert main(["run", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith("edgetrain: defaults: seed = '")
    assert len(said) < 300
