"""Snapshots of one placement load on any other: the losses are as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import group_cases as cases
import numpy as np
import pytest
import ranks

from edgetrain.errors import EdgetrainError
from edgetrain.training.servers import snapshots
from edgetrain.training.servers.snapshots import latest

pytestmark = pytest.mark.real

JOB = cases.job_of(*cases.CHARS)
LAYOUTS = [
    "data=4",
    "data=4 shard=4 zero=3",
    "data=4 shard=2 zero=2",
    "data=2 shard=2 zero=1 pipeline=2 schedule=zbv microbatches=4",
    "data=2 shard=2 zero=1 tensor=2",
    "data=2 tensor=2",
    "data=2 shard=2 zero=2 pipeline=2 microbatches=4",
    "data=2 pipeline=2 schedule=zbv microbatches=4",
]


@pytest.fixture
def world(worlds):
    return worlds(4)


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
    [("data=2 experts=2", "pipeline=2 microbatches=4"), ("tensor=2", "data=2 experts=2")],
)
def test_experts_of_several_ranks_are_in_snapshots(worlds, tmp_path, first, then):
    job = cases.job_of(*cases.CHARS[:-1], "data.layers=2", "data.experts=4")
    before = worlds(2).run(cases.train_and_keep, job, first, tmp_path, 3)
    after = worlds(2).run(cases.go_on, job, then, tmp_path, 3)
    expected = cases.alone(job, steps=6)[0]
    np.testing.assert_allclose(before[0] + after[0], expected, rtol=0, atol=1e-9)


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


@pytest.mark.parametrize("words", ["data=4 shard=2 zero=3", "data=2 pipeline=2 microbatches=4"])
def test_training_goes_on_while_a_snapshot_is_written(world, reference, tmp_path, words):
    for losses, before, most, problems in world.run(
        cases.keep_while_training, JOB, words, tmp_path, False
    ):
        np.testing.assert_allclose(losses, reference, rtol=0, atol=1e-9)
        assert (before, most, problems) == (3, 1, [])
    assert latest(tmp_path)[0] == 5
    after = world.run(cases.go_on, JOB, "data=4", tmp_path, 5)
    np.testing.assert_allclose(after[0], reference[5:], rtol=0, atol=1e-9)


def test_two_snapshots_are_never_written_at_once(world, tmp_path):
    for _, _, most, _ in world.run(cases.keep_while_training, JOB, "data=4", tmp_path):
        assert most == 1
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
        "step-000006",
        "step-000007",
    ]


def test_ranks_killed_in_a_write_leave_the_snapshot_before(reference, tmp_path):
    with ranks.world(2) as two, pytest.raises((EOFError, ConnectionError)):
        two.run(cases.keep_and_die, JOB, "data=2 shard=2 zero=3", tmp_path)
    assert (tmp_path / "snapshots" / ".step-000005").exists()
    assert latest(tmp_path)[0] == 3
    with ranks.world(1) as one:
        after = one.run(cases.go_on, JOB, "data=1", tmp_path, 7)
    np.testing.assert_allclose(after[0], reference[3:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_under_a_snapshot_is_one_line_and_training_goes_on(
    world, reference, tmp_path, full
):
    """Of the leader, or of a server that shares no disk with it."""
    found = world.run(cases.keep_on_a_full_disk, JOB, "data=4 shard=2 zero=3", tmp_path, full)
    for losses, _, _, drafts in found:
        np.testing.assert_allclose(losses, reference, rtol=0, atol=1e-9)
        assert drafts == []
    assert found[0][2] == [3, 3, 10]
    (line,) = found[0][1]
    assert line.startswith(f"cannot write a snapshot to {tmp_path}")
    assert "the disk takes no more" in line
    assert line.endswith("(training goes on; free some space on that disk)")


def test_nothing_of_our_own_is_pickled_between_ranks():
    """torch's object collectives pickle: what they send is not ours. Pickles of processes on one
    machine, from multiprocessing, do not leave it."""
    own = Path(snapshots.__file__).parent
    words = re.compile(r"\bpickle\b|_object\b|object_list|weights_only=False|torch\.load")
    found = []
    for path in own.glob("*.py"):
        code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.S)
        found += [(path.name, word) for word in words.findall(code)]
    assert found == []
    assert words.findall("dist.send_object_list(x)") == ["object_list"]


def test_a_draft_is_no_snapshot(tmp_path):
    (tmp_path / "snapshots" / ".step-000005").mkdir(parents=True)
    (tmp_path / "snapshots" / "step-000007").mkdir()
    assert latest(tmp_path) is None


def test_a_snapshot_of_another_model_is_refused(tmp_path):
    with ranks.world(1) as one:
        one.run(cases.train_and_keep, JOB, "data=1", tmp_path, 1)
        with pytest.raises(EdgetrainError, match="cannot go on from the snapshot"):
            one.run(cases.go_on, cases.job_of(*cases.CHARS, "data.width=8"), "data=1", tmp_path, 1)
