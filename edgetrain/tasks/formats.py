"""Readers of the original file formats: digits' CSV, IDX (mnist), CIFAR-10's binary records.

Bytes in, arrays out; whatever is wrong with a file is a TaskError that names it. Nothing is ever
unpickled, and sizes that a file declares are checked before memory is taken for them.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import TaskError
from edgetrain.tasks.classification import Pixels

Labels = NDArray[np.int64]

DIGITS = 1797
DIGITS_LIMIT = 1 << 20
"""Characters of their table that are read: four times what it has."""

IDX_IMAGES, IDX_LABELS = 0x00000803, 0x00000801
"""Magic numbers: two zero bytes, 8 for unsigned bytes, the number of dimensions."""
IDX_LIMIT = 10_000_000
"""More images than any set in this format has; a count beyond it is a damaged header."""

CIFAR_RECORD = 1 + 3 * 32 * 32
"""Bytes of a record: the label, then the red, the green and the blue plane, row by row."""
CIFAR_LIMIT_BYTES = 1_000_000 * CIFAR_RECORD


def damaged(path: Path | str, what: str) -> TaskError:
    """The error for a file that is not what it should be."""
    return TaskError(f"{path}: {what}", "the file is damaged or another one; replace it")


def read_digits(path: Path) -> tuple[Pixels, Labels]:
    """(1797, 1, 8, 8) uint8 grey levels from 0 to 16, and their labels, from lines of numbers."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            text = io.StringIO(lines.read(DIGITS_LIMIT))
        table = np.loadtxt(text, delimiter=",", dtype=np.float32, ndmin=2)
    except FileNotFoundError:
        raise TaskError(f"no file {path}", "edgetrain's own, without data.folder") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, f"not a gzipped table of numbers: {error}") from None
    if table.shape != (DIGITS, 65):
        rows, columns = table.shape
        raise damaged(path, f"{rows} lines of {columns} numbers, expected {DIGITS} of 65")
    if table.min() < 0 or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise damaged(path, "a grey level outside 0 … 16 or a label outside 0 … 9")
    pixels = table[:, :64].astype(np.uint8).reshape(-1, 1, 8, 8)
    return pixels, table[:, 64].astype(np.int64)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes, plain or gzipped: (n, 28, 28) images or (n,) labels.

    A plain file is mapped, not read: all processes of a machine share its pages.
    Source of the format: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
    """
    if path.suffix == ".gz":
        return _read_idx_gz(path)
    with path.open("rb") as file:
        shape, start = _idx_shape(path, file)
    size = path.stat().st_size
    if size != start + int(np.prod(shape)):
        raise damaged(path, f"{size} bytes, expected {start + int(np.prod(shape))}")
    return np.asarray(np.memmap(path, np.uint8, "r", start, shape))


def _read_idx_gz(path: Path) -> NDArray[np.uint8]:
    try:
        with gzip.open(path) as file:
            shape, _ = _idx_shape(path, file)
            expected = int(np.prod(shape))
            data = file.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise damaged(path, f"not a whole gzip file: {error}") from None
    if len(data) != expected:
        found = "more" if len(data) > expected else str(len(data))
        raise damaged(path, f"{found} bytes after the header, expected {expected}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _idx_shape(path: Path, file: BinaryIO | gzip.GzipFile) -> tuple[tuple[int, ...], int]:
    """The dimensions that the header declares, and the header's length in bytes."""
    header = file.read(4)
    magic = int.from_bytes(header, "big")
    if len(header) < 4 or magic not in (IDX_IMAGES, IDX_LABELS):
        raise damaged(
            path, f"begins with {header.hex() or 'nothing'}, not the magic of IDX images or labels"
        )
    dimensions = 3 if magic == IDX_IMAGES else 1
    rest = file.read(4 * dimensions)
    if len(rest) < 4 * dimensions:
        raise damaged(path, "truncated within its header")
    shape = tuple(int(size) for size in np.frombuffer(rest, ">u4"))
    if not 0 < shape[0] <= IDX_LIMIT or shape[1:] not in ((), (28, 28)):
        raise damaged(path, f"declares the sizes {shape}, expected n × 28 × 28 images or n labels")
    return shape, 4 + 4 * dimensions


def read_idx_pair(images: Path, labels: Path) -> tuple[Pixels, Labels]:
    """(n, 1, 28, 28) uint8 grey levels and their labels 0 … 9, from two IDX files."""
    pixels, classes = read_idx(images), read_idx(labels)
    if pixels.ndim != 3:
        raise damaged(images, "labels, expected images")
    if classes.ndim != 1:
        raise damaged(labels, "images, expected labels")
    if len(pixels) != len(classes):
        raise damaged(labels, f"{len(classes)} labels for the {len(pixels)} images of {images}")
    _check_labels(labels, classes)
    return pixels[:, np.newaxis], classes.astype(np.int64)


def read_cifar(path: Path) -> tuple[Pixels, Labels]:
    """(n, 3, 32, 32) uint8 and labels 0 … 9 from one plain batch file, mapped and not read.

    Source of the format: Krizhevsky, "The CIFAR-10 dataset", binary version.
    """
    _check_cifar_size(path, path.stat().st_size)
    return _records(path, np.asarray(np.memmap(path, np.uint8, "r")))


def read_cifar_tar(path: Path, names: tuple[str, ...]) -> list[tuple[Pixels, Labels]]:
    """The same of the files called `names` in a tar archive, gzipped or not, in that order.

    Nothing is extracted to the disk; the archive is read into memory once per process.
    """
    found: dict[str, tuple[Pixels, Labels]] = {}
    try:
        with tarfile.open(path) as archive:
            for name, data in _contents(path, archive, names):
                found[name] = _records(f"{path}:{name}", np.frombuffer(data, np.uint8))
                if len(found) == len(names):
                    break
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise damaged(path, f"not a whole tar archive: {error}") from None
    if missing := [name for name in names if name not in found]:
        raise damaged(path, f"holds no {', '.join(missing)}")
    return [found[name] for name in names]


def _contents(
    path: Path, archive: tarfile.TarFile, names: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
    for entry in archive:
        name = entry.name.rpartition("/")[2]
        if name in names and entry.isfile():
            _check_cifar_size(f"{path}:{name}", entry.size)
            if entry.issparse():
                raise damaged(f"{path}:{name}", "a sparse entry, whose bytes are not all there")
            file = archive.extractfile(entry)
            data = file.read() if file else b""
            if len(data) != entry.size:
                raise damaged(f"{path}:{name}", f"{len(data)} bytes, expected {entry.size}")
            yield name, data


def _check_cifar_size(path: Path | str, size: int) -> None:
    if size == 0 or size % CIFAR_RECORD or size > CIFAR_LIMIT_BYTES:
        raise damaged(path, f"{size} bytes, expected whole records of {CIFAR_RECORD}")


def _records(path: Path | str, data: NDArray[np.uint8]) -> tuple[Pixels, Labels]:
    records = data.reshape(-1, CIFAR_RECORD)
    labels = records[:, 0].astype(np.int64)
    _check_labels(path, labels)
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _check_labels(path: Path | str, labels: NDArray[np.integer]) -> None:
    if labels.max() > 9:
        raise damaged(path, f"a label of {labels.max()}, expected 0 … 9")
