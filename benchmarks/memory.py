"""Peak memory of a fleet's members, as `edgetrain plan` says and as it is.

Two real members behind emulated links for each strategy and each size of an MLP, SGD with momentum;
measured is the resident memory that the second one reaches. `dga` has rounds of five steps, so
three of them in flight at a delay of 12; with fewer it takes less than the plan says, which does
not look at the delay.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import Measured, measure

from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics
from edgetrain.training import emulated

LAYERS = 4
TASK = f"""
import torch
from torch import nn


class MLP:
    name, metric, better, target = "mlp", "loss", "lower", None

    def __init__(self, width=500, seed=0):
        self.width = width

    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range({LAYERS})))

    def samples(self, member, members):
        return 10

    def batches(self, member, members, batch, seed):
        while True:
            yield (torch.randn(batch, self.width),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return {{"loss": 0.0}}
"""


def peaks(folder: Path, strategy: str, millions: int) -> dict[str, float]:
    """Bytes of a member: as planned, and the most that the second one had."""
    width = round(math.sqrt(millions * 1e6 / LAYERS))
    delays = ["delay=12", "local_steps=5", "steps=60"] if strategy == "dga" else []
    job = load(None, ["task=mlp:MLP", f"data.width={width}", "members=2", "batch=8", "steps=20",
                      "evaluate_every=1000000", f"strategy={strategy}", "network=wan-50ms",
                      "optimizer=sgd", "lr=0.001", "train.optimizer.momentum=0.9",
                      *delays])  # fmt: skip
    needs = decide(question_of(resolve(job), folder)).edge.needs_bytes
    out = folder / f"{strategy}-{millions}"
    out.mkdir()
    emulated.run(plan(job, folder), out)
    had = max(line["peak_bytes"] for line in read_metrics(out, "step") if line["member"] == "m1")
    size = f"{millions} M"
    return {
        f"{size}, planned, MB": needs / 1e6,
        f"{size}, measured, MB": had / 1e6,
        f"{size}, off by, %": 100 * (needs / had - 1),
    }


def measured() -> Iterator[Measured]:
    """1, 4 and 16 million parameters under each strategy."""
    for strategy in ("sync-sgd", "fedavg", "dga"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "mlp.py").write_text(TASK)

            def sizes() -> dict[str, float]:
                found = [peaks(folder, strategy, millions) for millions in (1, 4, 16)]  # noqa: B023
                return {what: value for each in found for what, value in each.items()}

            yield measure(strategy, sizes, 1)
