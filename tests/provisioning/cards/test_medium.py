"""The laws of a medium, for the one that writes cards and for those that tests use."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import media
import pytest

from edgetrain.errors import ConfigError
from edgetrain.provisioning.cards.medium import FileMedium, aligned

pytestmark = pytest.mark.real

SIZE = 1 << 20
KINDS = ["memory", "file", "file without O_DIRECT", "loop device"]


def loop_device(path: Path) -> str:
    """A loop device over a file; the test is skipped where there is none to be had."""
    if os.geteuid():
        pytest.skip("loop devices need root")
    words = ["losetup", "--find", "--show", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("losetup is not installed")
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(params=KINDS)
def medium(request, tmp_path) -> Iterator[FileMedium | media.MemoryMedium]:
    path = tmp_path / "card.img"
    if request.param == "memory":
        yield media.MemoryMedium(SIZE)
    elif request.param == "loop device":
        path.write_bytes(bytes(SIZE))
        device = loop_device(path)
        try:
            found = FileMedium(device)
            yield found
            found.close()
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
    else:
        found = FileMedium(path, SIZE, direct="without" not in request.param)
        yield found
        found.close()


def put(medium: FileMedium | media.MemoryMedium, offset: int, data: bytes) -> None:
    buffer = aligned(len(data))
    buffer[: len(data)] = data
    medium.write(offset, buffer[: len(data)])


def got(medium: FileMedium | media.MemoryMedium, offset: int, length: int) -> bytes:
    buffer = aligned(-(-length // 4096) * 4096)
    count = medium.read(offset, buffer[:length])
    return bytes(buffer[:count])


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 4096), (8192, 65536), (4096, 100), (512, 512), (100, 5000), (SIZE - 512, 512)],
)
def test_what_is_written_is_read_back(medium, offset, length):
    data = os.urandom(length)
    put(medium, 0, b"\xff" * SIZE)
    put(medium, offset, data)
    medium.flush()
    medium.forget()
    whole = got(medium, 0, SIZE)
    assert whole[offset : offset + length] == data
    assert set(whole[:offset] + whole[offset + length :]) <= {0xFF}
    assert got(medium, offset, length) == data


def test_its_size_is_known_and_reading_behind_it_is_short(medium):
    assert medium.size == SIZE
    assert len(got(medium, SIZE - 4096, 8192)) == 4096
    assert got(medium, SIZE, 4096) == b""


def test_it_has_a_name(medium):
    assert medium.name


def test_a_file_is_made_with_its_size_and_a_device_is_not(tmp_path):
    FileMedium(tmp_path / "new.img", 8192).close()
    assert (tmp_path / "new.img").stat().st_size == 8192
    with pytest.raises(ConfigError, match=r"is not there \(is the card in the reader"):
        FileMedium("/dev/no-such-card", 8192)
    with pytest.raises(ConfigError, match="cannot open"):
        FileMedium(tmp_path / "missing.img")
    with pytest.raises(ConfigError, match="neither a block device nor a file"):
        FileMedium("/dev/null")


def test_a_device_in_use_is_refused_by_the_kernel(tmp_path):
    path = tmp_path / "card.img"
    path.write_bytes(bytes(SIZE))
    device = loop_device(path)
    try:
        holder = os.open(device, os.O_RDWR | os.O_EXCL)
        try:
            with pytest.raises(ConfigError, match="is in use"):
                FileMedium(device)
        finally:
            os.close(holder)
        FileMedium(device).close()
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_read_only_device_is_refused(tmp_path):
    path = tmp_path / "card.img"
    path.write_bytes(bytes(SIZE))
    device = loop_device(path)
    try:
        if subprocess.run(["blockdev", "--setro", device], check=False).returncode:
            pytest.skip("blockdev is not installed")
        with pytest.raises(ConfigError, match=r"read-only or empty|may not be written"):
            FileMedium(device)
    finally:
        subprocess.run(["blockdev", "--setrw", device], check=False)
        subprocess.run(["losetup", "--detach", device], check=True)
