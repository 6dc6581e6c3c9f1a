"""Handwritten digits: `digits` (8 x 8, beside this file) and `mnist` (28 x 28).

The file formats are read in `formats`; what classifying images means stands in `classification`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from edgetrain.errors import TaskError
from edgetrain.tasks.classification import Classification, Images, Recipe, Shift, he_init
from edgetrain.tasks.download import Download, cache_folder, original
from edgetrain.tasks.formats import read_digits, read_idx_pair
from edgetrain.tasks.partition import Shards


def digits(
    folder: str | None = None, partition: str = "iid", seed: int = 0, download: bool | str = False
) -> Classification:
    """1,797 real handwritten digits of 8 x 8 pixels; every fifth of a fixed order is held out.

    The data comes with edgetrain, or is a `digits.csv.gz` in `folder`. `seed` deals the rest out to
    the members by `partition` ("iid", "dirichlet(0.3)"); the held-out fifth is the same for every
    seed. Raises TaskError when the file is missing or damaged.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (the test
    part; its page there has the terms). Grey levels go from 0 to 16. Half of the training images
    are moved by up to a pixel: shards are small, and members that run on through a delay would
    learn theirs by heart.
    """
    if download:
        raise TaskError("digits has nothing to download", "it comes with edgetrain")
    home = Path(__file__).parent if folder is None else Path(folder).expanduser()
    pixels, labels = read_digits(home / "digits.csv.gz")
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    recipe = Recipe(_digits_model, mean=8.0, spread=8.0, augment=Shift(1, 0.5), target=0.97)
    return Classification(
        "digits",
        Images(pixels[train], labels[train]),
        Images(pixels[held_out], labels[held_out]),
        recipe,
        Shards(labels[train], partition, seed),
    )


def _digits_model() -> nn.Module:
    """Two convolutions and a linear layer, 9,930 parameters, as torch initialises them.

    No normalisation: nothing in it is shared between samples, so a mean of members is what one
    large batch would give. Larger first weights (He et al. 2015) would learn faster in step, and
    suffer more from a delay.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


_MNIST_HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_FILES = (
    Download(
        _MNIST_HOME + "train-images-idx3-ubyte.gz",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9_912_422,
    ),
    Download(
        _MNIST_HOME + "train-labels-idx1-ubyte.gz",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28_881,
    ),
    Download(
        _MNIST_HOME + "t10k-images-idx3-ubyte.gz",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1_648_877,
    ),
    Download(
        _MNIST_HOME + "t10k-labels-idx1-ubyte.gz",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        4_542,
    ),
)


def mnist(
    folder: str | None = None,
    partition: str = "iid",
    seed: int = 0,
    download: bool | str = False,
    held_out: int = 2000,
) -> Classification:
    """MNIST from its four original IDX files in `folder`, plain or gzipped.

    Plain files are mapped, so that all members of a machine share one copy: gunzip them for many
    members. `download` fetches what is missing (true, or the address of a mirror). Evaluation uses
    `held_out` of the 10,000 test images, evenly spaced. Raises TaskError for files that are missing
    or damaged.
    """
    where = Path(folder).expanduser() if folder else cache_folder("mnist")
    train_images, train_labels, test_images, test_labels = (
        original(wanted, where, download, instead=(wanted.name.removesuffix(".gz"),))
        for wanted in MNIST_FILES
    )
    train = Images(*read_idx_pair(train_images, train_labels))
    test = Images(*read_idx_pair(test_images, test_labels))
    # Mean and standard deviation of the training images' grey levels, 0 … 255.
    recipe = Recipe(_mnist_model, mean=33.3, spread=78.6, augment=Shift(2, 0.5), target=0.97)
    shards = Shards(train.labels, partition, seed)
    return Classification("mnist", train, test.some(held_out), recipe, shards)


def _mnist_model() -> nn.Module:
    return he_init(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )
    )
