"""Schedules and clipping: batched members step as one by one, late ones where the others are."""

from __future__ import annotations

import pytest

from edgetrain.jobs import reading
from edgetrain.jobs.plan import plan
from edgetrain.runs.folder import create
from edgetrain.training.simulated import simulation

WORDS = (
    "members=4", "device=raspberry-pi-4b", "steps=30", "batch=4", "evaluate_every=10",
    "optimizer={ name = 'sgd', lr = 0.3 }", "schedule=warmup(5) | cosine", "train.clip=0.5",
)  # fmt: skip


def trained(folder, name, *words, batched):
    inside = create(folder, name)
    job = reading.load(None, [*WORDS, *words])
    return simulation.run(plan(job), inside, batched=batched)["final"]["loss"]


@pytest.mark.parametrize("strategy", ["dga", "sync-sgd", "fedprox(0.1)"])
def test_batched_members_follow_the_schedule_as_one_by_one(tmp_path, strategy):
    words = (f"strategy={strategy}", "delay=5" if strategy == "dga" else "delay=0")
    one = trained(tmp_path, "one", *words, batched=False)
    many = trained(tmp_path, "many", *words, batched=True)
    assert many == pytest.approx(one, rel=1e-3)
    for other in ("schedule=", "train.clip=0"):
        assert abs(trained(tmp_path, other, *words, other, batched=True) / many - 1) > 1e-3


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd"])
def test_batched_members_accumulate_and_scale_each_tensor_as_one_by_one(tmp_path, name):
    more = ", momentum = 0.9, trust = 0.02" if name == "lars" else ""
    words = (
        "strategy=dga", "delay=5", "accumulate=3", "steps=15", "lr_reference_batch=24", "schedule=",
        f"optimizer={{ name = '{name}', lr = 0.02{more} }}",
    )  # fmt: skip
    one = trained(tmp_path, "one", *words, batched=False)
    many = trained(tmp_path, "many", *words, batched=True)
    assert many == pytest.approx(one, rel=1e-3)
    for other in ("accumulate=1", "lr_reference_batch=0"):
        assert abs(trained(tmp_path, other, *words, other, batched=True) / many - 1) > 1e-3


def test_a_member_that_starts_again_is_where_the_others_are(tmp_path):
    """Its rate would be that of the warm-up's first step again, and the run's end differ."""
    words = (
        "strategy=fedavg",
        "local_steps=5",
        "network=rtt-50ms",
        "pace_s=0.1",
        "lost_after_s=0.5",
    )
    away = "absences=[{members = [1], at_s = 1.2, for_s = 0.4}]"
    one = trained(tmp_path, "one", *words, away, batched=False)
    many = trained(tmp_path, "many", *words, away, batched=True)
    assert many == pytest.approx(one, rel=1e-3)
