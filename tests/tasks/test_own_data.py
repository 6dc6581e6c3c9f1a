"""Data that a member holds out of its own: which samples, and figures as sums and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edgetrain
from edgetrain import tasks
from edgetrain.errors import ConfigError, TaskError
from edgetrain.tasks.own_data import (
    MOST_FIGURES,
    evaluation_of,
    hold_out,
    quotients,
)
from edgetrain.tasks.partition import Shards

PARTITIONS = ("iid", "dirichlet(0.3)", "shards(2)", "iid | sizes(lognormal(1.0))", "shared(7)")


@given(
    spec=st.sampled_from(PARTITIONS),
    share=st.floats(1e-9, 0.9),
    members=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_a_shard_is_split_and_nothing_of_it_is_lost(spec, share, members, seed):
    labels = np.arange(60) % 5
    whole, split = Shards(labels, spec, seed), Shards(labels, spec, seed)
    split.hold_out = share
    for member in range(members):
        shard = whole.of(member, members)
        trained, held = split.of(member, members), split.held_out(member, members)
        assert sorted([*trained, *held]) == [*shard]
        assert len(trained) >= 1
        wanted = max(1, round(share * len(shard)))
        assert len(held) == min(wanted, len(shard) - 1)
        assert (np.diff(trained) > 0).all()
        assert (np.diff(held) > 0).all()
        assert not len(whole.held_out(member, members))


def test_other_members_hold_out_other_places():
    shards = Shards(np.zeros(200, int), "shared(all)", 0)
    shards.hold_out = 0.1
    assert {*shards.held_out(0, 2)} != {*shards.held_out(1, 2)}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
def test_figures_of_parts_are_those_of_the_whole(sizes, seed):
    """No mean of means, however the samples are cut into batches."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=size) for size in sizes]
    found = quotients({"x": (float(part.sum()), float(len(part)))} for part in parts)
    assert math.isclose(found["x"], np.concatenate(parts).mean(), rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("made", [
    lambda: tasks.digits(), lambda: tasks.char_lm(limit_bytes=60_000, context=16, width=8, heads=2),
])  # fmt: skip
def test_built_in_tasks_find_on_members_data_what_they_find_on_all_of_it(made):
    task, members = made(), 3
    hold_out(task, 0.25)
    model = task.model()
    every = [evaluation_of(task, [member], members) for member in range(members)]
    together = evaluation_of(task, range(members), members)(task, model)
    for name, (value, count) in together.items():
        parts = [evaluate(task, model)[name] for evaluate in every]
        assert math.isclose(sum(each for each, _ in parts), value, rel_tol=1e-5)
        assert sum(each for _, each in parts) == count
        assert count == sum(len(task.shards.held_out(m, members)) for m in range(members))
    held = np.concatenate([task.shards.held_out(m, members) for m in range(members)])
    assert len(held) == len({*held})


def test_a_task_of_a_users_data_holds_out_too():
    inputs, labels = torch.randn(40, 3), torch.arange(40) % 2
    task = edgetrain.task(
        nn.Linear(3, 2), train=(inputs, labels), test=(inputs, labels), metric="accuracy"
    )
    assert evaluation_of(task, [0], 2) is None
    hold_out(task, 0.5)
    model = task.model()
    sums = evaluation_of(task, [0, 1], 2)(task, model)
    held = np.concatenate([task.shards.held_out(m, 2) for m in range(2)])
    right = (model(inputs[held]).argmax(1) == labels[held]).sum()
    assert sums["accuracy"] == (float(right), 20.0)
    hold_out(task, 0.0)
    assert task.samples(0, 2) == 20


class Own:
    """A task that deals its data out itself."""

    name, metric, better, target = "own", "loss", "lower", None

    def __init__(self, measure=None):
        if measure is not None:
            self.measure = lambda model, batch: measure

    def held_out(self, member, members):
        return [(torch.full((member + 1, 1), float(member)),)] if member < members - 1 else []

    def loss(self, model, batch):
        return model(batch[0]).mean()


def test_a_task_that_says_no_more_is_measured_by_its_loss():
    task, model = Own(), nn.Identity()
    model.weight = nn.Parameter(torch.zeros(()))
    model.train()
    assert evaluation_of(task, [2], 3) is None
    assert evaluation_of(task, [0, 1], 3)(task, model) == {"loss": (2.0, 3.0)}
    assert model.training


def test_sums_of_any_kind_of_number_become_plain_ones():
    task = Own({"loss": (torch.tensor(3), np.int64(4)), "hits": (1, 2)})
    found = evaluation_of(task, [0], 2)(task, nn.Linear(1, 1))
    assert found == {"loss": (3.0, 4.0), "hits": (1.0, 2.0)}
    assert {type(each) for pair in found.values() for each in pair} == {float}


@pytest.mark.parametrize(("measure", "said"), [
    ({}, "0 figures"),
    ({str(n): (0.0, 1.0) for n in range(MOST_FIGURES + 1)}, "257 figures"),
    ({"x" * 41: (0.0, 1.0)}, "a figure named"),
    ({"a\n": (0.0, 1.0)}, "a figure named"),
    ({"loss": (0.0, -1.0)}, "'loss' over -1.0"),
    ({"loss": (0.0, math.nan)}, "'loss' over nan"),
    ({"loss": 0.5}, r"gives \{'loss': 0\.5\} \(a sum and a count"),
    ({"loss": ("high", 1)}, r"gives \{'loss': \('high', 1\)\}"),
    ([0.5], r"gives \[0\.5\]"),
])  # fmt: skip
def test_what_are_no_sums_and_counts_is_refused(measure, said):
    task, model = Own(measure), nn.Linear(1, 1)
    with pytest.raises(TaskError, match=said):
        evaluation_of(task, [0], 2)(task, model)


def test_a_task_without_shards_of_ours_cannot_hold_out_by_a_share():
    with pytest.raises(ConfigError, match=r"train\.hold_out = 0\.1: task 'own'"):
        hold_out(Own(), 0.1)
    hold_out(Own(), 0.0)
