"""Peak memory of a fleet's members, as the plan says and as it is.

    python benchmarks/memory.py [--millions 1,4,16] [--strategies sync-sgd,fedavg,dga] [--delay 12]

Runs two real members behind emulated links for each strategy and each size of an MLP, SGD with
momentum, and compares the resident memory that the second member reaches with what `edgetrain plan`
says of a member. `dga` has rounds of five steps, so three of them in flight at a delay of 12; with
fewer it takes less than the plan says, which does not look at the delay. The exit status is 0 if
all are within 10 %.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from edgetrain.jobs.placement.question import plan_placement
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
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


def peaks(folder: Path, strategy: str, millions: float, delay: int) -> tuple[float, float]:
    """Bytes of a member: as planned, and the most that the second one had."""
    width = round(math.sqrt(millions * 1e6 / LAYERS))
    delays = [f"delay={delay}", "every=5", "steps=60"] if strategy == "dga" else []
    job = load(None, ["task=mlp:MLP", f"data.width={width}", "members=2", "batch=8", "steps=20",
                      "evaluate_every=1000000", f"strategy={strategy}", "network=wan-50ms",
                      "optimizer=sgd", "lr=0.001", "train.optimizer.momentum=0.9",
                      *delays])  # fmt: skip
    planned = plan_placement(job, folder).edge.needs_bytes
    out = folder / f"{strategy}-{millions:g}"
    out.mkdir()
    emulated.run(plan(job, folder), out)
    return planned, max(r["peak_bytes"] for r in read_metrics(out, "step") if r["member"] == "m1")


def main() -> int:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", default="1,4,16")
    parser.add_argument("--strategies", default="sync-sgd,fedavg,dga")
    parser.add_argument("--delay", type=int, default=12)
    arguments = parser.parse_args()
    worst = 0.0
    print(f"{'strategy':<10}{'parameters':>12}{'planned':>10}{'measured':>10}{'error':>8}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.py").write_text(TASK)
        for strategy in arguments.strategies.split(","):
            for millions in map(float, arguments.millions.split(",")):
                planned, measured = peaks(folder, strategy, millions, arguments.delay)
                error = planned / measured - 1
                worst = max(worst, abs(error))
                print(
                    f"{strategy:<10}{f'{millions:g} M':>12}{planned / 1e6:>7.0f} MB"
                    f"{measured / 1e6:>7.0f} MB{error:>+8.1%}",
                    flush=True,
                )
    return int(worst > 0.10)


if __name__ == "__main__":
    sys.exit(main())
