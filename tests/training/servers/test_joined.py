"""A group is a member like any other: replicas are equal bit for bit, and what it contributes is
what one process would."""

from __future__ import annotations

import group_cases as cases
import joined_cases
import numpy as np
import pytest

pytestmark = pytest.mark.real

SGD = ("optimizer=sgd", "lr=0.05", "optimizer.momentum=0.9")
ADAM = ("optimizer=adamw", "lr=0.001")
DGA = ("strategy=dga", "local_steps=2", "delay=3")


def check(worlds, most, *words, ranks=2):
    job = cases.job_of(*words, "members=3")
    found = worlds(ranks).run(joined_cases.beside_members, job)[0]
    assert len(set(found["sums"])) == 1, "replicas are equal bit for bit"
    assert np.abs(found["base"] - found["begins"]).max() > 1e-3, "it has trained"
    np.testing.assert_allclose(found["base"], found["one"], rtol=0, atol=most)
    one, group = found["figures"]
    assert group == pytest.approx(one, abs=2e-2)


@pytest.mark.parametrize(
    ("task", "optimizer", "strategy", "words"),
    [
        (cases.DIGITS, SGD, DGA, "data=2"),
        (cases.CHARS, ADAM, DGA, "data=2"),
        (cases.CHARS, SGD, ("strategy=fedavg", "local_steps=2"), "data=2 shard=2 zero=3"),
        (cases.DIGITS, ADAM, ("strategy=sync-sgd",), "data=2"),
        (cases.CHARS, SGD, ("strategy=sync-sgd",), "pipeline=2 microbatches=4"),
        (cases.CHARS, SGD, DGA, "pipeline=2 microbatches=4"),
        (("task=odd_models:Odd", "data.subject=batch norm"), SGD, DGA, "tensor=2"),
        (cases.CHARS, ADAM, ("strategy=sync-sgd",), "tensor=2"),
        (cases.CHARS, SGD, (*DGA, "codec=topk(0.1) | q2"), "data=2"),
        (
            cases.DIGITS,
            SGD,
            ("strategy=fedavg", "local_steps=2", "privacy=member", "noise=0.01"),
            "data=2",
        ),
        (cases.DIGITS, SGD, ("strategy=sync-sgd", "codec=topk(0.1) | q2"), "data=2"),
    ],
)
def test_a_group_is_a_member_like_any_other(worlds, task, optimizer, strategy, words):
    most = 1e-6 if optimizer is SGD else 1e-4
    check(worlds, most, *task, *optimizer, *strategy, f"servers.placement={words}")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (("strategy=fedavg", "local_steps=1", "strategy.weighting=shares"), "data=2"),
        (
            ("strategy=fedavg", "local_steps=1", "strategy.weighting=samples"),
            "data=2 shard=2 zero=3",
        ),
        (("strategy=sync-sgd", "strategy.weighting=shares"), "data=2"),
        (("strategy=dga", "local_steps=1", "delay=0", "strategy.weighting=shares"), "pipeline=2"),
    ],
)
def test_a_group_of_two_shares_counts_as_two_members(worlds, strategy, words):
    """One step a round, without momentum: w - lr (g0 + g1 + 2 (g2 + g3) / 2) / 4 either way."""
    task = (*cases.CHARS, "optimizer=sgd", "lr=0.05", *strategy)
    job = cases.job_of(*task, "members=3", "device=host:2, servers", "servers.shares=2",
                       f"servers.placement={words}")  # fmt: skip
    found = worlds(2).run(joined_cases.shares_beside_members, job, cases.job_of(*task))[0]
    assert np.abs(found["base"] - found["begins"]).max() > 1e-3, "it has trained"
    np.testing.assert_allclose(found["base"], found["one"], rtol=0, atol=1e-6)
