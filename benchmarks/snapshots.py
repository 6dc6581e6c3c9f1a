"""Seconds of a group's steps without snapshots, with snapshots that it waits for, and with ones
that are written while it trains.

    python benchmarks/snapshots.py [--width 1000] [--steps 24] [--every 4]

Two ranks train an MLP of 4 x width^2 parameters with AdamW; a snapshot has 12 bytes a parameter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from edgetrain.jobs.placement.question import plan_placement
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.training.servers import group

TASK = """
import torch
from torch import nn


class MLP:
    name, metric, better, target = "mlp", "loss", "lower", None

    def __init__(self, width=1500, seed=0):
        self.width = width

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(4)))

    def samples(self, member, members):
        return 10

    def batches(self, member, members, batch, seed):
        while True:
            yield (torch.randn(batch, self.width),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return {"loss": 0.0}
"""
WAYS = {
    "none": "servers.snapshot_every=1000000",
    "waited for": "servers.async_snapshots=false",
    "while training": "servers.async_snapshots=true",
}


def seconds(folder: Path, name: str, words: list[str]) -> float:
    """From the first step of the leader to its last."""
    job = load(None, ["task=mlp:MLP", "members=2", "batch=32", "optimizer=adamw", *words,
                      "evaluate_every=1000000", "servers.placement=data=2"])  # fmt: skip
    out = folder / name
    out.mkdir()
    group.run(plan(job, folder), plan_placement(job, folder).found[0], out)
    at = [r["t"] for r in read_metrics(out, "step") if r["member"] == "r0"]
    return float(max(at) - min(at))


def main() -> int:
    """Run the job in each way, twice, and print the faster one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.py").write_text(TASK)
        for turn in range(2):
            for way, word in WAYS.items():
                words = [f"data.width={arguments.width}", f"steps={arguments.steps}",
                         f"servers.snapshot_every={arguments.every}", word]  # fmt: skip
                took = seconds(folder, f"{way}-{turn}".replace(" ", "-"), words)
                found[way] = min(took, found.get(way, took))
    size = 12 * 4 * (arguments.width**2 + arguments.width)
    print(f"a snapshot of {size / 1e6:.0f} MB every {arguments.every} of {arguments.steps} steps")
    for way, took in found.items():
        step_ms = 1e3 * took / (arguments.steps - 1)
        print(f"{way:>15}: {step_ms:6.1f} ms a step, {took / found['none']:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
