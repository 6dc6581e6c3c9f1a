"""What a rank takes is what the plan says: peaks of real ranks, without the leader's own copy."""

from __future__ import annotations

import pytest

from edgetrain.jobs.placement.question import plan_placement
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.runs.folder import read_metrics
from edgetrain.training.servers import group

TASK = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


class MLP:
    name, metric, better, target = "mlp", "loss", "lower", None

    def __init__(self, seed=0):
        pass

    def model(self):
        return nn.Sequential(*(Block(2000) for _ in range(4)))

    def samples(self, member, members):
        return 10

    def batches(self, member, members, batch, seed):
        while True:
            yield (torch.randn(batch, 2000),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return {"loss": 0.0}
"""


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ("data=2", 100),  # never
        ("data=2 shard=2 zero=3", 100),
        ("pipeline=2 microbatches=4", 100),
        ("data=2", 1),
        ("data=2 shard=2 zero=3", 1),
        ("data=2 shard=2 zero=1", 1),
    ],
)
def test_a_ranks_peak_is_as_predicted(tmp_path, words, every):
    (tmp_path / "mlp.py").write_text(TASK)
    job = load(None, ["task=mlp:MLP", "members=2", "batch=4", "steps=3", "evaluate_every=100",
                      f"servers.snapshot_every={every}", f"servers.placement={words}"])  # fmt: skip
    found = plan_placement(job, tmp_path).found[0]
    out = tmp_path / "run"
    out.mkdir()
    group.run(plan(job, tmp_path), found, out)
    peak = max(r["peak_bytes"] for r in read_metrics(out, "step") if r["member"] == "r1")
    assert found.bytes[-1] == pytest.approx(peak, rel=0.10)
