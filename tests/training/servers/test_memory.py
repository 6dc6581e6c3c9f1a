"""What a rank takes is what the plan says: peaks of real ranks, of the one that leads, too, without
the check before the first step, which is left out where memory is short.

About 80 MB of resident memory are pages of libraries, as many as the system has at hand: on a
machine that is short of memory a peak can be lower than usual by much of that. A peak that is off
is measured twice more, and the middle one counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest
from command_line import environment

pytestmark = pytest.mark.real

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
        drawn = torch.Generator().manual_seed(seed + member)
        while True:
            yield (torch.randn(batch, 2000, generator=drawn),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model):
        return {"loss": 0.0}
"""


# For each line with the words of a job: what the plan says that its two ranks take, and what they
# took. Where both have the same stage, the second one has no whole model besides.
MEASURE = """
import json, sys, tempfile
from pathlib import Path
from edgetrain.jobs.placement.formulas import WHOLE_BYTES
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics
from edgetrain.training.servers import group

here = Path.cwd()
for line in sys.stdin:
    job, out = load(None, json.loads(line)), Path(tempfile.mkdtemp(dir=here))
    question = question_of(resolve(job), here)
    found, whole = decide(question).found[0], WHOLE_BYTES * question.model.parameters
    group.run(plan(job, here), found, out)
    took = [max(r["peak_bytes"] for r in read_metrics(out, "step") if r["member"] == rank)
            for rank in ("r0", "r1")]
    said = [*found.bytes, found.bytes[0] - whole][:2]
    print("measured", json.dumps([said, took]), flush=True)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """`measured(words)`, in a process of its own: what a fork server imported is in a peak."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "mlp.py").write_text(TASK)
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE], cwd=folder, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip

        def measured(words):
            print(json.dumps(words), file=process.stdin, flush=True)
            line = next(line for line in process.stdout if line.startswith("measured "))
            return json.loads(line.removeprefix("measured "))

        yield measured
        process.stdin.close()


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
def test_a_ranks_peak_is_as_predicted(measured, words, every):
    words = ["task=mlp:MLP", "members=2", "batch=4", "steps=3", "evaluate_every=100",
             "servers.check=off", f"servers.snapshot_every={every}",
             f"servers.placement={words}"]  # fmt: skip
    planned, peaks = measured(words)
    if planned != pytest.approx(peaks, rel=0.10):
        several = [peaks, *(measured(words)[1] for _ in range(2))]
        peaks = [statistics.median(each) for each in zip(*several, strict=True)]
    assert planned == pytest.approx(peaks, rel=0.10)
