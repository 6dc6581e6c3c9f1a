"""Optimizers in a group: those that look at whole tensors where ranks have them, refused elsewhere;
and parameters in groups of their own."""

from __future__ import annotations

import functools

import group_cases
import numpy as np
import optimizer_cases as cases
import pytest

from edgetrain.errors import ConfigError, EdgetrainError
from edgetrain.jobs.placement.decision import check, decide
from edgetrain.jobs.placement.question import question_of
from edgetrain.jobs.placement.words import parse
from edgetrain.jobs.rules import resolve

pytestmark = pytest.mark.real

MOST = 1e-9
BY_LAYER = ["Muon", "Adafactor", "lars", "LAMB"]
DIVIDED = {
    "name": "adamw", "lr": 0.003, "weight_decay": 0.5,
    "groups": [
        {"parameters": ["*norm*", "*.bias", "before_*"], "weight_decay": 0.0, "lr": 0.01},
        {"parameters": ["*embedding*", "bytes.*", "places.*"], "lr": 0.001},
    ],
}  # fmt: skip


def by_groups():
    job = group_cases.job_of(*group_cases.CHARS, "train.schedule=warmup(4)")
    job.train.optimizer.clear()
    job.train.optimizer.update(DIVIDED)
    return job


JOBS = {
    **{name: cases.weights_job(name) for name in BY_LAYER},
    "task": cases.grouped_job(),
    "job": by_groups(),
}


@functools.cache
def alone(name):
    return group_cases.alone(JOBS[name], steps=5)


def trained(worlds, name, words):
    found = worlds(parse(words).ranks).run(group_cases.train, JOBS[name], words, True, 5)
    losses, params = alone(name)
    for each in found:
        np.testing.assert_allclose(each[0], losses, rtol=0, atol=MOST)
    for mine, theirs in zip(found[0][1], params, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=MOST)


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.parametrize(
    "words",
    ["data=2 microbatches=2", "data=2 shard=2 zero=1", "pipeline=2 microbatches=4"],
)
def test_an_optimizer_by_layer_steps_whole_tensors(worlds, name, words):
    trained(worlds, name, words)


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.parametrize("words", ["data=2 shard=2 zero=2", "data=2 shard=2 zero=3"])
def test_parts_of_tensors_are_refused_by_plan_and_run_alike(worlds, name, words):
    job = cases.weights_job(name, f"servers.placement={words}")
    with pytest.raises(EdgetrainError) as run:
        worlds(2).run(group_cases.train, job, words)
    asked = question_of(resolve(job))
    with pytest.raises(ConfigError) as planned:
        check(parse(words), asked.model, asked.servers, asked.work)
    assert f"and {name} looks at whole tensors, of which ranks would have parts" in str(run.value)
    assert str(planned.value) == str(run.value)
    assert "\n" not in str(run.value)


def test_a_divided_layer_is_refused_and_left_out():
    words = ("servers.placement=auto", "servers.fallback=when-needed")
    job = group_cases.job_of(*group_cases.CHARS, "optimizer={ name = 'lamb' }", *words)
    asked = question_of(resolve(job))
    with pytest.raises(ConfigError, match="leave tensor out, or take adamw or sgd"):
        check(parse("tensor=2"), asked.model, asked.servers, asked.work)
    found = decide(asked).found
    assert found
    assert not any(each.placement.parts & {"tensor", "zero=2", "zero=3"} for each in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [("task", "data=2 shard=2 zero=1 microbatches=2"), ("job", "data=2 shard=2 zero=3"),
     ("task", "tensor=2"), ("job", "pipeline=2 schedule=zbv microbatches=4"),
     ("task", "data=2 shard=2 zero=1 recompute=yes")],
)  # fmt: skip
def test_groups_of_parameters_are_those_of_one_process(worlds, name, words):
    trained(worlds, name, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Adafactor", "data=2"), ("nadam", "data=2 shard=2 zero=3"), ("nadam", "tensor=1 data=2"),
     ("LAMB", "pipeline=2 microbatches=2"), ("Adafactor", "data=2 shard=2 zero=1")],
)  # fmt: skip
def test_what_an_optimizer_keeps_is_in_snapshots(worlds, name, words, tmp_path):
    job = cases.weights_job(name)
    whole = worlds(2).run(group_cases.train, job, words, True, 6)[0][0]
    worlds(2).run(group_cases.train_and_keep, job, words, tmp_path, 3)
    assert worlds(2).run(group_cases.go_on, job, words, tmp_path, 3)[0] == whole[3:]
