"""LEAF's federated data (FEMNIST and the like) as a task: each writer is a member.

    python examples/leaf.py leaf-data --writers 100
    edgetrain sweep examples/leaf.toml data.folder=leaf-data --set cohort=0.1,0.2,0.5,0

LEAF's files are JSON with "users", "num_samples" and "user_data", in folders train and test. The
first command writes stand-ins of that form from the digits in the package: every writer slants,
shifts and presses in a way of their own, and writes some digits more often than others.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import edgetrain
from edgetrain.tasks import digits as plain_digits


def writers(folder, hidden=64, partition="by(writer)", seed=0):
    """The task, as a job names it: task = "leaf:writers", data = { folder = "leaf-data" }."""
    (inputs, labels, users), (held, answers, _) = read(folder, "train"), read(folder, "test")
    classes = int(max(labels.max(), answers.max())) + 1

    def model():
        width = inputs.shape[1]
        return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    return edgetrain.task(
        model, train=(inputs, labels), test=(held, answers), columns={"writer": users},
        partition=partition, seed=seed, name="leaf",
    )  # fmt: skip


def read(folder, which):
    """Inputs [samples, values], labels and users of all JSON files of a folder."""
    found = [json.loads(path.read_text()) for path in sorted(Path(folder, which).glob("*.json"))]
    data = {user: each["user_data"][user] for each in found for user in each["users"]}
    inputs = np.array([x for each in data.values() for x in each["x"]], np.float32)
    labels = np.array([y for each in data.values() for y in each["y"]], np.int64)
    return inputs, labels, [user for user, each in data.items() for _ in each["y"]]


def drawn_as(pixels, slant, shift, press):
    """Images (n, 8, 8) in another hand: slanted, moved, lighter or darker."""
    rows = (np.arange(8) - 3.5)[:, None] * slant + shift[1] + np.arange(8)
    low = np.floor(rows).astype(int)
    share = rows - low
    padded = np.pad(np.roll(pixels, shift[0], 1), ((0, 0), (0, 0), (8, 9)))
    row = np.arange(8)[:, None]
    moved = (1 - share) * padded[:, row, low + 8] + share * padded[:, row, low + 9]
    return np.clip(moved / 16, 0, 1) ** press


def make(folder, count):
    digits, rng = plain_digits(), np.random.default_rng(0)
    for which, images in (("train", digits.train), ("test", digits.test)):
        pixels, labels = images.pixels[:][:, 0].astype(float), images.labels
        hands = np.random.default_rng(1)  # the same writers in both
        users = {}
        for writer in range(count):
            slant, press = hands.normal(0, 0.25), hands.lognormal(0, 0.3)
            shift, mix = hands.integers(-1, 2, 2), hands.dirichlet(np.full(10, 1.0))
            size = int(hands.integers(20, 60)) // (1 if which == "train" else 5)
            chosen = rng.choice(len(labels), size, p=mix[labels] / mix[labels].sum())
            shapes = drawn_as(pixels[chosen], slant, shift, press).round(3).reshape(size, -1)
            users[f"f{writer:04}"] = {"x": shapes.tolist(), "y": labels[chosen].tolist()}
        counts = [len(each["y"]) for each in users.values()]
        table = {"users": [*users], "num_samples": counts, "user_data": users}
        path = Path(folder, which, "writers.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table))
        print(f"{path}: {count} writers, {sum(counts)} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write stand-ins of LEAF's files.")
    parser.add_argument("folder")
    parser.add_argument("--writers", type=int, default=100)
    asked = parser.parse_args()
    torch.manual_seed(0)
    make(asked.folder, asked.writers)
