"""What a rank takes is what the plan says: peaks of real ranks, without the leader's own copy.

About 80 MB of resident memory are pages of libraries, as many as the system has at hand: on a
machine that is short of memory a peak can be lower than usual by much of that. A peak that is off
is measured twice more, and the middle one counts.
"""

from __future__ import annotations

import statistics

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


def peak_of(job, found, folder, name):
    """Of the second rank in a run."""
    out = folder / name
    out.mkdir()
    group.run(plan(job, folder), found, out)
    return max(r["peak_bytes"] for r in read_metrics(out, "step") if r["member"] == "r1")


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
    peaks = [peak_of(job, found, tmp_path, "run")]
    if found.bytes[-1] != pytest.approx(peaks[0], rel=0.10):
        peaks += [peak_of(job, found, tmp_path, name) for name in ("again", "once-more")]
    assert found.bytes[-1] == pytest.approx(statistics.median(peaks), rel=0.10), peaks
