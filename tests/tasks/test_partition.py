"""The laws of partitions: disjoint, complete, never empty, the same for the same seed."""

from __future__ import annotations

import zlib

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


# -- as users have them ----------------------------------------------------------------------------

TEN = np.arange(10_000) % 10


def shares(shards, labels=TEN):
    return np.array([np.bincount(labels[s], minlength=10) / len(s) for s in shards])


def test_the_last_members_of_a_dirichlet_partition_are_like_the_others():
    """A class's share has the deviation of a Dirichlet-multinomial: 0.042."""
    drawn = [shares(partition("dirichlet(100)", TEN, 100, seed)) for seed in range(8)]
    exact = (0.09 * ((1 - 1 / 100) / 101 + 1 / 100)) ** 0.5
    for who in (slice(0, 50), slice(90, 99), slice(99, 100)):
        spread = float(np.std([each[who] - 0.1 for each in drawn]))
        assert abs(spread / exact - 1) < 0.15, who


@pytest.mark.parametrize(("members", "sums"), [(4, 4272004806), (8, 4008281954), (12, 1091531048)])
def test_a_small_alpha_has_the_shards_that_it_had(members, sums):
    """No mix is further from that of all data than a mix of one class."""
    shards = partition("dirichlet(0.3)", np.arange(1438) % 10, members, 0)
    assert zlib.crc32(np.concatenate(shards).astype("<i8").tobytes()) == sums


SIZED = ["iid", "dirichlet(0.5)", "dirichlet(100)", "shards(2)"]


@given(
    st.sampled_from(SIZED), st.sampled_from(["lognormal(1)", "zipf(1.2)", "zipf(0)"]),
    st.integers(1, 30), st.integers(0, 2**32),
)  # fmt: skip
def test_sizes_are_drawn_over_any_and_every_sample_has_a_member(base, sizes, members, seed):
    labels = TEN[:400]
    shards = partition(f"{base} | sizes({sizes})", labels, members, seed)
    assert sorted(np.concatenate(shards)) == list(range(400))
    lengths = sorted(map(len, shards))
    assert lengths[0] >= 1
    if sizes == "zipf(0)":
        assert lengths[-1] - lengths[0] <= 1
    elif members > 9:
        assert lengths[-1] > 2 * lengths[members // 2]


def test_sizes_follow_their_law():
    ranks = np.arange(1, 101) ** -1.2
    shards = partition("sizes(zipf(1.2))", np.zeros(100_000, int), 100, 3)
    found = np.sort([len(s) for s in shards])[::-1]
    np.testing.assert_allclose(found, 1 + 99_900 * ranks / ranks.sum(), atol=1)
    logs = np.log(
        [len(s) for s in partition("sizes(lognormal(0.5))", np.zeros(10**6, int), 999, 0)]
    )
    assert abs(np.std(logs) - 0.5) < 0.05


@pytest.mark.parametrize("each", [1, 2, 3])
def test_shards_are_so_many_stretches_of_the_labels(each):
    shards = partition(f"shards({each})", TEN, 50, 0)
    assert {len(s) for s in shards} == {200}
    classes = [len(np.unique(TEN[s])) for s in shards]
    assert max(classes) <= 2 * each
    assert sorted(np.concatenate(shards)) == list(range(10_000))
    assert each == 1 or np.mean(classes) > 1.5


def test_a_column_says_whose_samples_are_whose():
    writers = np.array(["b", "a", "c", "a", "b", "d"])
    columns = {"writer": writers}
    four = partition('by("writer")', np.zeros(6), 4, 0, columns=columns)
    assert [list(s) for s in four] == [[1, 3], [0, 4], [2], [5]]
    two = partition("by(writer)", np.zeros(6), 2, 0, columns=columns)
    assert [set(writers[one]) & set(writers[two[1]]) for one in two[:1]] == [set()]
    assert sorted(np.concatenate(two)) == list(range(6))
    by_label = partition("by(label)", np.array([1, 0, 1]), 2, 0)
    assert [list(s) for s in by_label] == [[1], [0, 2]]


@pytest.mark.parametrize("text", [
    '{"a": [3, 1], "b": [0]}', '[[1, 3], [0]]', '{"users": ["x", "y"], "num_samples": [2, 1]}',
])  # fmt: skip
def test_a_file_says_it(text, tmp_path):
    (tmp_path / "shards.json").write_text(text)
    shards = partition(f"given({tmp_path}/shards.json)", np.zeros(4, int), 2, 0)
    wanted = [[0, 1], [2]] if "num" in text else [[1, 3], [0]]
    assert [list(s) for s in shards] == wanted


@pytest.mark.parametrize(("spec", "says"), [
    ("by(user)", "no such column .did you mean 'users'"), ("by(users)", "2 values over 3 members"),
    ("by(users) | sizes(zipf(1))", "has its own sizes"), ("shards(0)", "at least 1 sample"),
    ("shards", "known: iid"), ("by()", "known: iid"), ("sizes(zipf(9))", "zipf must lie in 0 … 5"),
    ("iid | zipf(1)", "known: iid"), ("given(nowhere.json)", "nowhere.json"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(spec, says):
    with pytest.raises(TaskError, match=says):
        partition(spec, np.zeros(6, int), 3, 0, columns={"users": [1, 1, 1, 2, 2, 2]})


@pytest.mark.parametrize(("text", "says"), [
    ("[[0]]", "1 users over 2 members"), ("[[0], [9]]", "an index of 9"),
    ("[[0], []]", "0 indices"), ("{", "a JSON file"), ('[["a"], [0]]', "indices of type"),
])  # fmt: skip
def test_a_bad_file_is_one_line(text, says, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(TaskError, match=says):
        partition(f"given({tmp_path}/bad.json)", np.zeros(4, int), 2, 0)
