"""Readers of the original file formats: digits' CSV, IDX (mnist), CIFAR-10's binary records.

Bytes in, arrays out; whatever is wrong with a file is a TaskError that names it. Nothing is ever
unpickled, and sizes that a file declares are checked before memory is taken for them.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgetrain.errors import TaskError
from edgetrain.tasks.classification import Pixels

Labels = NDArray[np.int64]

DIGITS = 1797


def damaged(path: Path | str, what: str) -> TaskError:
    """The error for a file that is not what it should be."""
    return TaskError(f"{path}: {what}", "the file is damaged or another one; replace it")


def read_digits(path: Path) -> tuple[Pixels, Labels]:
    """(1797, 1, 8, 8) uint8 grey levels from 0 to 16, and their labels 0 … 9.

    A line is 64 grey levels and the label, separated by commas.
    """
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float32, ndmin=2)
    except FileNotFoundError:
        raise TaskError(f"no file {path}", "pip install edgetrain[lab] brings it") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, f"not a gzipped table of numbers: {error}") from None
    if table.shape != (DIGITS, 65):
        rows, columns = table.shape
        raise damaged(path, f"{rows} lines of {columns} numbers, expected {DIGITS} of 65")
    if table.min() < 0 or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise damaged(path, "a grey level outside 0 … 16 or a label outside 0 … 9")
    pixels = table[:, :64].astype(np.uint8).reshape(-1, 1, 8, 8)
    return pixels, table[:, 64].astype(np.int64)
