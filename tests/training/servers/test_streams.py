"""Random numbers of a group: the same bits in every launch, equal where ranks hold the same, others
where they have other samples, positions or layers; and about the loss of one process."""

from __future__ import annotations

import group_cases
import loss_cases as cases
import numpy as np
import pytest
import torch

from edgetrain.jobs.placement.words import parse

pytestmark = pytest.mark.real

MOST = 1e-9
WORDS = ["data=2 microbatches=2", "tensor=2", "pipeline=2 microbatches=4", "sequence=2"]


def look(worlds, words, job=None):
    return worlds(parse(words).ranks).run(cases.train_and_look, job or cases.drop_job(), words)


@pytest.mark.parametrize("words", WORDS)
def test_a_job_has_the_same_bits_in_every_launch(worlds, words):
    first, again = look(worlds, words), look(worlds, words)
    assert [each[0] for each in first] == [each[0] for each in again]
    other = look(worlds, words, cases.drop_job("seed=1"))
    assert not torch.equal(first[0][1], other[0][1])


@pytest.mark.parametrize(
    ("words", "like"),
    [
        ("tensor=2", "data=1"),
        ("data=1 recompute=yes", "data=1"),
        ("data=2 shard=2 zero=3 recompute=yes", "data=2"),
        ("pipeline=2 schedule=zero-bubble microbatches=4",
         "pipeline=2 schedule=interleaved microbatches=4"),
    ],
)  # fmt: skip
def test_placements_that_hold_the_same_draw_the_same(worlds, words, like):
    np.testing.assert_allclose(look(worlds, words)[0][0], look(worlds, like)[0][0], atol=MOST)


def test_what_tensor_ranks_share_stays_the_same_on_both(worlds):
    (_, mine, whole), (_, theirs, others) = look(worlds, "tensor=2")
    assert torch.equal(mine, theirs)
    assert len(whole) > 10
    assert all(torch.equal(parameter, others[name]) for name, parameter in whole.items())


@pytest.mark.parametrize("words", ["data=2", "sequence=2", "pipeline=2 microbatches=1"])
def test_ranks_with_other_samples_positions_or_layers_draw_others(worlds, words):
    (_, mine, _), (_, theirs, _) = look(worlds, words)
    share = float((mine == theirs).double().mean())
    assert 0.7 < share < 0.95, "0.82 of elements that are drawn apart are alike"


def test_steps_and_micro_batches_draw_others(worlds):
    found = worlds(1).run(cases.masks, cases.drop_job(), "data=1 microbatches=2")[0]
    assert len(found) == 4
    assert len({mask.numpy().tobytes() for mask in found}) == 4


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(worlds, tmp_path):
    job, words = cases.drop_job(), "pipeline=2 microbatches=4"
    whole = worlds(2).run(group_cases.train, job, words, True, 6)[0][0]
    worlds(2).run(group_cases.train_and_keep, job, words, tmp_path, 3)
    assert worlds(2).run(group_cases.go_on, job, words, tmp_path, 3)[0] == whole[3:]


@pytest.mark.parametrize("count", [1, 4])
def test_a_loss_that_draws_hides_what_it_asks_for_in_a_pipeline(worlds, count):
    """The numbers of the loss on the first stage, which hides letters, are those on the last."""
    job, words = cases.job_of("drawn"), f"microbatches={count}"
    piped = worlds(2).run(group_cases.train, job, f"pipeline=2 {words}")[0][0]
    whole = worlds(1).run(group_cases.train, job, f"data=1 {words}")[0][0]
    np.testing.assert_allclose(piped, whole, rtol=0, atol=MOST)


@pytest.mark.parametrize("words", WORDS)
def test_the_mean_loss_of_five_seeds_is_that_of_one_process(worlds, words):
    alone, group = [], []
    for seed in range(5):
        job = cases.drop_job(f"seed={seed}", "data.layers=1")
        alone.append(np.mean(group_cases.alone(job)[0][-5:]))
        group.append(np.mean(worlds(2).run(group_cases.train, job, words)[0][0][-5:]))
    assert abs(np.mean(group) - np.mean(alone)) < np.std(alone, ddof=1)
