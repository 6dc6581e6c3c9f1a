"""Steps of a group that add up several batches."""

from __future__ import annotations

import functools
from dataclasses import replace

import group_cases
import loss_cases
import numpy as np
import pytest

from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.search import evaluate
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.rules import resolve

MOST = 1e-9
JOBS = {
    "plain": group_cases.job_of(*group_cases.CHARS, "batch=2", "accumulate=3", "train.clip=0.5"),
    "counted": loss_cases.job_of("counted", "accumulate=3", says=True),
    "unnamed": group_cases.job_of(
        *group_cases.CHARS, "task=group_cases:unnamed", "batch=2", "accumulate=2"
    ),
}


@functools.cache
def alone(name):
    return group_cases.alone(JOBS[name], steps=3)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "data=2 microbatches=2"),
        ("plain", "data=2 shard=2 zero=3"),
        ("plain", "pipeline=2 microbatches=2"),
        ("plain", "pipeline=2 schedule=zbv microbatches=4"),
        ("counted", "data=2"),
        ("counted", "sequence=2"),
        ("counted", "pipeline=2 microbatches=1"),
        ("unnamed", "pipeline=2 microbatches=2"),
    ],
)
def test_a_step_of_several_batches_is_that_of_one_process(worlds, name, words):
    found = worlds(2).run(group_cases.train, JOBS[name], words, True, 3)
    losses, params = alone(name)
    for each in found:
        np.testing.assert_allclose(each[0], losses, rtol=0, atol=MOST)
    for mine, theirs in zip(found[0][1], params, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=MOST)


@pytest.mark.real
def test_a_run_that_goes_on_takes_the_batches_that_are_left(worlds, tmp_path):
    job, words = JOBS["plain"], "data=2"
    whole = worlds(2).run(group_cases.train, job, words, True, 4)[0][0]
    worlds(2).run(group_cases.train_and_keep, job, words, tmp_path, 2)
    assert worlds(2).run(group_cases.go_on, job, words, tmp_path, 2)[0] == whole[2:]


@pytest.mark.parametrize("words", ["data=2", "pipeline=2 microbatches=2"])
def test_a_plan_takes_longer_and_no_more_memory(words):
    asked = question_of(
        resolve(group_cases.job_of(*group_cases.CHARS, f"servers.placement={words}"))
    )
    placement = replace(parse(words), microbatches=2)
    found = [
        evaluate(asked.model, asked.servers, replace(asked.work, accumulate=each), placement)
        for each in (1, 4)
    ]
    assert 2.5 < found[1].seconds / found[0].seconds < 4
    assert found[1].bytes == pytest.approx(found[0].bytes, rel=0.2)
