"""Small data sets in the original formats, made up: what the tests of tasks read."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

MNIST_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_NAMES = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")


def idx(array: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes."""
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def mnist_files(train: int = 40, test: int = 20) -> dict[str, bytes]:
    """The four files by name; image n is full of the value n."""
    files = {}
    for name, count in zip(MNIST_NAMES, (train, train, test, test), strict=True):
        numbers = np.arange(count)
        images = np.broadcast_to(numbers[:, None, None], (count, 28, 28))
        files[name] = idx(images if "images" in name else numbers % 10)
    return files


def cifar_files(each: int = 8) -> dict[str, bytes]:
    """The six files by name; picture n of a file has label n and is full of file * 20 + n."""
    files = {}
    for number, name in enumerate(CIFAR_NAMES):
        records = np.empty((each, 3073), np.uint8)
        records[:, 0] = np.arange(each) % 10
        records[:, 1:] = number * 20 + np.arange(each)[:, None]
        files[name] = records.tobytes()
    return files


def write(folder: Path, files: dict[str, bytes], gzipped: bool = False) -> Path:
    """The files in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / (f"{name}.gz" if gzipped else name)
        path.write_bytes(gzip.compress(data) if gzipped else data)
    return folder


def tar_gz(files: dict[str, bytes]) -> bytes:
    """An archive as CIFAR-10's: the files in one folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
