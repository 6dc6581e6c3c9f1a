"""Photographs: `cifar10`, 32 x 32 pixels in colour, ten classes.

The file format is read in `formats`; what classifying images means stands in `classification`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from edgetrain.errors import TaskError
from edgetrain.tasks.classification import (
    Both,
    Classification,
    Images,
    Mirror,
    Pixels,
    Recipe,
    Shift,
    Stack,
    he_init,
)
from edgetrain.tasks.download import Download, cache_folder, original
from edgetrain.tasks.formats import Labels, read_cifar, read_cifar_tar
from edgetrain.tasks.partition import Shards

CIFAR_ARCHIVE = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    170_052_171,
)
BATCH_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def cifar10(
    folder: str | None = None,
    partition: str = "iid",
    seed: int = 0,
    download: bool | str = False,
    held_out: int = 2000,
) -> Classification:
    """CIFAR-10 from its *binary* version in `folder`: the six .bin files, or the archive of them.

    Unpacked files are mapped, so that all members of a machine share one copy; from the archive
    each process holds its own 180 MB. The Python version is a pickle, and is not read. `download`
    fetches the archive (true, or the address of a mirror). Evaluation uses `held_out` of the 10,000
    test images, evenly spaced. Raises TaskError for files that are missing or damaged.
    """
    where = Path(folder).expanduser() if folder else cache_folder("cifar10")
    *batches, test_batch = _batches(where, download)
    labels = np.concatenate([labels for _, labels in batches])
    train = Images(Stack([pixels for pixels, _ in batches]), labels)
    # Mean and standard deviation of the training images' levels, 0 … 255, all colours together.
    recipe = Recipe(_cifar_model, mean=120.7, spread=64.2, augment=_VARIED, target=0.6)
    shards = Shards(labels, partition, seed)
    return Classification("cifar10", train, Images(*test_batch).some(held_out), recipe, shards)


def _batches(where: Path, download: bool | str) -> list[tuple[Pixels, Labels]]:
    for folder in (where, where / "cifar-10-batches-bin"):
        there = [(folder / name).is_file() for name in BATCH_FILES]
        if all(there):
            return [read_cifar(folder / name) for name in BATCH_FILES]
        if any(there):
            name = BATCH_FILES[there.index(False)]
            raise TaskError(f"no {name} in {folder}", "unpack the whole of the archive there")
    instead = (CIFAR_ARCHIVE.name.removesuffix(".gz"),)
    return read_cifar_tar(original(CIFAR_ARCHIVE, where, download, instead), BATCH_FILES)


_VARIED = Both(Shift(4), Mirror(), columns=2)
"""The usual variation of CIFAR-10: moved by up to four pixels, half of them mirrored."""


def _cifar_model() -> nn.Module:
    """Three convolutions, 94,762 parameters, with group normalisation (Wu and He 2018).

    Unlike batch normalisation it has no running statistics, which members would have to agree on,
    and does not depend on how large a member's batch is.
    """
    return he_init(
        nn.Sequential(
            *_block(3, 32, stride=1),
            *_block(32, 64, stride=2),
            *_block(64, 128, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
    )


def _block(channels: int, out: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.GroupNorm(8, out), nn.ReLU()
