"""Whose base is believed: laws over any order in which members speak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.checksums import BaseChecksums

TRUE = 7


def told(order: list[tuple[str, int]], members: int) -> tuple[BaseChecksums, list[str]]:
    checksums, wrong = BaseChecksums(), []
    for name, checksum in order:
        wrong += checksums.add_report(name, 1, checksum, members)
    return checksums, wrong


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, (n - 1) // 2))),
       st.randoms())  # fmt: skip
def test_fewer_than_half_cannot_get_anyone_else_expelled(sizes, random) -> None:
    members, liars = sizes
    order = [(f"liar{i}", 100 + random.randrange(2)) for i in range(liars)]
    order += [(f"m{i}", TRUE) for i in range(members - liars)]
    random.shuffle(order)
    checksums, wrong = told(order, members)
    assert checksums.get(1) == TRUE
    assert sorted(wrong) == sorted(name for name, checksum in order if checksum != TRUE)


def test_of_two_that_disagree_the_first_is_believed() -> None:
    checksums, wrong = told([("a", 1), ("b", 2)], 2)
    assert checksums.get(1) == 1
    assert wrong == ["b"]


@given(st.integers(1, 4))
def test_half_of_the_members_are_not_enough(half) -> None:
    checksums, wrong = told([(f"m{i}", 1) for i in range(half)], 2 * half + (half == 1))
    assert (checksums.get(1), wrong) == (0, [])


def test_what_the_hub_knows_itself_no_majority_moves() -> None:
    checksums = BaseChecksums({1: TRUE})
    assert [checksums.add_report(name, 1, 8, 3) for name in "abc"] == [("a",), ("b",), ("c",)]
    assert checksums.get(1) == TRUE


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    checksums = BaseChecksums()
    checksums.add_report("a", 1, 5, 3)
    checksums.forget_base(1)
    checksums.add_report("b", 1, 6, 3)
    checksums.add_report("c", 1, 6, 3)
    assert checksums.get(1) == 6
