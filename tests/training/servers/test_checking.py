"""The check before the first step finds what is planted, and nothing else."""

from __future__ import annotations

import planted
import pytest

from edgetrain.errors import EdgetrainError
from edgetrain.jobs.placement.decision import decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.plan import plan
from edgetrain.jobs.reading import load
from edgetrain.jobs.rules import resolve
from edgetrain.runs.folder import read_metrics
from edgetrain.training.servers import checking, group

DRAWN = """
import planted
import torch


class Drawn(planted.odd.Odd):
    def batches_from(self, member, members, batch, seed, start):
        for tokens, targets in super().batches_from(member, members, batch, seed, start):
            yield torch.randint_like(tokens, 2), targets
"""

pytestmark = pytest.mark.usefixtures("own_imports")


@pytest.mark.real
@pytest.mark.parametrize("defect", planted.DEFECTS)
def test_a_planted_defect_is_found(worlds, defect):
    said = worlds(2).run(planted.checked, defect)
    assert said[0] == said[1], "all ranks know"
    assert said[0].startswith(checking.DIFFERS), said[0]


@pytest.mark.real
def test_a_group_without_a_defect_passes(worlds):
    assert worlds(2).run(planted.checked, "a mask that is NaN", False) == ["", ""]


@pytest.mark.real
@pytest.mark.parametrize("defect", ["a gradient without its mean", "targets of other samples"])
def test_in_bf16_rounding_passes_and_a_defect_does_not(worlds, defect):
    assert worlds(2).run(planted.checked, defect, False, "bf16") == ["", ""]
    assert worlds(2).run(planted.checked, defect, True, "bf16")[0].startswith(checking.DIFFERS)


def run(folder, *words):
    job = load(None, ["task=planted:Mixed", "members=2", "batch=4", "steps=2", "optimizer=adamw",
                      *words])  # fmt: skip
    question = question_of(resolve(job), folder)
    group.run(plan(job, folder), decide(question).found[0], folder, question=question)
    return [each["reason"] for each in read_metrics(folder, "event") if each["event"] == "started"]


@pytest.mark.real
def test_another_result_ends_the_run_with_the_nearest_placement_that_holds(tmp_path):
    with pytest.raises(EdgetrainError) as caught:
        run(tmp_path, "servers.placement=sequence=2")
    said = str(caught.value)
    assert "\n" not in said
    assert "servers.check: sequence=2 computes the loss" in said
    assert "differs most" in said
    assert "servers.placement = 'data=1' computes the same" in said
    assert not list(read_metrics(tmp_path, "step")), "it ends before the first step"


@pytest.mark.real
def test_batches_that_no_seed_decides_are_named_as_what_differs(tmp_path, monkeypatch, own_imports):
    (tmp_path / "drawn.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EdgetrainError, match="data=2 is given other batches each time"):
        run(tmp_path, "task=drawn:Drawn", "servers.placement=data=2")


@pytest.mark.real
def test_it_can_be_left_out(tmp_path):
    assert run(tmp_path, "servers.placement=sequence=2", "servers.check=off")
    assert list(read_metrics(tmp_path, "step"))


@pytest.mark.real
@pytest.mark.parametrize(
    ("subject", "share", "said"),
    [("plain", 0.0, "GB of the leader's main memory"),
     ("random mask", checking.SHARE, ""), ("dropout", 0.25, "")],
)  # fmt: skip
def test_it_is_left_out_where_it_cannot_be(worlds, subject, share, said):
    for found in worlds(2).run(planted.left_out, subject, share, "data=2"):
        assert found.startswith("servers.check is left out: ") == bool(said)
        assert said in found


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "said"),
    [("data=2 shard=2 zero=3 recompute=yes microbatches=2", ""), ("tensor=2", ""),
     ("pipeline=2 microbatches=4", ""), ("sequence=2", "of other shapes than in one process")],
)  # fmt: skip
def test_a_model_that_draws_is_compared_with_the_same_numbers(worlds, words, said):
    for found in worlds(2).run(planted.left_out, "noise", checking.SHARE, words):
        assert said in found
        assert bool(found) == bool(said)
