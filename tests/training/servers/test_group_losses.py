"""A loss that is more than a mean over samples is trained as in one process, or refused by name: in
the same words by a plan and by a run."""

from __future__ import annotations

import functools

import group_cases
import loss_cases as cases
import numpy as np
import pytest

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.placement.decision import check, decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.rules import resolve

pytestmark = pytest.mark.real

MOST = 1e-9


@functools.cache
def alone(of, says):
    return group_cases.alone(cases.job_of(of, says=says), steps=3)


def trained(worlds, of, words, says=False):
    found = worlds(parse(words).ranks).run(
        group_cases.train, cases.job_of(of, says=says), words, True, 3
    )
    losses, params = alone(of, says)
    for each in found:
        np.testing.assert_allclose(each[0], losses, rtol=0, atol=MOST)
    for mine, theirs in zip(found[0][1], params, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=MOST)


@pytest.mark.parametrize(
    ("of", "words"),
    [("counted", "data=2 microbatches=4"), ("masked", "data=2 shard=2 zero=3 microbatches=2"),
     ("masked", "sequence=2 microbatches=2"), ("counted", "pipeline=2 microbatches=8"),
     ("masked", "pipeline=2 schedule=zbv microbatches=4"), ("counted", "tensor=2"),
     ("masked", "data=2 pipeline=2 microbatches=4"), ("counted", "sequence=2 tensor=2")],
)  # fmt: skip
def test_a_mean_over_what_a_task_counts_is_that_of_all_ranks(worlds, of, words):
    trained(worlds, of, words, says=True)


@pytest.mark.parametrize(
    ("of", "words"),
    [("penalised", "data=2 shard=2 zero=2 microbatches=2"), ("penalised", "sequence=2"),
     ("shifted", "pipeline=2 microbatches=4"), ("negatives", "pipeline=2 microbatches=1"),
     ("summed", "tensor=2"), ("two_calls", "data=1")],
)  # fmt: skip
def test_a_plain_loss_is_trained_where_it_is_exact(worlds, of, words):
    trained(worlds, of, words)


@pytest.mark.parametrize(
    ("of", "words", "said"),
    [
        ("counted", "data=2", "is not the mean of its samples' losses (leave data out, or say"),
        ("counted", "pipeline=2 microbatches=4", "(leave microbatches out, or say"),
        ("counted", "sequence=2", "is not the mean of its slices' losses (leave sequence out"),
        ("negatives", "data=2 shard=2 zero=3", "its samples' losses"),
        ("summed", "data=2", "its samples' losses"),
        ("shifted", "sequence=2", "its slices' losses"),
        ("penalised", "pipeline=2 microbatches=4", "reads parameters, of which a rank has a part"),
        ("penalised", "tensor=2", "(leave tensor out, or use the optimizer's weight_decay)"),
        ("penalised", "data=2 shard=2 zero=3", "(leave zero out, or use"),
        ("penalised_first", "data=2", "reads parameters before it calls the model"),
        ("inside", "pipeline=2", "asks the model for more than its answer"),
        ("two_calls", "pipeline=2", "calls the model 3 times"),
        ("by_hand", "data=2", "passes a generator of its own to rand"),
    ],
)
def test_what_a_loss_cannot_bear_is_refused_by_plan_and_run_alike(worlds, of, words, said):
    job = cases.job_of(of)
    with pytest.raises(EdgetrainError) as run:
        worlds(2).run(group_cases.train, job, words)
    asked = question_of(resolve(cases.job_of(of, f"servers.placement={words}")))
    with pytest.raises(ConfigError) as planned:
        check(parse(words), asked.model, asked.servers, asked.work)
    assert said in str(planned.value)
    assert str(planned.value) == str(run.value)
    assert "\n" not in str(planned.value)


@pytest.mark.parametrize("of", ["a_number", "a_row", "elsewhere"])
def test_what_is_no_loss_is_one_line_from_plan_and_run(worlds, of):
    with pytest.raises(EdgetrainError) as run:
        worlds(2).run(group_cases.train, cases.job_of(of), "data=2")
    with pytest.raises(EdgetrainError) as planned:
        question_of(resolve(cases.job_of(of, "servers.placement=data=2")))
    for refused in (planned, run):
        assert str(refused.value).startswith("task 'char-lm': loss(model, batch) returns a ")
        assert str(refused.value).endswith("(the mean loss, a scalar with a graph)")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("of", "barred"),
    [("counted", {"data", "microbatches", "sequence"}), ("penalised", {"pipeline", "zero=3"})],
)
def test_the_planner_leaves_out_what_a_loss_cannot_bear(of, barred):
    words = "servers.placement=auto", "servers.fallback=when-needed"
    decisions = [decide(question_of(resolve(cases.job_of(each, *words)))) for each in ("plain", of)]
    free, left = (
        set().union(*(each.placement.parts for each in decision.found)) for decision in decisions
    )
    assert free & barred
    assert decisions[1].found
    assert not left & barred
    assert any(note.startswith("left out are ") for note in decisions[1].notes)
