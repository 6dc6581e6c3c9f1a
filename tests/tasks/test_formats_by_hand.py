"""The readers against decoders that read byte by byte, as the formats' documents say: `struct` and
nothing else. Every byte is drawn, so that no two rows, planes or samples are alike."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tasks_files import CIFAR_NAMES, MNIST_NAMES, idx, tar_gz, write

from edgetrain import tasks
from edgetrain.tasks.formats import read_cifar, read_cifar_tar, read_idx_pair
from edgetrain.tasks.partition import Shards


def images_by_hand(data: bytes) -> list[list[list[int]]]:
    """[sample][row][column] of an IDX file: its header and sizes are big-endian."""
    magic, count, height, width = struct.unpack_from(">4I", data)
    assert magic == 0x803
    rows = [
        list(struct.unpack_from(f"{width}B", data, 16 + row * width))
        for row in range(count * height)
    ]
    assert len(data) == 16 + count * height * width
    return [rows[at * height : (at + 1) * height] for at in range(count)]


def labels_by_hand(data: bytes) -> list[int]:
    magic, count = struct.unpack_from(">2I", data)
    assert magic == 0x801
    return list(struct.unpack_from(f"{count}B", data, 8))


def record_by_hand(data: bytes, at: int) -> tuple[int, list[list[list[int]]]]:
    """Label and [colour][row][column] of record `at`: a label, then three planes, by rows."""
    label, *values = struct.unpack_from("3073B", data, 3073 * at)
    planes = [values[1024 * colour : 1024 * (colour + 1)] for colour in range(3)]
    return label, [[plane[32 * row : 32 * row + 32] for row in range(32)] for plane in planes]


def drawn(*shape: int, below: int = 256) -> np.ndarray:
    return np.random.default_rng(54).integers(0, below, shape).astype(np.uint8)


@pytest.mark.parametrize("gzipped", [False, True])
def test_idx_files_are_read_as_by_hand(tmp_path, gzipped):
    images, labels = idx(drawn(7, 28, 28)), idx(drawn(7, below=10))
    names = MNIST_NAMES[:2]
    write(tmp_path, dict(zip(names, (images, labels), strict=True)), gzipped)
    paths = [tmp_path / (f"{name}.gz" if gzipped else name) for name in names]
    pixels, classes = read_idx_pair(*paths)
    assert pixels[:, 0].tolist() == images_by_hand(images)
    assert classes.tolist() == labels_by_hand(labels)


@pytest.mark.parametrize("archived", [False, True])
def test_cifar_files_are_read_as_by_hand(tmp_path, archived):
    records = drawn(len(CIFAR_NAMES), 4, 3073)
    records[:, :, 0] %= 10
    files = {name: each.tobytes() for name, each in zip(CIFAR_NAMES, records, strict=True)}
    if archived:
        path = tmp_path / "cifar-10-binary.tar.gz"
        path.write_bytes(tar_gz(dict(reversed(files.items()))))
        read = read_cifar_tar(path, CIFAR_NAMES)
    else:
        read = [read_cifar(write(tmp_path, files) / name) for name in CIFAR_NAMES]
    for (pixels, labels), data in zip(read, files.values(), strict=True):
        wanted = [record_by_hand(data, at) for at in range(4)]
        assert labels.tolist() == [label for label, _ in wanted]
        assert pixels.tolist() == [planes for _, planes in wanted]


def test_the_users_of_a_leaf_file_have_the_samples_that_are_theirs(tmp_path):
    counts = {"f0044_12": 3, "f0001_41": 1, "f0150_00": 4}
    left = iter(range(sum(counts.values())))
    held = {user: [next(left) for _ in range(count)] for user, count in counts.items()}
    data = {user: {"x": [[at] for at in mine], "y": mine} for user, mine in held.items()}
    table = {"users": list(counts), "num_samples": list(counts.values()), "user_data": data}
    path = tmp_path / "all_data_0_niid_0_keep_0_train_9.json"
    path.write_text(json.dumps(table))
    inputs = [row for user in table["users"] for row in data[user]["x"]]
    shards = Shards(np.zeros(len(inputs), np.int64), f"given({path})", 0)
    for place, user in enumerate(counts):
        mine = [inputs[at][0] for at in shards.of(place, len(counts))]
        assert sorted(mine) == data[user]["y"]


def test_digits_are_the_lines_of_their_table():
    path = Path(tasks.__file__).with_name("digits.csv.gz")
    lines = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()
    wanted = [[int(float(word)) for word in line.split(",")] for line in lines]
    pixels, labels = tasks.formats.read_digits(path)
    assert [[*row, label] for row, label in zip(
        pixels.reshape(-1, 64).tolist(), labels.tolist(), strict=True
    )] == wanted  # fmt: skip
