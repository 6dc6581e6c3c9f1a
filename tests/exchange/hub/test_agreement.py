"""Whose base is believed: laws over any order in which members speak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.checksums import Agreement

TRUE = 7


def told(order: list[tuple[str, int]], members: int) -> tuple[Agreement, list[str]]:
    agreement, wrong = Agreement(), []
    for name, checksum in order:
        wrong += agreement.hear(name, 1, checksum, members)
    return agreement, wrong


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, (n - 1) // 2))),
       st.randoms())  # fmt: skip
def test_fewer_than_half_cannot_get_anyone_else_expelled(sizes, random) -> None:
    members, liars = sizes
    order = [(f"liar{i}", 100 + random.randrange(2)) for i in range(liars)]
    order += [(f"m{i}", TRUE) for i in range(members - liars)]
    random.shuffle(order)
    agreement, wrong = told(order, members)
    assert agreement.get(1) == TRUE
    assert sorted(wrong) == sorted(name for name, checksum in order if checksum != TRUE)


def test_of_two_that_disagree_the_first_is_believed() -> None:
    agreement, wrong = told([("a", 1), ("b", 2)], 2)
    assert agreement.get(1) == 1
    assert wrong == ["b"]


def test_what_the_hub_knows_itself_no_majority_moves() -> None:
    agreement = Agreement({1: TRUE})
    assert [agreement.hear(name, 1, 8, 3) for name in "abc"] == [("a",), ("b",), ("c",)]
    assert agreement.get(1) == TRUE


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    agreement = Agreement()
    agreement.hear("a", 1, 5, 3)
    agreement.forget(1)
    agreement.hear("b", 1, 6, 3)
    agreement.hear("c", 1, 6, 3)
    assert agreement.get(1) == 6
