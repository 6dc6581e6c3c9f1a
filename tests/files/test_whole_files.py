"""Files that are replaced whole, whatever happens to the writer or the disk."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgetrain.files.writing import replacing, write_text


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for text in ("first", "second: ü"):
        write_text(path, text)
        assert path.read_text("utf-8") == text
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


def test_a_writer_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "first")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half of the sec")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("what", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "summary.json"
    write_text(path, "first")
    with monkeypatch.context() as patch:
        patch.setattr(Path if what == "replace" else os, what, fail)
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "second")
    assert path.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    texts = {letter * 200_000 for letter in "ab"}
    write_text(path, "a" * 200_000)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [write_text(path, t) for _ in range(30) for t in texts])
        seen = set()
        while not writing.done():
            seen.add(path.read_text())
    assert seen <= texts
