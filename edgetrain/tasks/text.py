"""Text: `char_lm`, a small transformer that learns to continue a text byte by byte.

Any text will do; Python's own standard library is at hand on every machine that can run this.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from numpy.typing import NDArray
from torch import Tensor, nn

from edgetrain.errors import TaskError
from edgetrain.tasks.experts import MixtureOfExperts
from edgetrain.tasks.partition import Sharded, Shards
from edgetrain.tasks.protocol import Batch, device_of, evaluating

BYTES = 256
STRETCH = 64
"""Blocks in a row that stay together: every tenth stretch is held out."""
TOPICS = 10
"""Equal parts of the text that a dirichlet partition takes for its classes."""
HELD_OUT_BLOCKS = 128
"""Blocks that are evaluated, evenly spaced over all that are held out."""


def char_lm(
    folder: str | None = None,
    partition: str = "iid",
    seed: int = 0,
    context: int = 64,
    limit_bytes: int = 2_000_000,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    tied: bool = True,
    experts: int = 0,
    dropout: float = 0.0,
) -> CharLM:
    """Predict the next byte of a text from the `context` bytes before it.

    `folder` is a text file, or a folder whose *.txt files are joined in the order of their names;
    without it, the .py sources of Python's standard library are, in the order of their paths. Not
    more than `limit_bytes` are used. Bytes rather than letters: the model has one shape whatever
    the text, and members with texts of their own can train it together. A sample is a block of
    `context` bytes. `width`, `heads`, `layers`, `tied`, `experts` and `dropout` are the
    Transformer's. Raises TaskError for a text that is missing or too short.
    """
    size = Size(context, width, heads, layers, tied, experts, dropout)
    size.check()
    if not (isinstance(limit_bytes, int) and limit_bytes > 0):
        raise TaskError(f"data.limit_bytes = {limit_bytes!r}", "a whole number from 1")
    paths = _standard_library() if folder is None else _texts(Path(folder).expanduser())
    text = _joined(paths, limit_bytes)
    blocks = (len(text) - 1) // context  # the byte after a block is what its last one predicts
    if blocks < 10:
        where = folder or "the standard library's sources"
        raise TaskError(
            f"{where}: {len(text)} bytes, too short for ten blocks of {context}",
            "take a longer text, or a shorter data.context",
        )
    return CharLM(text, blocks, size, partition, seed)


def _standard_library() -> list[Path]:
    """Its .py files, tests and installed packages left out."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths: list[Path] = []
    for folder, inside, files in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name not in left_out]  # os.walk heeds it
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


def _texts(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(folder.glob("*.txt"))


def _joined(paths: list[Path], limit_bytes: int) -> NDArray[np.uint8]:
    text = bytearray()
    for path in paths:
        try:
            with path.open("rb") as file:
                text += file.read(limit_bytes - len(text))
        except OSError as error:
            raise TaskError(f"cannot read {path}: {error.strerror}", "see data.folder") from None
        if len(text) >= limit_bytes:
            break
    return np.frombuffer(text, np.uint8)


@dataclass(frozen=True)
class Size:
    """The size of a Transformer."""

    context: int
    width: int
    heads: int
    layers: int
    tied: bool
    experts: int = 0
    dropout: float = 0.0

    def check(self) -> None:
        """TaskError for a size that cannot be built."""
        for key, most in (("context", 4096), ("width", 65536), ("heads", 1024), ("layers", 1024)):
            value = getattr(self, key)
            if isinstance(value, bool) or not (isinstance(value, int) and 1 <= value <= most):
                unit = " bytes" if key == "context" else ""
                raise TaskError(f"data.{key} = {value!r}", f"1 … {most}{unit}")
        if self.width % self.heads:
            raise TaskError(
                f"data.width = {self.width} does not divide into data.heads = {self.heads}",
                f"a multiple of {self.heads}",
            )
        if isinstance(self.experts, bool) or self.experts not in (0, *range(2, 1025)):
            raise TaskError(f"data.experts = {self.experts!r}", "0, or 2 … 1024")
        if self.experts and self.layers < 2:
            raise TaskError(
                f"data.experts = {self.experts} with data.layers = {self.layers}: every second "
                "block has experts",
                "data.layers = 2, or more",
            )
        if not isinstance(self.tied, bool):
            raise TaskError(f"data.tied = {self.tied!r}", "true or false")
        share = self.dropout
        if isinstance(share, bool) or not (isinstance(share, int | float) and 0 <= share < 1):
            raise TaskError(f"data.dropout = {share!r}", "0, or a share below 1")


class CharLM(Sharded):
    """A Task (see protocol); batches are (inputs, targets), both int64 of (batch, context), the
    targets one byte further. The figure is the mean cross-entropy of a byte, in nats.

    `text` is uint8; `train` and `test` are the numbers of its blocks that members train on, and
    that only `evaluate` reads.
    """

    name = "char-lm"
    metric = "loss"
    better = "lower"
    target: float | None = None
    held_out_batch = 32

    def __init__(
        self, text: NDArray[np.uint8], blocks: int, size: Size, partition: str, seed: int
    ) -> None:
        self.text, self.size, self._context = text, size, size.context
        numbers = np.arange(blocks)
        stretches = -(-blocks // STRETCH)
        # A short text has no tenth stretch: then its last tenth is held out.
        held_out = (
            numbers // STRETCH % 10 == 9 if stretches >= 10 else numbers >= blocks - blocks // 10
        )
        self.train = numbers[~held_out]
        chosen = numbers[held_out]
        spaced = np.linspace(0, len(chosen) - 1, min(HELD_OUT_BLOCKS, len(chosen)), dtype=np.int64)
        self.test = chosen[spaced]
        self.shards = Shards(self.train * TOPICS // blocks, partition, seed)

    def model(self) -> nn.Module:
        return Transformer(**vars(self.size))

    def batch_of(self, draw: NDArray[np.int64]) -> Batch:
        return self._batch(self.train[draw])

    def _batch(self, blocks: NDArray[np.int64]) -> Batch:
        places = blocks[:, None] * self._context + np.arange(self._context + 1)
        text = torch.from_numpy(self.text[places]).long()
        return text[:, :-1], text[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = device_of(model)
        inputs, targets = (tensor.to(device) for tensor in batch)
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            parts = np.array_split(self.test, -(-len(self.test) // self.held_out_batch))
            losses = [float(self.loss(model, self._batch(part))) * len(part) for part in parts]
        return {"loss": sum(losses) / len(self.test)}


class Transformer(nn.Module):
    """A decoder as in GPT-2 (Radford et al. 2019), pre-norm, the output tied to the embedding
    unless `tied` is False. With `experts` every second block has this many feed-forward layers, of
    which a position uses two (see experts). `dropout` is the share of the embeddings, and of what
    each half of a block adds, that a step in training leaves out.

    (batch, length) int64 bytes in, (batch, length, 256) float32 scores out; `first_place` + length
    <= context. A model of which a part is absent (set to None) passes on what its last piece
    computes, (batch, length, width), and takes the same from the piece before it.
    """

    tensor_plan: Final = {
        "blocks.*.queries_keys_values": "colwise",
        "blocks.*.attended": "rowwise",
        "blocks.*.layers.0": "colwise",
        "blocks.*.layers.2": "rowwise",
    }
    """How linear layers are split over devices, in the words of transformers' tp_plan."""

    def __init__(
        self, context: int, width: int = 64, heads: int = 4, layers: int = 2, tied: bool = True,
        experts: int = 0, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bytes: nn.Embedding | None = nn.Embedding(BYTES, width)
        self.places: nn.Embedding | None = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, experts if place % 2 else 0, dropout) for place in range(layers)
        )
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.scores = None if tied else nn.Linear(width, BYTES, bias=False)
        self.heads, self.first_place, self.dropout = heads, 0, dropout
        for layer in (self.bytes, self.places, self.scores):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)

    @property
    def pieces(self) -> list[tuple[str, ...]]:
        """The modules that each piece of `forward` uses, in order. A cut between two pieces leaves
        the modules of the others absent."""
        last = "bytes" if self.scores is None else "scores"
        blocks = [(f"blocks.{place}",) for place in range(len(self.blocks))]
        return [("bytes", "places"), *blocks, ("norm", last)]

    def forward(self, text: Tensor) -> Tensor:
        hidden = text if text.is_floating_point() else self._embedded(text)
        for block in self.blocks:
            if block is not None:
                hidden = block(hidden)
        return hidden if self.norm is None else self._scored(self.norm(hidden))

    def _embedded(self, text: Tensor) -> Tensor:
        assert self.bytes is not None
        assert self.places is not None
        places = self.places.weight[self.first_place : self.first_place + text.shape[1]]
        return F.dropout(self.bytes(text) + places, self.dropout, self.training)

    def _scored(self, hidden: Tensor) -> Tensor:
        if self.scores is not None:
            scores: Tensor = self.scores(hidden)
            return scores
        assert self.bytes is not None
        return F.linear(hidden, self.bytes.weight)


class Block(nn.Module):
    """Causal self-attention, then two linear layers or experts, each added to what came in."""

    def __init__(self, width: int, heads: int, experts: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.layers: nn.Module = (
            MixtureOfExperts(width, experts, 4 * width) if experts
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(hidden))
        batch, length, _ = parts.shape  # of whole sequences, where norms have a part of them
        # Heads first: a device that has a part of the projection has whole heads.
        heads = parts.view(batch, length, -1, 3, self.head_width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = attention.transpose(1, 2).reshape(batch, length, -1)
        hidden = hidden + F.dropout(self.attended(mixed), self.dropout, self.training)
        own: Tensor = self.layers(self.before_layers(hidden))
        return hidden + F.dropout(own, self.dropout, self.training)
