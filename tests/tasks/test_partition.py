"""The laws of partitions: disjoint, complete, never empty, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.errors import TaskError
from edgetrain.tasks.partition import Shards, parse_partition, partition

SPECS = st.one_of(st.just("iid"), st.floats(1e-3, 1e6).map(lambda alpha: f"dirichlet({alpha!r})"))


@st.composite
def cases(draw):
    members = draw(st.integers(1, 20))
    labels = draw(st.lists(st.integers(0, 9), min_size=members, max_size=200))
    return draw(SPECS), np.array(labels), members, draw(st.integers(0, 2**32))


@given(cases())
def test_every_sample_belongs_to_exactly_one_member_and_nobody_is_empty(case):
    spec, labels, members, seed = case
    shards = partition(spec, labels, members, seed)
    assert len(shards) == members
    assert sorted(np.concatenate(shards)) == list(range(len(labels)))
    sizes = {len(shard) for shard in shards}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(shard) > 0).all() for shard in shards)


@given(cases())
def test_the_same_seed_gives_the_same_shards(case):
    for one, other in zip(partition(*case), partition(*case), strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_seed_gives_other_shards():
    labels = np.arange(1000) % 10
    for spec in ("iid", "dirichlet(0.3)"):
        assert (partition(spec, labels, 4, 0)[0] != partition(spec, labels, 4, 1)[0]).any()


def most_common_share(spec: str) -> float:
    """The mean share of a member's most common class, of ten equal ones."""
    labels = np.arange(10_000) % 10
    shards = partition(spec, labels, 10, seed=0)
    return float(np.mean([np.bincount(labels[shard]).max() / len(shard) for shard in shards]))


def test_a_small_alpha_skews_the_mixes_and_a_large_one_does_not():
    assert most_common_share("iid") < 0.15
    assert most_common_share("dirichlet(100000)") < 0.15
    assert most_common_share("dirichlet(0.001)") > 0.9
    assert most_common_share("iid") < most_common_share("dirichlet(1.0)") < 0.6


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("idd", "iid, dirichlet"),
        ("dirichlet", "iid, dirichlet"),
        ("dirichlet(x)", "iid, dirichlet"),
        ("dirichlet(1e)", "iid, dirichlet"),
        ("dirichlet(0)", "alpha must lie in 0.001"),
        ("dirichlet(1e9)", "alpha must lie in 0.001"),
        (3, "iid, dirichlet"),
    ],
)
def test_a_bad_partition_is_refused_with_what_is_known(spec, says):
    with pytest.raises(TaskError, match=says):
        parse_partition(spec)


def test_more_members_than_samples_are_refused_with_how_many_may_be():
    with pytest.raises(TaskError, match="use at most 10 members"):
        partition("iid", np.zeros(10, int), 11, 0)
    with pytest.raises(TaskError, match="use at most 3 members"):
        partition("iid", np.zeros(10, int), 4, 0, minimum=3)
    with pytest.raises(TaskError, match="at least 1"):
        partition("iid", np.zeros(10, int), 0, 0)


@given(
    size=st.integers(1, 40), members=st.integers(1, 5), batch=st.integers(1, 50),
    seed=st.integers(0, 2**40),
)  # fmt: skip
def test_batches_are_equal_in_size_and_take_every_sample_once_an_epoch(size, members, batch, seed):
    shards = Shards(np.zeros(size * members, int), "iid", seed=0)
    order, _ = shards.batches(members - 1, members, batch, seed)
    drawn = [next(order) for _ in range(2 * size)]
    assert {len(indices) for indices in drawn} == {batch}
    stream = np.concatenate(drawn)
    for epoch in range(len(stream) // size):
        taken = stream[epoch * size : (epoch + 1) * size]
        np.testing.assert_array_equal(np.sort(taken), shards.of(members - 1, members))


def test_members_of_one_seed_shuffle_differently():
    shards = Shards(np.zeros(200, int), "iid", seed=0)
    first, second = (next(shards.batches(member, 2, 100, 0)[0]) for member in (0, 1))
    ranks = [np.argsort(np.argsort(indices)) for indices in (first, second)]
    assert (ranks[0] != ranks[1]).any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((2, 2, 1, 0), "no member 2 of 2"),
        ((-1, 2, 1, 0), "no member -1 of 2"),
        ((0, 2, 0, 0), "a batch of 0"),
        ((0, 2, 1, -1), "seed = -1"),
    ],
)
def test_batches_that_cannot_be_are_refused_at_once(arguments, says):
    with pytest.raises(TaskError, match=says):
        Shards(np.zeros(8, int), "iid", seed=0).batches(*arguments)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", True])
def test_a_bad_seed_of_the_partition_is_refused(seed):
    with pytest.raises(TaskError, match=r"data\.seed"):
        Shards(np.zeros(8, int), "iid", seed)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**32))
def test_shared_shards_are_drawn_by_each_member_from_all(members, samples, seed):
    labels = np.zeros(30, np.int64)
    shards = partition(f"shared({samples})", labels, members, seed)
    assert [len(set(shard)) for shard in shards] == [samples] * members
    assert all(0 <= shard.min() <= shard.max() < 30 for shard in shards)
    again = partition(f"shared({samples})", labels, members + 3, seed)
    for one, other in zip(shards, again, strict=False):  # who else there is does not matter
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("spec", ["shared(0)", "shared(31)", "shared(-1)", "shared()"])
def test_a_shared_partition_out_of_range_is_refused(spec):
    with pytest.raises(TaskError, match="shared"):
        partition(spec, np.zeros(30, np.int64), 2, 0)
