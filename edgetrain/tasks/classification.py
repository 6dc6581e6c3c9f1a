"""Classifying images: the task that digits, mnist and cifar10 are instances of.

It knows arrays of pixels and labels, not files, and no particular data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from numpy.typing import NDArray
from torch import Tensor, nn

from edgetrain.errors import TaskError
from edgetrain.tasks.own_data import FigureSums, quotients
from edgetrain.tasks.partition import Sharded, Shards
from edgetrain.tasks.protocol import Batch, device_of, evaluating

Pixels = NDArray[np.uint8]


class Stack:
    """Arrays of equal rows one after another as if they were one, without copying them."""

    def __init__(self, parts: Sequence[Pixels]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, indices: NDArray[np.int64]) -> Pixels:
        """The rows of these indices, as a new array."""
        which = np.searchsorted(self._ends, indices, side="right")
        rows = np.empty((len(indices), *self._parts[0].shape[1:]), self._parts[0].dtype)
        for number in np.unique(which):
            here = which == number
            start = self._ends[number] - len(self._parts[number])
            rows[here] = self._parts[number][indices[here] - start]
        return rows


@dataclass(frozen=True)
class Images:
    """Images and their classes. `pixels` is (n, channels, height, width) uint8 and may be a
    read-only map of a file: pages that all members of a machine share, read when first used."""

    pixels: Pixels | Stack
    labels: NDArray[np.int64]

    def some(self, count: int) -> Images:
        """At most `count` of them, evenly spaced, copied."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise TaskError(f"data.held_out = {count!r}", "a whole number from 1 is needed")
        chosen = np.unique(np.linspace(0, len(self.labels) - 1, count, dtype=np.int64))
        return Images(self.pixels[chosen], self.labels[chosen])


class Augment(Protocol):
    """How batches are varied: what is drawn for each image, apart from what it does to the pixels,
    so that the images of many batches can be varied at once."""

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Whole numbers [count, …] for so many images."""

    def apply(self, pixels: Pixels, drawn: NDArray[np.int64]) -> Pixels:
        """The varied images (n, channels, height, width); `pixels` may be overwritten."""


Draw = tuple[NDArray[np.int64], NDArray[np.int64]]
"""A batch before its pixels are looked at: indices of images [n], and what varies them [n, …]."""


@dataclass(frozen=True)
class Recipe:
    """Settings of one data set: its model, its inputs, the augmentation of batches."""

    model: Callable[[], nn.Module]
    mean: float
    spread: float
    augment: Augment
    target: float | None

    def inputs(self, pixels: Pixels) -> Tensor:
        """float32 of the same shape, (pixels - mean) / spread, in memory of its own."""
        return torch.from_numpy(pixels).float().sub_(self.mean).div_(self.spread)


class Classification(Sharded):
    """A Task (see protocol) over two sets of images; batches are (inputs float32, labels int64).

    `train` are the images of all members, `test` those that only `evaluate` reads.
    """

    metric = "accuracy"
    better = "higher"

    def __init__(
        self, name: str, train: Images, test: Images, recipe: Recipe, shards: Shards
    ) -> None:
        self.name = name
        self.target = recipe.target
        self.train, self.test = train, test
        self._recipe, self.shards = recipe, shards

    def model(self) -> nn.Module:
        return self._recipe.model()

    def draws(self, member: int, members: int, batch: int, seed: int) -> Iterator[Draw]:
        """The samples of `batches`, for `gather`."""
        order, rng = self.shards.batches(member, members, batch, seed)
        return (self.drawn(indices, rng) for indices in order)

    def drawn(self, indices: NDArray[np.int64], rng: np.random.Generator) -> Draw:
        return indices, self._recipe.augment.draw(len(indices), rng)

    def gather(self, draws: Sequence[Draw]) -> Batch:
        """The batches of these draws as one, [len(draws), batch, …]: the same numbers, sooner."""
        indices = np.concatenate([indices for indices, _ in draws])
        inputs, labels = self.batch_of((indices, np.concatenate([drawn for _, drawn in draws])))
        rows = len(draws)
        return inputs.view(rows, -1, *inputs.shape[1:]), labels.view(rows, -1)

    def batch_of(self, draw: Draw) -> Batch:
        indices, drawn = draw
        pixels = self._recipe.augment.apply(self.train.pixels[indices], drawn)
        return self._recipe.inputs(pixels), torch.from_numpy(self.train.labels[indices])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = device_of(model)
        inputs, labels = (tensor.to(device) for tensor in batch)
        return F.cross_entropy(model(inputs), labels)

    def plain(self, indices: NDArray[np.int64]) -> Batch:
        return self._inputs_of(self.train, indices)

    def _inputs_of(self, images: Images, indices: NDArray[np.int64]) -> Batch:
        inputs = self._recipe.inputs(images.pixels[indices])
        return inputs, torch.from_numpy(images.labels[indices])

    def measure(self, model: nn.Module, batch: Batch) -> FigureSums:
        """See protocol.Measures."""
        device = device_of(model)
        inputs, labels = (tensor.to(device) for tensor in batch)
        scores, count = model(inputs), float(len(labels))
        loss = float(F.cross_entropy(scores, labels, reduction="sum"))
        return {
            "loss": (loss, count),
            "accuracy": (float((scores.argmax(1) == labels).sum()), count),
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            everything = self.in_chunks(
                np.arange(len(self.test.labels)), partial(self._inputs_of, self.test)
            )
            return quotients(self.measure(model, batch) for batch in everything)


class Shift:
    """An augmentation: move a `share` of the images by up to `most` pixels each way, filled with
    0."""

    def __init__(self, most: int, share: float = 1.0) -> None:
        self._most, self._share = most, share

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """See Augment: [count, 2], rows and columns."""
        by = rng.integers(0, 2 * self._most + 1, (2, count))
        np.copyto(by, self._most, where=rng.random(count) >= self._share)
        return by.T

    def apply(self, pixels: Pixels, drawn: NDArray[np.int64]) -> Pixels:
        n, channels, height, width = pixels.shape
        most = self._most
        padded = np.zeros((n, height + 2 * most, width + 2 * most, channels), np.uint8)
        padded[:, most : most + height, most : most + width] = pixels.transpose(0, 2, 3, 1)
        rows = drawn[:, 0, None, None] + np.arange(height)[:, None]
        columns = drawn[:, 1, None, None] + np.arange(width)
        window: Any = padded[np.arange(n)[:, None, None], rows, columns]
        return np.ascontiguousarray(window.transpose(0, 3, 1, 2))


class Mirror:
    """An augmentation: half of the images left for right, in place."""

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """See Augment: [count, 1], 1 for those that are mirrored."""
        return (rng.random((count, 1)) < 0.5).astype(np.int64)

    def apply(self, pixels: Pixels, drawn: NDArray[np.int64]) -> Pixels:
        chosen = drawn[:, 0] == 1
        pixels[chosen] = pixels[chosen, ..., ::-1]
        return pixels


class Both:
    """One augmentation after another."""

    def __init__(self, first: Augment, second: Augment, columns: int) -> None:
        """`columns` is how many numbers an image `first` draws."""
        self._first, self._second, self._columns = first, second, columns

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        first = self._first.draw(count, rng)
        return np.concatenate([first, self._second.draw(count, rng)], 1)

    def apply(self, pixels: Pixels, drawn: NDArray[np.int64]) -> Pixels:
        once = self._first.apply(pixels, drawn[:, : self._columns])
        return self._second.apply(once, drawn[:, self._columns :])


def he_init(model: nn.Module) -> nn.Module:
    """Draw weights as He et al. 2015 do for ReLU networks, biases 0; returns the model."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
