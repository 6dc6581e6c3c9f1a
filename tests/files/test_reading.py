"""Files in whose place anything may be, and JSON that nobody wrote on purpose."""

from __future__ import annotations

import os
import socket

import pytest

from edgetrain.errors import ConfigError
from edgetrain.files.reading import parse_json, read_bytes, read_json


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(ConfigError, match="is larger than 4 bytes"):
        read_bytes(path, 4)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", 4)


def test_a_file_without_end_costs_no_memory(tmp_path):
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        read_bytes(tmp_path / "holes", 1 << 20)


def test_what_is_not_a_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name in ("fifo", "link", "loop", "socket", ".", "a\0b", "x" * 300):
            with pytest.raises(ConfigError) as raised:
                read_bytes(tmp_path / name, 10)
            assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[" * 100_000, b'{"a": NaN}', b"[Infinity]", b'["\\ud800"]', b'{"\\uD801": 1}',
        b"\xff\xfe", b"9" * 5000, b'"a\x00b"',
    ],
)  # fmt: skip
def test_what_is_not_json_is_one_error(text, tmp_path):
    with pytest.raises(ValueError):
        parse_json(text)
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_json(path, 1 << 20)


def test_characters_beyond_the_first_plane_are_json():
    assert parse_json(b'["\\ud83d\\ude00"]') == ["\U0001f600"]
