"""Snapshots of one placement load on any other: the losses are as if nothing had happened."""

from __future__ import annotations

import group_cases as cases
import numpy as np
import pytest
import ranks

from edgetrain.errors import EdgetrainError
from edgetrain.training.servers.snapshots import latest

JOB = cases.job_of(*cases.CHARS)
LAYOUTS = [
    "data=4",
    "data=4 shard=4 zero=3",
    "data=4 shard=2 zero=2",
    "data=2 tensor=2",
    "data=2 shard=2 zero=2 pipeline=2 microbatches=4",
    "data=2 pipeline=2 schedule=zbv microbatches=4",
]


@pytest.fixture(scope="module")
def world():
    with ranks.world(4) as found:
        yield found


@pytest.fixture(scope="module")
def reference():
    return cases.alone(JOB)[0]


@pytest.mark.parametrize(
    ("first", "then"), [(each, LAYOUTS[i - 1]) for i, each in enumerate(LAYOUTS)]
)
def test_any_placement_goes_on_from_any_other(world, reference, tmp_path, first, then):
    before = world.run(cases.train_and_keep, JOB, first, tmp_path, 5)
    assert latest(tmp_path)[0] == 5
    after = world.run(cases.go_on, JOB, then, tmp_path, 5)
    np.testing.assert_allclose(before[0] + after[0], reference, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("first", "then"),
    [("data=4 shard=2 zero=3", "data=2 pipeline=2 microbatches=4"),
     ("pipeline=2 tensor=2 microbatches=4", "data=4 shard=4 zero=3")],
)  # fmt: skip
def test_servers_that_share_no_disk_keep_snapshots_with_the_leader(
    world, reference, tmp_path, first, then
):
    before = world.run(cases.keep_apart, JOB, first, tmp_path, 5)
    kept = {path.name[:4] for path in (tmp_path / "disk0/snapshots/step-000005").iterdir()}
    assert kept == {"__0_", "__1_", "__2_", "__3_", ".met"}
    after = world.run(cases.go_on_apart, JOB, then, tmp_path, 5)
    np.testing.assert_allclose(before[0] + after[0], reference, rtol=0, atol=1e-9)


def test_a_draft_is_no_snapshot(tmp_path):
    (tmp_path / "snapshots" / ".step-000005").mkdir(parents=True)
    (tmp_path / "snapshots" / "step-000007").mkdir()
    assert latest(tmp_path) is None


def test_a_snapshot_of_another_model_is_refused(tmp_path):
    with ranks.world(1) as one:
        one.run(cases.train_and_keep, JOB, "data=1", tmp_path, 1)
        with pytest.raises(EdgetrainError, match="cannot go on from the snapshot"):
            one.run(cases.go_on, cases.job_of(*cases.CHARS, "data.width=8"), "data=1", tmp_path, 1)
